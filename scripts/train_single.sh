#!/usr/bin/env bash
# Train on one device.
#
#   bash scripts/train_single.sh FLAGS
#
# FLAGS are those of train_dreambooth_lora_flux.py, which lists them with --help-all.
# Variables:
#   LOG_DIR   folder for the log, worker_0.log (default: logs in --output_dir)
#   PYTHON    the python of your environment (default: the one on PATH that has MindSpore, then .venv)
#   DEVICE_ID which device (default: 0)
set -euo pipefail
# shellcheck source=scripts/devices.sh
source "$(dirname "${BASH_SOURCE[0]}")/devices.sh"

help_if_asked "$@"
launch --devices 1 -- "$@"
