#!/usr/bin/env bash
# Train on several servers, under msrun. Start it on every server, with the same FLAGS and another NODE_RANK:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=192.168.1.10 DEVICES=8 bash scripts/train_nodes.sh FLAGS
#   NODES=2 NODE_RANK=1 MASTER_ADDR=192.168.1.10 DEVICES=8 bash scripts/train_nodes.sh FLAGS
#
# FLAGS are those of train_dreambooth_lora_flux.py, which lists them with --help-all. All folders in them must be on a
# system that all servers see. The first server encodes; the others wait for it.
# Variables:
#   NODES        how many servers
#   NODE_RANK    number of this server, from 0
#   MASTER_ADDR  IP address of server 0
#   DEVICES        devices on each server (default: 8)
#   PORT         of msrun's scheduler on server 0 (default: 8118; the next one must be free as well)
#   LOG_DIR      folder for the logs, server_0/worker_0.log and so on (default: logs in --output_dir)
#   BIND_CORE  1 ties each worker to CPU cores near its device (default: not tied)
#   PYTHON       the python of your environment (default: the one on PATH that has MindSpore, then .venv)
set -euo pipefail
# shellcheck source=scripts/devices.sh
source "$(dirname "${BASH_SOURCE[0]}")/devices.sh"

help_if_asked "$@"
: "${NODES:?how many servers; see --help}" "${NODE_RANK:?number of this server, from 0; see --help}" \
    "${MASTER_ADDR:?IP address of server 0; see --help}"
launch --devices "${DEVICES:-${CARDS:-8}}" --nodes "$NODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" -- "$@"
