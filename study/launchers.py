"""Start train.py many times: on this machine, several at once or under torchrun; study/slurm.py does so
on a cluster.

A launcher is a registered class. It takes tasks, of which some need another one done first, and yields (task,
event) as things happen. It continues whatever fails. Asked to stop, it starts nothing more, tells what runs
to save and waits for it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from configs.errors import UserError
from configs.registry import Registry
from engine.terminal import STOPPED_BY_SIGNAL

POLL_SECONDS = 0.2


class LauncherError(UserError, ValueError):
    """The launcher cannot be used here."""


class StopRequest(Protocol):
    """Whether somebody asked to stop, as engine.ranks has it, which this module does without:
    jobs of a cluster import it, and torch would only make them slow to start.
    """

    @property
    def requested(self) -> bool: ...


class Event(StrEnum):
    STARTED = "started"
    SUBMITTED = "submitted"  # to a cluster, which starts it when it can
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # by a signal, everything saved
    SKIPPED = "skipped"  # what it needs has failed


@dataclass(frozen=True)
class Task:
    name: str
    command: tuple[str, ...]
    log: Path  # gets its output, after what stands there
    needs: str | None = None  # name of the task that comes first; one that is not given was done before


Events = Iterator[tuple[Task, Event]]


@dataclass(frozen=True)
class Resources:
    """How runs are started, and with what; scripts.reproduce says more about each."""

    launcher: str  # one of LAUNCHERS
    folder: Path  # of all runs
    jobs: int = 1  # at once, by the local launcher
    threads: int | None = None
    gpus: int | None = None  # of a run
    slurm: Mapping[str, str | int] = field(default_factory=dict)  # parameters of submitit


class Launcher:
    """What all launchers begin with."""

    several_at_once = False  # whether `Resources.jobs` says how many runs there are at once

    def __init__(self, resources: Resources):
        self.resources = resources

    def command(self) -> tuple[str, ...]:
        """Return what starts train.py; the arguments of a run follow."""
        return train_command()

    def __call__(self, tasks: Sequence[Task], stop: StopRequest) -> Events:
        raise NotImplementedError


LAUNCHERS: Registry[type[Launcher]] = Registry("--launcher", "study")
register = LAUNCHERS.register


def train_command(gpus: int | None = None) -> tuple[str, ...]:
    """train.py in one process, or under torchrun with one for each of `gpus`."""
    ranks = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}") if gpus else ()
    return (sys.executable, *ranks, "train.py")


def done_before(tasks: Sequence[Task]) -> dict[str | None, Event]:
    return dict.fromkeys({task.needs for task in tasks} - {task.name for task in tasks}, Event.DONE)


def start(command: Sequence[str], log: Path, threads: int | None = None, **options: Any) -> subprocess.Popen:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            **options,
        )


def note_exit(log: Path, code: int) -> None:
    """For a process that was killed left no last words."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"train.py ended with exit code {code}\n")


# ----------------------------------------------------------------------------------------------- this machine


def run_here(tasks: Sequence[Task], stop: StopRequest, slots: int = 1, threads: int = 1) -> Events:
    """`slots` processes at once, each with `threads` threads."""
    waiting, running, ended = list(tasks), dict[Task, subprocess.Popen](), done_before(tasks)
    told = False
    while running or (waiting and not stop.requested):
        for task in [] if stop.requested else list(waiting):
            before = ended.get(task.needs)
            if before not in (None, Event.DONE):
                ended[task.name] = Event.SKIPPED
                waiting.remove(task)
                yield task, Event.SKIPPED
            elif before and len(running) < slots and not stop.requested:
                # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on
                # once.
                running[task] = start(task.command, task.log, threads, start_new_session=True)
                waiting.remove(task)
                yield task, Event.STARTED
        if stop.requested and not told:
            told = True
            for process in running.values():
                process.terminate()
        time.sleep(POLL_SECONDS)
        for task, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[task]
                ended[task.name] = _meaning(code, stop)
                if ended[task.name] == Event.FAILED:
                    note_exit(task.log, code)
                yield task, ended[task.name]


@register("local")
class Local(Launcher):
    """Processes of this machine."""

    several_at_once = True

    def __call__(self, tasks: Sequence[Task], stop: StopRequest) -> Events:
        return run_here(tasks, stop, slots=self.resources.jobs, threads=self.threads_of(self.resources.jobs))

    def threads_of(self, processes: int) -> int:
        """Return the share of each in the threads of all."""
        return max(1, (self.resources.threads or os.cpu_count() or 1) // processes)


@register("torchrun")
class TorchRun(Local):
    """One run at a time, with a process for each GPU."""

    several_at_once = False

    @property
    def gpus(self) -> int:
        if self.resources.gpus is not None:
            return self.resources.gpus
        import torch

        return max(1, torch.cuda.device_count())

    def command(self) -> tuple[str, ...]:
        return train_command(self.gpus)

    def __call__(self, tasks: Sequence[Task], stop: StopRequest) -> Events:
        return run_here(tasks, stop, slots=self.resources.jobs, threads=self.threads_of(self.gpus))


def _meaning(code: int, stop: StopRequest) -> Event:
    if code == 0:
        return Event.DONE
    # torchrun has exit codes of its own, and a process that was just starting knows none: hence the request
    # counts too
    return Event.STOPPED if code == STOPPED_BY_SIGNAL or stop.requested else Event.FAILED
