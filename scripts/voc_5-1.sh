#!/usr/bin/env bash
# The protocol 5-1 on PASCAL VOC 2012 with the paper's recipe, on all GPUs of this machine (GPUS=n for n of them).
#   bash scripts/voc_5-1.sh <VOC2012 folder> [overlay.yaml ...] [key.sub=value ...]
# MiB with AlterSGD:  bash scripts/voc_5-1.sh /data/VOC2012 configs/methods/mib.yaml configs/altersgd.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch_protocol "$0" "$@"
