#!/usr/bin/env bash
# The whole job on a CPU: install, make a tiny FLUX and a few pictures, train, draw samples.
# Arguments go to the trainer: bash scripts/demo.sh --max_train_steps 10
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install
python -m flux_db tiny-model outputs/demo/model
python -m flux_db demo-pictures outputs/demo/pictures
# The trainer's last lines are the paths of the LoRA file, of the sample pictures and of report.html.
exec python train_dreambooth_lora_flux.py --config configs/demo_cpu.yaml "$@"
