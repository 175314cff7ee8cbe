#!/usr/bin/env bash
# Which lines of flux_db the tests run, in their own processes and in those that they start: a table for each file.
# Takes half as long again as the tests. What MindSpore compiles is read by its parser and not run by Python, so that
# the body of a `construct` counts as not run; so do the lines of a process that a signal ended.
# Arguments go to pytest: bash scripts/coverage.sh tests/settings
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

export PYTHONUTF8=1
install "[test]"
python -m pip install -q --disable-pip-version-check "coverage>=7.10" pytest-cov

data="$(mktemp -d)"
hook="$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/flux_db_coverage.pth"
trap 'rm -rf "$hook" "$data"' EXIT
cat >"$data/config" <<END
[run]
source = $PWD/flux_db
data_file = $data/lines
parallel = true
END
# The tests start the program in a bare environment, so the hook names the file; pytest's processes have pytest-cov.
cat >"$hook" <<END
import os, sys; exec("if 'pytest' not in sys.orig_argv and not any('stdin.readline' in word for word in sys.orig_argv): os.environ['COVERAGE_PROCESS_START'] = '$data/config'; import coverage; coverage.process_startup()")
END
python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --cov=flux_db --cov-config="$data/config" --cov-report= \
    "$@" || echo "Some tests failed; what they ran is counted."
python -m coverage combine -q --append --rcfile="$data/config" >/dev/null 2>&1 || true  # what came after pytest's own count
python -m coverage report --rcfile="$data/config"
