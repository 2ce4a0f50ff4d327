# Sourced by the protocol scripts: runs train.py on all GPUs of the machine, or on the CPU if there are none.
# GPUS=n takes n of them; TORCHRUN_ARGS replaces the arguments of torchrun, for several machines. One process needs no
# torchrun: without it, messages come without its traceback, and the exit code is train.py's own.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

launch_protocol() { # <data set>_<protocol>.sh, then what the user typed: the data folder, overlays, overrides
  local name root="${2:-}"
  name="$(basename "$1" .sh)"
  local script="scripts/$name.sh" dataset="${name%%_*}" protocol="${name#*_}"
  if [ -z "$root" ] || [ "$root" = -h ] || [ "$root" = --help ]; then
    sed -n '2,/^set /{/^# /s/^# //p}' "$script"
    [ -n "$root" ] || exit 2 # no data folder: the usage is an error message
    return
  fi
  case "$root" in /*) ;; *) root="$called_from/$root" ;; esac
  install requirements.txt
  local gpus="${GPUS:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
  local launcher="-m torch.distributed.run ${TORCHRUN_ARGS:---standalone --nproc_per_node=$gpus}"
  if [ -z "${TORCHRUN_ARGS:-}" ] && [ "$gpus" = 1 ]; then launcher=; fi
  # The script's protocol wins over that of a recipe, but not over what was typed.
  local own=("data.root=$root" "data.dataset=$dataset" "data.protocol=$protocol") argument
  for argument in "${@:3}"; do
    case "$argument" in data.steps=*) unset 'own[2]' ;; esac # the two exclude each other
  done
  # shellcheck disable=SC2086
  "$PYTHON" $launcher train.py "configs/$dataset/$protocol.yaml" "${own[@]}" "${@:3}"
}
