#!/usr/bin/env bash
# Install what the tests need, then check style and run the tests.
# Arguments go to pytest: bash scripts/test.sh tests/settings -k bounds
# With --interop first: the live comparison with diffusers on torch instead, which lives in .venv-interop.
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Torch and MindSpore want different versions of numpy, so the reference has an environment of its own.
install_reference() {
    local stamp=.venv-interop/.installed wanted
    wanted="$(cksum pyproject.toml) $PWD"
    if [[ -e "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        return
    fi
    echo "Installing torch and diffusers into .venv-interop; the first time this takes a few minutes."
    python -m venv --clear --without-pip .venv-interop
    reference_packages | python -m pip --python .venv-interop/bin/python install -q --disable-pip-version-check -r /dev/stdin
    echo "$wanted" >"$stamp"
}

# What the extra `interop` names, without this package and its MindSpore.
reference_packages() {
    python -c '
from importlib.metadata import requires
print("\n".join(line.split(";")[0] for line in requires("flux-db") if "interop" in line.partition(";")[2]))'
}

# Tests write file names and captions in many languages, whatever the locale of this machine is.
export PYTHONUTF8=1
install "[test]"
if [[ "${1:-}" == --interop ]]; then
    shift
    install_reference
    FLUX_DB_TORCH_PYTHON="$PWD/.venv-interop/bin/python" exec python -m pytest -q tests/interop "$@"
fi
python -m ruff check .
python -m ruff format --check .
# Two at a time: most of the time goes into compiling graphs, which uses one core. Files stay whole, because their
# tests share runs, and are dealt in the order of tests/conftest.py: the longest first.
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
