"""Disturb real runs on a real Slurm in every way that it knows, and compare what they end with to a run that
was left alone.

    python -m scripts.dev.slurm_session [--only NAME ...] [--epochs N] [--folder DIR]

Every case is the same small run with MiB and AlterSGD, started by the launcher of scripts.reproduce on a
Slurm that scripts/dev/slurm_here.sh starts and stops. Exit code 0 means: every tensor of every step
checkpoint and every metric is the same, bit for bit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from data import shapes
from scripts.dev.crash_test import ROOT, differences
from study.launchers import Event, Task
from study.slurm import run_on_cluster

HERE = ROOT / "scripts/dev/slurm_here.sh"
SETTINGS = (
    *("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"),
    "PartitionName=all Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60",
    "PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF",
)
Stop = SimpleNamespace


class Session:
    """Runs below a folder, and how they are started."""

    def __init__(self, folder: Path, epochs: int):
        self.folder, self.epochs = folder, epochs
        self.disturbed: set[str] = set()
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        shapes.generate(folder / "shapes", train=240, val=40, size=32, progress=False)

    def task(self, name: str) -> Task:
        settings = [
            *("configs/quickstart.yaml", "configs/altersgd.yaml", "method.name=mib", "train.last_step=1"),
            *(f"data.root={self.folder}/shapes", f"data.cache={self.folder}/cache", "data.crop=32"),
            *("data.workers=0", f"run.folder={self.folder}/runs", f"run.name={name}", "run.log_every=1"),
            *("run.checkpoint_every=4", "run.pictures=0", "model.head_channels=8", "train.batch_size=4"),
            *(f"train.epochs={self.epochs}", "train.epochs_later=2", "train.device=cpu"),
        ]
        command = (sys.executable, str(ROOT / "train.py"), *settings)
        return Task(name, command, self.folder / f"runs/{name}.log")

    def launch(self, name: str, stop: Stop, disturb: Callable[[str], object] | None = None) -> Event:
        """Start a run, disturb it once it trains, and return how it ended."""
        minutes = 1 if name == "time_limit" else 60
        options = {"timeout_min": minutes, "slurm_signal_delay_s": 30}
        thread = threading.Thread(target=self.when_it_trains, args=(name, disturb))
        if disturb is not None:
            thread.start()
        events = run_on_cluster(
            [self.task(name)], stop, self.folder / "submitit", gpus=0, threads=1, options=options
        )
        *_, (_, ended) = events
        if disturb is not None:
            thread.join()
        return ended

    def when_it_trains(self, name: str, disturb: Callable[[str], object]) -> None:
        while not (self.folder / f"runs/{name}/resume.pt").exists():
            time.sleep(0.05)
        disturb(ask("squeue", "--noheader", "--states=R", "--format=%i"))
        self.disturbed.add(name)


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def take_down(job: str) -> None:
    node = ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    ask("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=session")


def restart_controller(job: str) -> None:
    configuration = dict(line.partition("=")[::2] for line in ask("scontrol", "show", "config").splitlines())
    file = next(v.strip() for k, v in configuration.items() if k.strip() == "SlurmctldPidFile")
    time.sleep(5)  # Slurm writes down what it knows every few seconds
    ask("kill", "-KILL", Path(file).read_text().strip())
    Path(file).unlink()
    time.sleep(15)
    ask("slurmctld")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", help="these cases alone (default: all but time_limit, which needs --epochs 12)"
    )
    parser.add_argument("--epochs", type=int, default=3, help="of step 0 (default: 3)")
    parser.add_argument("--folder", type=Path, help="work here and keep everything")
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="slurm_session_"))).absolute()
    session = Session(folder, options.epochs)
    settings = [part for line in SETTINGS for part in ("--conf", line)]
    ask("bash", str(HERE), "start", "--folder", f"{folder}/slurm", "--requeue-after", "15", *settings)
    os.environ["SLURM_CONF"] = f"{folder}/slurm/slurm.conf"
    try:
        return disturb_all(session, options.only)
    finally:
        ask("bash", str(HERE), "stop", f"{folder}/slurm")


def disturb_all(session: Session, only: list[str] | None) -> int:
    """Return 1 if a run that was disturbed ended otherwise than the one that was left alone."""
    stop = Stop(requested=False)
    cases: dict[str, Callable[[str], object] | None] = {
        "requeue": lambda job: ask("scontrol", "requeue", job) and None,
        "preempted": lambda job: (
            ask("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true") and None
        ),
        "node_down": take_down,
        "controller": restart_controller,
        "cancelled": lambda job: ask("scancel", job),
        "ctrl_c": lambda job: setattr(stop, "requested", True),
        "time_limit": lambda job: None,
    }
    if session.launch("alone", stop) != Event.DONE:
        raise SystemExit("the run that is left alone fails: see its log")
    different = 0
    for name in only or [case for case in cases if case != "time_limit"]:
        while ask("squeue", "--noheader"):  # the job before has left its result, and is about to end
            time.sleep(0.5)
        began = time.monotonic()
        ended = [session.launch(name, stop, cases[name])]
        first = time.monotonic() - began
        if ended[0] == Event.STOPPED:
            stop.requested = False
            ended.append(session.launch(name, stop))
        problems = differences(session.folder / "runs/alone", session.folder / f"runs/{name}", steps=2)
        starts = (session.folder / f"runs/{name}.log").read_text().count("images ")
        if name not in session.disturbed or (starts < 2 and name != "controller"):
            problems = ["was not disturbed"]
        different += bool(problems)
        same = problems[0] if problems else "the same bits"
        print(
            f"{name}: {' then '.join(ended)}, {starts} starts, first launch {first:.0f} s, {same}", flush=True
        )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
