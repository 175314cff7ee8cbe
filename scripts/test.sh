#!/usr/bin/env bash
# Install what the tests need, then check style and run the tests.
# Arguments go to pytest: bash scripts/test.sh tests/test_config.py -k bounds
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install "[test]"
python -m ruff check .
python -m ruff format --check .
python -m pytest -q "$@"
