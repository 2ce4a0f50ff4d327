#!/usr/bin/env bash
# Joint training on all classes: the upper bound on PASCAL VOC 2012 with the paper's recipe, on all GPUs of this machine (GPUS=n for n of them).
#   bash scripts/voc_offline.sh <VOC2012 folder> [overlay.yaml ...] [key.sub=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch_protocol "$0" "$@"
