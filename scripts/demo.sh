#!/usr/bin/env bash
# The whole job on a CPU: install, write a small FLUX and five pictures of one dog, train, draw samples, score them.
# Arguments go to the trainer: bash scripts/demo.sh --max_train_steps 10
set -euo pipefail
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install
python -m flux_db tiny-model --size small outputs/demo/model
python -m flux_db demo-pictures outputs/demo/pictures
python train_dreambooth_lora_flux.py --config configs/demo_cpu.yaml "$@"
python -m flux_db score outputs/demo/run
cat <<'END'

What to look at: outputs/demo/run/samples/grid.png, or report.html beside it in a browser. Each row is a step, and
each column starts from the same noise. outputs/demo/pictures shows the dog that was learned: one ear up, one brown
and hanging, a brown eye patch and saddle, a turquoise collar.
  - First row: the model does not know "sks dog" and draws some dog, usually an orange one.
  - Last row, left: that dog, in places where it was never photographed.
  - Last row, right: other animals, which have taken on a little of it. Fewer steps, prior preservation and
    --preserve_class are the means against that (docs/training.md).
The table above gives the same as numbers, from 0 to 1: "subject" should rise, "subject in class" stay low.
Before the commands of README.md, activate the environment: source .venv/bin/activate
END
