#!/usr/bin/env bash
# The tests on another MindSpore, in an environment of its own: bash scripts/versions.sh 2.9.0 [pytest arguments]
# Without arguments for pytest: all tests. PYTHON=/path/to/python3.12 names the interpreter.
set -euo pipefail
if [[ $# -eq 0 || "$1" == -* ]]; then
    sed -n '2,3{s/^# //p}' "$0"
    exit 2
fi
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export MINDSPORE="$1" PYTHONUTF8=1
venv=".venv-$1"
shift
install "[test]"
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
