#!/usr/bin/env bash
# The protocol 50-20 on ADE20K with the paper's recipe, on all GPUs of this machine (GPUS=n for n of them).
#   bash scripts/ade_50-20.sh <ADEChallengeData2016 folder> [overlay.yaml ...] [key.sub=value ...]
# MiB with AlterSGD:  bash scripts/ade_50-20.sh /data/ADEChallengeData2016 configs/methods/mib.yaml configs/altersgd.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch_protocol "$0" "$@"
