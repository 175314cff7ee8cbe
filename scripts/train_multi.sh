#!/usr/bin/env bash
# Train on several devices of this server, one process for each, under msrun.
#
#   DEVICES=8 bash scripts/train_multi.sh FLAGS
#
# FLAGS are those of train_dreambooth_lora_flux.py, which lists them with --help-all. Prompts and pictures are encoded
# once, before the workers start. --train_batch_size counts pictures on each device.
# Variables:
#   DEVICES     how many devices (default: 8)
#   PORT      of msrun's scheduler (default: a free one)
#   LOG_DIR   folder for the logs, worker_0.log and so on (default: logs in --output_dir)
#   BIND_CORE  1 ties each worker to CPU cores near its device (default: not tied)
#   PYTHON    the python of your environment (default: the one on PATH that has MindSpore, then .venv)
# Ctrl-C, SIGTERM and SIGHUP stop all devices after the same step, with a checkpoint. The exit code is that of the run.
set -euo pipefail
# shellcheck source=scripts/devices.sh
source "$(dirname "${BASH_SOURCE[0]}")/devices.sh"

help_if_asked "$@"
launch --devices "${DEVICES:-${CARDS:-8}}" -- "$@"
