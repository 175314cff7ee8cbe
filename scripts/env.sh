# shellcheck shell=bash
# Sourced by the other scripts: goes to the root of the repository and gives them `install`.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# Install this package into .venv and put that first on PATH. $1: extras such as [test], or nothing.
# Quick when it was done before: a stamp in .venv says for which pyproject.toml.
install() {
    local extras="${1:-}" stamp=".venv/.installed${1:-}" wanted
    wanted="$(cksum pyproject.toml) $PWD"
    if [[ ! -e "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
        make_venv
        echo "Installing into .venv; the first time this takes a few minutes."
        .venv/bin/python -m pip install -q --disable-pip-version-check -e ".$extras"
        echo "$wanted" >"$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}

make_venv() {
    local python
    if [[ -x .venv/bin/python ]] && is_supported .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        return
    fi
    python="$(find_python)"
    # Debian's python3 has no ensurepip without the package python3-venv: then the outer pip brings the inner one.
    "$python" -m venv --clear .venv >/dev/null 2>&1 || {
        "$python" -m venv --clear --without-pip .venv
        "$python" -m pip --python .venv/bin/python install -q --disable-pip-version-check pip
    }
}

find_python() {
    local candidate candidates=(python3 python3.11 python3.10)
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "error: ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true)." \
        "MindSpore 2.7.1 needs Python 3.10 or 3.11: install one, or name it, as in PYTHON=/path/to/python3.11 bash $0" >&2
    return 2
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' 2>/dev/null
}
