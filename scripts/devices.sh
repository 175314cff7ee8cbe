# shellcheck shell=bash
# Sourced by the train scripts: `launch` starts the trainer with the environment's python, wherever it is called from.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# $1: what comes before the trainer's flags, as one word per argument up to --; then the flags.
launch() {
    local python
    python="$(environment_python)"
    PATH="$(dirname "$python"):$PATH" \
        exec "$python" "$root/flux_db/__main__.py" launch ${LOG_DIR:+--log_dir "$LOG_DIR"} ${PORT:+--port "$PORT"} \
        ${BIND_CORE:+--bind_core} "$@"
}

# The first python that has MindSpore: $PYTHON, the active environment's, or the one that demo.sh and test.sh made.
environment_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python python3 "$root/.venv/bin/python"; do
        candidate="$(command -v "$candidate")" || continue
        if "$candidate" -c 'import sys; del sys.path[0]; import importlib.util as u; sys.exit(not (u.find_spec("mindspore") and u.find_spec("mindone")))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no python with mindspore and mindone was found: activate your environment, name its python as in" \
        "PYTHON=/path/to/python, or let bash scripts/demo.sh make one" >&2
    return 2
}

# Show the comment at the head of the calling script if help was asked for.
help_if_asked() {
    if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
        sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
    fi
}
