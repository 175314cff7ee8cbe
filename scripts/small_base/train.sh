#!/usr/bin/env bash
# Train the small model and its judge from nothing, or go on where it was stopped: bash scripts/small_base/train.sh
# Minutes of each stage on two free cores; more if the cores are shared. PYTHON names an interpreter with the extra interop.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=.
python="${PYTHON:-.venv-interop/bin/python}"
vae="${VAE_MINUTES:-26}" flow="${FLOW_MINUTES:-65}" judge="${JUDGE_MINUTES:-6}"

"$python" scripts/small_base/train_vae.py --minutes "$vae" --threads 1
"$python" scripts/small_base/smoothness.py
"$python" scripts/small_base/train_flow.py --minutes "$flow" --threads 2
# The latents stay as they are; the decoder learns for another third of the VAE's time.
"$python" scripts/small_base/train_vae.py --decoder --minutes "$((vae * 4 / 3))" --threads 1
"$python" scripts/small_base/train_judge.py --minutes "$judge"
# Stops and prints the VAE's factors if flux_db/demo/tiny_model.py has others.
"$python" scripts/small_base/pack.py
"$python" scripts/small_base/evaluate.py
