#!/usr/bin/env bash
# Train the small model and its judge from nothing, or go on where it was stopped: bash scripts/small_base/train.sh
# About 90 minutes on two free cores; more if the cores are shared. PYTHON names an interpreter with the extra interop.
# With --go_on it starts from the networks in flux_db/demo/small and trains all but the VAE further.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=. OMP_NUM_THREADS=1
python="${PYTHON:-.venv-interop/bin/python}"
work="${WORK:-outputs/small_base}"
mkdir -p "$work"

# Run a script of this folder, unless it has ended well before. $1: name of the stage
stage() {
    local mark="$work/done_$1" script="$2"
    if [[ ! -e "$mark" ]]; then
        echo "== $1"
        "$python" "scripts/small_base/$script" "${@:3}" --work "$work"
        touch "$mark"
    fi
}

# Processor time on each of two cores.
if [[ "${1:-}" == --go_on ]]; then
    stage unpack unpack.py
else
    # The first two stages are where the later ones start from: see narrow.py.
    stage wide_vae train_vae.py --minutes 15
    stage wide_flow train_flow.py --minutes 18
    stage narrow_vae narrow.py vae
    stage vae train_vae.py --minutes 5
    stage balance narrow.py balance
    stage narrow_flow narrow.py flow
fi
stage flow train_flow.py --minutes "${FLOW_MINUTES:-43}"
stage judge train_judge.py --minutes 6
# Stops and prints the VAE's factors if flux_db/demo/tiny_model.py has others.
stage pack pack.py
"$python" scripts/small_base/evaluate.py --work "$work"
