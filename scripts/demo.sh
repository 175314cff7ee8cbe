#!/usr/bin/env bash
# The whole job on a CPU: install, write a small FLUX and pictures of one dog, train, draw samples, score them.
# Arguments go to the trainer: bash scripts/demo.sh --max_train_steps 10
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install
python -m flux_db tiny-model --size small outputs/demo/model
python -m flux_db demo-pictures --size 64 outputs/demo/pictures
python train_dreambooth_lora_flux.py --config configs/demo_cpu.yaml "$@"
python -m flux_db score outputs/demo/run
cat <<'END'

What to look at: outputs/demo/run/samples/grid.png, with steps down and prompts across.
The first columns are "sks dog" in places where it was not photographed: at step 0 any dog, at the last step the dog
of outputs/demo/pictures, with one ear up, a brown patch around one eye and a blue-green collar.
The last columns are other dogs, without the word sks: they should still be other dogs.
END
