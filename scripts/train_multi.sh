#!/usr/bin/env bash
# Train on several cards of this server, one process for each, under msrun.
#
#   CARDS=8 bash scripts/train_multi.sh FLAGS
#
# FLAGS are those of train_dreambooth_lora_flux.py, which tells them with --help. Prompts and pictures are encoded once,
# before the workers start. --train_batch_size counts pictures on each card.
# Variables:
#   CARDS     how many cards (default: 8)
#   PORT      of msrun's scheduler (default: a free one)
#   LOG_DIR   folder for the logs, worker_0.log and so on (default: logs in --output_dir)
#   PYTHON    the python of your environment (default: the one on PATH that has MindSpore, then .venv)
# Ctrl-C, SIGTERM and SIGHUP stop all cards after the same step, with a checkpoint. The exit code is that of the run.
set -euo pipefail
# shellcheck source=scripts/cards.sh
source "$(dirname "${BASH_SOURCE[0]}")/cards.sh"

help_if_asked "$@"
launch --cards "${CARDS:-8}" -- "$@"
