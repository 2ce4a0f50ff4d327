#!/usr/bin/env bash
# Watch a network forget (FT), remember (LwF, MiB) and meet AlterSGD, on generated images, in minutes on a laptop CPU.
#   bash scripts/quickstart.sh [key.sub=value ...]        overrides go to every run, for example train.seed=2
# Started again, it resumes where it stopped. RUNS (default runs/quickstart) is where everything is written.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;; esac
source "$(dirname "$0")/environment.sh"

install requirements.txt
# Rounding moves such a run by a point or two: one thread and AVX2, as docs/quickstart.md was made with, so that the number of cores
# does not matter. A processor of another maker still rounds otherwise.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
round_as_avx2
runs="${RUNS:-runs/quickstart}"
"$PYTHON" -m data.shapes "$runs/shapes"

train=("$PYTHON" train.py configs/quickstart.yaml "data.root=$runs/shapes" "data.cache=$runs/cache" "run.folder=$runs")
step_0="train.start_from=$runs/step0/step_0.pt"
train() { # name, then arguments of train.py
  echo "== $1 =="
  "${train[@]}" "run.name=$1" "${@:2}"
}
# The other core: a run in the background writes a log. Whatever ends this script stops what runs there, and it saves where it is.
background=() # process:log
stop_background() { for run in ${background[@]+"${background[@]}"}; do kill "${run%%:*}" 2>/dev/null && wait "${run%%:*}" || true; done; }
trap stop_background EXIT
train_in_background() { # what train() takes
  local log="$runs/$1.log"
  echo "== $1, at the same time, written to $log =="
  set -m # a process group of its own: Ctrl-C reaches the run in the foreground alone, and the trap stops this one, once
  "${train[@]}" "run.name=$1" "${@:2}" </dev/null >"$log" 2>&1 &
  set +m
  background+=("$!:$log")
}
wait_for_background() {
  local run code
  for run in "${background[@]}"; do
    code=0
    wait "${run%%:*}" || code=$?
    [ "$code" = 0 ] || { tail -n 20 "${run#*:}"; exit "$code"; } >&2
  done
}

train step0 train.last_step=0 "$@"
train_in_background lwf configs/methods/lwf.yaml "$step_0" "$@"
train ft "$step_0" "$@"
train_in_background mib-altersgd configs/methods/mib.yaml configs/altersgd.yaml "$step_0" "$@"
train mib configs/methods/mib.yaml "$step_0" "$@"
wait_for_background

echo
"$PYTHON" -m scripts.compare "$runs"/{ft,lwf,mib,mib-altersgd} --picture "$runs/quickstart.png"
echo
echo "The figure is $runs/quickstart.png. Next:"
[ "$PYTHON" != "$PWD/.venv/bin/python" ] || echo "  source .venv/bin/activate"
echo "  tensorboard --logdir $runs      # then open http://localhost:6006/?smoothing=0#timeseries"
