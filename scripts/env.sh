# shellcheck shell=bash
# Sourced by the other scripts: goes to the root of the repository and gives them `install`.
# MINDSPORE=2.9.0 in the environment chooses a version; without it an installed one is kept, or else the newest that
# pyproject.toml allows is installed.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
venv=.venv

# Install this package into the environment and put that first on PATH. $1: extras such as [test], or nothing.
# Quick when it was done before: a stamp says for which pyproject.toml.
install() {
    local extras="${1:-}" stamp="$venv/.installed${1:-}" wanted version
    wanted="$(cksum pyproject.toml) $PWD ${MINDSPORE:-}"
    if [[ ! -e "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
        make_venv
        version="${MINDSPORE:-$(installed_mindspore)}"
        echo "Installing into $venv; the first time this takes a few minutes."
        "$venv/bin/python" -m pip install -q --disable-pip-version-check -e ".$extras" ${version:+"mindspore==$version"}
        echo "$wanted" >"$stamp"
    fi
    export PATH="$PWD/$venv/bin:$PATH"
}

installed_mindspore() {
    "$venv/bin/python" -c 'from importlib.metadata import version; print(version("mindspore"))' 2>/dev/null || true
}

make_venv() {
    local python
    if [[ -x "$venv/bin/python" ]] && is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    python="$(find_python)"
    # Debian's python3 has no ensurepip without the package python3-venv: then the outer pip brings the inner one.
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 || {
        "$python" -m venv --clear --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install -q --disable-pip-version-check pip
    }
}

find_python() {
    local candidate candidates=(python3 python3.12 python3.11 python3.10)
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true). MindSpore${MINDSPORE:+ $MINDSPORE}" \
        "needs Python 3.10 to $(newest_python): install one, or name it, as in PYTHON=/path/to/python3.11 bash $0" >&2
    return 2
}

# There is no wheel of 2.7.1 for Python 3.12.
newest_python() {
    [[ "${MINDSPORE:-}" == 2.7.1 ]] && echo 3.11 || echo 3.12
}

is_supported() {
    "$1" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= ($(newest_python | tr . ,)))" 2>/dev/null
}
