#!/usr/bin/env bash
# My method against MiB, with three seeds, on the embedded data: nothing is downloaded.
#   bash examples/my_method.sh [key.sub=value ...]        overrides go to every run, for example train.epochs_later=1
# Started again, it resumes. RUNS (default runs/my-method) is where everything is written, SEEDS (default "1 2 3") which seeds run,
# DATA a data set in VOC's layout instead of the one it generates, for example that of the quickstart, runs/quickstart/shapes.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,5s/^# //p' "$0"; exit 0 ;; esac
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
install requirements.txt
runs="${RUNS:-runs/my-method}"

# 1. The method: one file in methods/, which registers itself by being there. Take it away again when you are done.
[ -e methods/my_method.py ] || cp examples/my_method.py methods/

# 2. The data: VOC's layout, 20 classes of shapes and textures.
[ -n "${DATA:-}" ] || "$PYTHON" -m data.shapes "$runs/data"
data="${DATA:-$runs/data}"

# 3. The runs. For each seed step 0 is trained once, and both methods start from it: they differ in nothing else.
train() { # name, then arguments of train.py
  echo "== $1 =="
  "$PYTHON" train.py configs/quickstart.yaml "data.root=$data" "data.cache=$runs/cache" \
    "run.folder=$runs/runs" "run.name=$1" "${@:2}"
}
for seed in ${SEEDS:-1 2 3}; do
  train "step0_seed$seed" "train.seed=$seed" train.last_step=0 "$@"
  start="train.start_from=$runs/runs/step0_seed$seed/step_0.pt"
  train "mib_seed$seed" configs/methods/mib.yaml "train.seed=$seed" "$start" "$@"
  train "my_method_seed$seed" configs/methods/mib.yaml method.name=my_method "train.seed=$seed" "$start" "$@"
done

# 4. Every run by itself, and a figure of how the old classes fade.
"$PYTHON" -m scripts.compare "$runs"/runs/{mib,my_method}_seed* --picture "$runs/compared.png"

# 5. Mean and spread over seeds, the difference to MiB with a paired test, forgetting, IoU of every class.
"$PYTHON" -m scripts.report "$runs/runs" --out "$runs/report"
echo
echo "The report is $runs/report/report.html, the figure $runs/compared.png."
