#!/usr/bin/env bash
# A throw-away Slurm on this machine: munged, slurmctld and a slurmd for each node, on ports and in a folder of their own.
#   bash scripts/dev/slurm_here.sh start [--install] [--nodes 2] [--gpus 0] [--requeue-after 5] [--folder DIR] [--conf KEY=VALUE ...]
#   bash scripts/dev/slurm_here.sh stop DIR
# `start` prints the SLURM_CONF to export once every node is idle; `stop` cancels all jobs, ends the daemons and removes the folder.
# --install fetches what is missing by apt-get. --gpus N gives each node N GPUs that exist in the books of Slurm alone.
# --conf adds a line to slurm.conf, and takes out what stands there with its key. Accounting is off. A job that
# is queued again waits --requeue-after seconds (Slurm's own default: 120), in which it must have ended. Needs root.
set -euo pipefail

packages="slurm-wlm munge"

fail() { echo "slurm_here: $*" >&2; exit 1; }

missing() { # says what cannot be run here, if anything
  [ "$(id -u)" = 0 ] || { echo "starting Slurm needs root"; return; }
  local program
  for program in munged slurmctld slurmd sinfo; do
    command -v "$program" >/dev/null || { echo "$program is not installed: apt-get install $packages"; return; }
  done
}

free_ports() { # $1 of them
  python3 - "$1" <<'PYTHON'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("", 0))
print(*(each.getsockname()[1] for each in sockets))
PYTHON
}

start() {
  local install= nodes=2 gpus=0 requeue_after=5 folder= conf=()
  while [ $# -gt 0 ]; do
    case "$1" in
      --install) install=yes; shift ;;
      --nodes) nodes="$2"; shift 2 ;;
      --gpus) gpus="$2"; shift 2 ;;
      --requeue-after) requeue_after="$2"; shift 2 ;;
      --folder) folder="$2"; shift 2 ;;
      --conf) conf+=("$2"); shift 2 ;;
      *) fail "$1 is not understood; --help says what is" ;;
    esac
  done
  if [ -n "$install" ] && [ -n "$(missing)" ]; then
    # shellcheck disable=SC2086
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $packages >/dev/null
  fi
  [ -z "$(missing)" ] || fail "$(missing)"
  folder="${folder:-$(mktemp -d -t slurm_here.XXXXXX)}"
  mkdir -p "$folder"
  folder="$(cd "$folder" && pwd)"
  chmod 755 "$folder" # munged refuses a folder that others can write to
  folder_of_a_failed_start="$folder"
  trap '[ -z "$folder_of_a_failed_start" ] || stop "$folder_of_a_failed_start"' EXIT
  write_conf

  dd if=/dev/urandom of="$folder/munge.key" bs=128 count=1 status=none
  chmod 400 "$folder/munge.key"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  export SLURM_CONF="$folder/slurm.conf"
  start_controller "$folder"
  local node
  for node in $(seq "$nodes"); do
    slurmd -N "n$node"
  done
  local patience
  for patience in $(seq 200); do
    [ "$(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | sort -u | wc -l)" = "$nodes" ] && break
    [ "$patience" = 200 ] && { tail -n 9 "$folder"/*.log >&2; fail "the nodes are not ready after 40 seconds"; }
    sleep 0.2
  done
  folder_of_a_failed_start=
  echo "$(slurmctld -V) is ready; its folder is $folder" >&2
  echo "export SLURM_CONF=$SLURM_CONF"
}

write_conf() {
  local ports node line
  read -ra ports <<<"$(free_ports $((nodes + 1)))"
  mkdir -p "$folder/state"
  {
    echo "ClusterName=here"
    echo "SlurmctldHost=$(hostname)(127.0.0.1)"
    echo "SlurmctldPort=${ports[0]}"
    printf '%s\n' SlurmUser=root SlurmdUser=root "AuthInfo=socket=$folder/munge.socket,cred_expire=$requeue_after" \
      ProctrackType=proctrack/linuxproc SelectType=select/cons_tres SelectTypeParameters=CR_Core TaskPlugin=task/none \
      MpiDefault=none AccountingStorageType=accounting_storage/none JobAcctGatherType=jobacct_gather/none \
      ReturnToService=2 SlurmdParameters=config_overrides "StateSaveLocation=$folder/state" \
      "SlurmdSpoolDir=$folder/%n" "SlurmctldPidFile=$folder/slurmctld.pid" "SlurmdPidFile=$folder/%n.pid" \
      "SlurmctldLogFile=$folder/slurmctld.log" "SlurmdLogFile=$folder/%n.log" KillWait=30 MinJobAge=300 \
      SchedulerType=sched/backfill SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=1 \
      PartitionName=all\ Nodes=ALL\ Default=YES\ MaxTime=INFINITE\ OverSubscribe=YES:16
    for node in $(seq "$nodes"); do
      echo "NodeName=n$node NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=${ports[$node]} CPUs=64 $([ "$gpus" = 0 ] || echo "Gres=gpu:$gpus")"
    done
    [ "$gpus" = 0 ] || echo GresTypes=gpu
  } >"$folder/slurm.conf"
  for line in "${conf[@]}"; do
    sed -i "/^${line%%=*}=/d" "$folder/slurm.conf"
  done
  [ ${#conf[@]} = 0 ] || printf '%s\n' "${conf[@]}" >>"$folder/slurm.conf"
  : >"$folder/gres.conf"
  if [ "$gpus" -gt 0 ]; then
    touch "$folder"/gpu{0..15}
    echo "Name=gpu File=$folder/gpu[0-$((gpus - 1))]" >"$folder/gres.conf"
  fi
}

start_controller() { # also by hand after it was killed: SLURM_CONF=... slurmctld
  SLURM_CONF="$1/slurm.conf" slurmctld
}

lives() { # whether one of the processes does; one that has ended may stay in the list of them
  ps --no-headers -o stat= -p "$(IFS=,; echo "$*")" | grep -qv '^Z'
}

stop() {
  local folder="$1" file pid pids=()
  [ -f "$folder/slurm.conf" ] || fail "$folder is not the folder of a Slurm that this script started"
  export SLURM_CONF="$folder/slurm.conf"
  if [ -s "$folder/slurmctld.pid" ] && lives "$(cat "$folder/slurmctld.pid")"; then
    timeout 10 scancel --user=root 2>/dev/null || true
    for _ in $(seq 50); do # their processes end first
      [ -n "$(timeout 10 squeue --noheader 2>/dev/null)" ] || break
      sleep 0.2
    done
  fi
  for file in "$folder"/n*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do
    [ -s "$file" ] && pids+=("$(cat "$file")")
  done
  for pid in "${pids[@]}"; do
    kill "$pid" 2>/dev/null || true
  done
  for _ in $(seq 50); do
    lives "${pids[@]}" || break
    sleep 0.2
  done
  for pid in "${pids[@]}"; do
    kill -KILL "$pid" 2>/dev/null || true
  done
  rm -rf "$folder"
}

case "${1:-}" in
  start) shift; start "$@" ;;
  stop) [ $# = 2 ] || fail "which one? stop DIR"; stop "$2" ;;
  missing) missing ;;
  *) sed -n '2,/^set /{/^# /s/^# //p}' "$0"; [ "${1:-}" = --help ] || [ "${1:-}" = -h ] || exit 2 ;;
esac
