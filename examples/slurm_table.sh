#!/usr/bin/env bash
# Table 1 of the AlterSGD paper on a Slurm cluster, three seeds, and the report.
#   bash examples/slurm_table.sh <VOC2012 folder> <runs folder> [arguments of scripts.reproduce, which win]
# <runs folder> must be on a disk that all machines see, and submitit is needed (.venv/bin/python -m pip install submitit).
# Started again, it finds its jobs in the queue, or resumes.
set -euo pipefail
case "${1:-}" in -h | --help | "") sed -n '2,5s/^# //p' "$0"; exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
install requirements.txt
root="$(cd "$called_from" && realpath "$1")"
runs="$(cd "$called_from" && realpath --canonicalize-missing "$2")"
shift 2
table=(table1 --preset voc --root "$root" --runs "$runs" --pretrained imagenet --seeds 1 2 3)

# 1. The plan: every run with its state and an estimate of the hours. Nothing is started.
"$PYTHON" -m scripts.reproduce "${table[@]}" "$@" --dry-run

# 2. The jobs: step 0 of each seed first, then job arrays that wait for it. Partition, time and GPUs are your cluster's.
"$PYTHON" -m scripts.reproduce "${table[@]}" --launcher slurm --gpus 2 --threads 16 \
  --slurm slurm_partition=gpu --slurm timeout_min=600 "$@"

# 3. How far everything is (in a second terminal, while jobs run), and the tables beside the paper's.
"$PYTHON" -m scripts.status "$runs"
"$PYTHON" -m scripts.report "$runs" --out "$runs/report"
