#!/usr/bin/env bash
# My data set with two protocols, shown with CamVid as it comes: masks of 0..11, where 11 is not labelled, and no background.
#   bash examples/my_data.sh <CamVid folder> [overlay.yaml ...] [key.sub=value ...]       the rest goes to every run
# Started again, it resumes. RUNS (default runs/my-data) is where everything is written. The traps: docs/own-data.md.
set -euo pipefail
case "${1:-}" in -h | --help | "") sed -n '2,4s/^# //p' "$0"; exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
install requirements.txt
runs="${RUNS:-runs/my-data}"
root="$(cd "$called_from" && realpath "$1")"
shift

# 1. What CamVid lacks: the names of its classes, with their colours. And its lists begin with a place on somebody else's disk.
[ -e "$root/classes.txt" ] || cp examples/camvid/classes.txt "$root"
sed -i 's#/SegNet/CamVid/##g' "$root"/{train,val}.txt

for protocol in two_steps one_by_one; do
  # 2. What the data are: labels 0..11 by name, void, no background (configs/camvid-example.yaml); and in which steps they come.
  config=(configs/camvid-example.yaml "examples/camvid/$protocol.yaml" "$@")

  # 3. Look before training: every mask value with its name, share and an example; the images of every step; what would be refused.
  "$PYTHON" -m scripts.check_data "$root" "${config[@]}"

  # 4. Train all steps.
  "$PYTHON" train.py "${config[@]}" "data.root=$root" "data.cache=$runs/cache" "run.folder=$runs" "run.name=$protocol"

  # 5. Look at test images after every step.
  "$PYTHON" -m scripts.predict "$runs/$protocol" "$root/test" --out "$runs/seen/$protocol" --all-steps
done

# 6. Both in one table. They end with the same classes, but they are two problems: the notes around the table say so.
"$PYTHON" -m scripts.compare "$runs"/{two_steps,one_by_one}
