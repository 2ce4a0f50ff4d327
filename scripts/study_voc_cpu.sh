#!/usr/bin/env bash
# The study on real images without a GPU, VOC 15-1 by the CPU recipe: all rows, the most important first, seed by seed.
#   bash scripts/study_voc_cpu.sh <VOC at 192 pixels> <mobilenet_v2-b0353104.pth> [ResNet-50's weights]
# Started again, it resumes. ROWS="1 2" runs these alone (1 AlterSGD's readings, 2 ladder, 3 over p, 4 tables of the paper,
# 5 phases over the best rungs, 6 flat minima, 7 overlapped and class orders, 8 ResNet-50), SEEDS (1 2 3) and JOBS (2, a
# thread each) as said, DRY=--dry-run shows the plans alone. RUNS (runs/voc-cpu) is where everything is written.
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,6s/^# //p' "$0"; exit 0 ;; esac
[ $# -ge 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
source "$(dirname "$0")/environment.sh"
install requirements.txt
round_as_avx2 # AVX-512 is up to a third faster
path() { case "$1" in /*) echo "$1" ;; *) echo "$called_from/$1" ;; esac; }
root="$(path "$1")" mobilenet="$(path "$2")" resnet="${3:+$(path "$3")}"
runs="${RUNS:-runs/voc-cpu}" jobs="${JOBS:-2}" seeds="${SEEDS:-1 2 3}"

failed=0
reproduce() { # table, folder of the runs, seed, weights, and what else scripts.reproduce takes
  local code=0
  "$PYTHON" -m scripts.reproduce "$1" --preset voc-cpu --runs "$2" --seeds "$3" --root "$root" --pretrained "$4" \
    --jobs "$jobs" --threads "$jobs" ${DRY:-} "${@:5}" || code=$?
  [ "$code" -le 1 ] || exit "$code" # a run that failed (1) does not stop the rest; a stop (75) does
  failed=$((failed | code))
}
one="${seeds%% *}" # of the rows that have one seed
for row in ${ROWS:-1 2 3 4 5 6 7 8}; do
  echo "== row $row =="
  case "$row" in
  1) for seed in $seeds; do reproduce core "$runs" "$seed" "$mobilenet"; done ;;
  2) for seed in $seeds; do
       reproduce ladder "$runs" "$seed" "$mobilenet" --only plop mib-ewf dft dkd ssul star mib_augm dkd_memory=100 ssul_memory=100
     done ;;
  3) reproduce readings "$runs" "$one" "$mobilenet" --only 'mib-altersgd_p=*' mib-altersgd_flip=all mib-stop 'mib-stop_p=*'
     reproduce core "$runs-30-epochs" "$one" "$mobilenet" --only mib 'mib-altersgd_*flip=all_every=epoch' train.epochs_later=30 ;;
  4) for table in table1 table3 table4; do reproduce "$table" "$runs" "$one" "$mobilenet"; done ;;
  5) for seed in $seeds; do
       reproduce ladder "$runs" "$seed" "$mobilenet" --only 'dkd-*' 'star-*' 'plop-*'
     done ;;
  6) reproduce related "$runs" "$one" "$mobilenet" --only mib-c_flat mib-asam mib-ema ;;
  7) reproduce ladder "$runs-overlapped" "$one" "$mobilenet" --only mib mib-altersgd mib-consolidate plop dkd ssul star data.mode=overlapped
     for order in 1 2 3; do
       reproduce ladder "$runs-order-$order" "$one" "$mobilenet" --only mib mib-altersgd star "data.order=$order"
     done ;;
  8) if [ -z "$resnet" ]; then
       echo "no weights of ResNet-50 are given: left out"
     else
       reproduce ladder "$runs-resnet50" "$one" "$resnet" --only mib mib-altersgd mib-consolidate mib-ewf star model.body=resnet50_v1
     fi ;;
  *) echo "row $row: there are 1 to 8" >&2; exit 2 ;;
  esac
done
exit "$failed"
