#!/usr/bin/env bash
# Watch a network forget (FT), remember (LwF, MiB) and meet AlterSGD, on generated images, in minutes on a laptop CPU.
#   bash scripts/quickstart.sh [key.sub=value ...]        overrides go to every run, for example train.seed=2
# Started again, it resumes where it stopped. RUNS (default runs/quickstart) is where everything is written.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;; esac
source "$(dirname "$0")/environment.sh"

install requirements.txt
# Rounding moves such a run by a point or two: two threads and AVX2, as docs/quickstart.md was made with, so that processors with
# wider instructions round alike (not tried on one).
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" ATEN_CPU_CAPABILITY="${ATEN_CPU_CAPABILITY:-avx2}"
export ONEDNN_MAX_CPU_ISA="${ONEDNN_MAX_CPU_ISA:-AVX2}" MKL_ENABLE_INSTRUCTIONS="${MKL_ENABLE_INSTRUCTIONS:-AVX2}"
runs="${RUNS:-runs/quickstart}"
"$PYTHON" -m data.shapes "$runs/shapes"

train() { # name, then arguments of train.py
  echo "== $1 =="
  "$PYTHON" train.py configs/quickstart.yaml "data.root=$runs/shapes" "data.cache=$runs/cache" \
    "run.folder=$runs" "run.name=$1" "${@:2}"
}
train step0 train.last_step=0 "$@"
train ft "train.start_from=$runs/step0/step_0.pt" "$@"
train lwf configs/methods/lwf.yaml "train.start_from=$runs/step0/step_0.pt" "$@"
train mib configs/methods/mib.yaml "train.start_from=$runs/step0/step_0.pt" "$@"
train mib-altersgd configs/methods/mib.yaml configs/altersgd.yaml "train.start_from=$runs/step0/step_0.pt" "$@"

echo
"$PYTHON" -m scripts.compare "$runs"/{ft,lwf,mib,mib-altersgd} --picture "$runs/quickstart.png"
echo
echo "The figure is $runs/quickstart.png. Next:"
[ "$PYTHON" != "$PWD/.venv/bin/python" ] || echo "  source .venv/bin/activate"
echo "  tensorboard --logdir $runs      # then open http://localhost:6006/?smoothing=0#timeseries"
