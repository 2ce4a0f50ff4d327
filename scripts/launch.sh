# Sourced by the protocol scripts: runs train.py under torchrun on all GPUs of the machine, or on the CPU if there are none.
# GPUS=n takes n of them; TORCHRUN_ARGS replaces the arguments of torchrun, for several machines.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

launch_protocol() { # the script, its overlay, then what the user typed: the data folder, overlays, overrides
  local script="scripts/${1##*/}" overlay="$2" root="${3:-}"
  if [ -z "$root" ] || [ "$root" = -h ] || [ "$root" = --help ]; then
    sed -n '2,/^set /{/^# /s/^# //p}' "$script"
    [ -n "$root" ] || exit 2 # no data folder: the usage is an error message
    return
  fi
  case "$root" in /*) ;; *) root="$called_from/$root" ;; esac
  install requirements.txt
  local gpus="${GPUS:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
  # shellcheck disable=SC2086
  "$PYTHON" -m torch.distributed.run ${TORCHRUN_ARGS:---standalone --nproc_per_node="$gpus"} \
    train.py "$overlay" "data.root=$root" "${@:4}"
}
