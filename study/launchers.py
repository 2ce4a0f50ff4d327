"""Start train.py many times: on this machine, several at once or under torchrun,
or on a Slurm cluster through submitit.

A launcher is a registered class. It takes tasks, of which some need another one done first, and yields (task,
event) as things happen. It continues whatever fails. Asked to stop, it starts nothing more, tells what runs
to save and waits for it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from configs.errors import UserError
from configs.registry import Registry
from engine.terminal import STOPPED_BY_SIGNAL
from study import slurm_queue

POLL_SECONDS = 0.2
CLUSTER_POLL_SECONDS = 1.0
MINUTES_PER_JOB = 24 * 60
MOST_REQUEUES = 100  # of a Slurm job that reached its time limit
PATIENCE_SECONDS = 120  # of a Slurm job that was told to end, for the signal to requeue


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


# ------------------------------------------------------------------------------------------------------ Slurm


class Training:
    """train.py as a job of submitit, which resumes where it was when Slurm preempts it or its time is over.

    Slurm signals every process of a job, train.py too, and in no particular order.
    """

    def __init__(self, command: Sequence[str], log: Path, threads: int | None = None):
        self.command, self.log, self.threads = tuple(command), log, threads
        self.process: subprocess.Popen | None = None
        self.told = False

    def __call__(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        self.process = start(self.command, self.log, self.threads, preexec_fn=_ignore_user_signals)
        try:
            code = self.process.wait()
            if code and self.told:
                time.sleep(
                    PATIENCE_SECONDS
                )  # all is saved, and the signal to requeue (or SIGKILL) is on its way
            if code:
                note_exit(self.log, code)
                raise RuntimeError(f"train.py ended with exit code {code}; its log: {self.log}")
        finally:
            if self.process.poll() is None:
                self.process.terminate()

    def checkpoint(self):
        """Called by submitit, inside a signal handler, when the job has to make room: save, and queue the
        same again."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError, ChildProcessError):
                # Not SIGTERM: Slurm may have sent it already, and a second one would end train.py before it
                # has saved.
                os.kill(self.process.pid, signal.SIGINT)
                # Not Popen.wait, whose lock is held by the wait that the signal has interrupted.
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Training(self.command, self.log, self.threads))

    __submitit_checkpoint__ = checkpoint  # its newer name

    def _note(self, number: int, frame: Any) -> None:
        self.told = True


def _ignore_user_signals() -> None:
    """They are submitit's, and would kill train.py."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def run_on_cluster(
    tasks: Sequence[Task],
    stop: StopRequest,
    folder: Path,
    cluster: str = "slurm",
    gpus: int = 1,
    threads: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Events:
    """A job array for all tasks that need nothing, and one for all that need the same task,
    which Slurm starts after it.

    `folder` keeps submitit's files; `options` go to its `update_parameters`. `cluster="local"` is submitit
    without Slurm.
    """
    executor = _executor(folder, cluster, gpus, threads, options or {})
    groups: dict[str | None, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.needs is not None):
        groups.setdefault(task.needs, []).append(task)
    by_name: dict[str | None, Task] = {task.name: task for task in tasks}
    jobs: dict[str | None, Any] = {}
    ended, told = done_before(tasks), False
    while jobs or (groups and not stop.requested):
        for needs, group in [] if stop.requested else list(groups.items()):
            if ended.get(needs) == Event.DONE or (needs in jobs and cluster == "slurm"):
                del groups[needs]
                try:
                    jobs |= _submit(executor, group, threads, after=jobs.get(needs))
                except LauncherError:
                    for job in jobs.values():  # what is queued already would run without anybody to watch it
                        job.cancel(check=False)
                    raise
                yield from ((task, Event.SUBMITTED) for task in group)
            elif needs in ended:
                del groups[needs]
                ended |= dict.fromkeys((task.name for task in group), Event.SKIPPED)
                yield from ((task, Event.SKIPPED) for task in group)
        if stop.requested and not told:
            told = True
            for job in jobs.values():
                job.cancel(check=False)
        time.sleep(CLUSTER_POLL_SECONDS)
        for name, job in list(jobs.items()):
            event = _outcome(by_name[name], job, ended, stop)
            if event is not None:
                ended[name] = event
                del jobs[name]
                yield by_name[name], event


@register("slurm")
class Slurm(Launcher):
    """Jobs of a Slurm cluster."""

    cluster = "slurm"

    @property
    def gpus(self) -> int:
        return 1 if self.resources.gpus is None else self.resources.gpus

    def command(self) -> tuple[str, ...]:
        return train_command(self.gpus if self.gpus > 1 else None)

    def __call__(self, tasks: Sequence[Task], stop: StopRequest) -> Events:
        return run_on_cluster(
            tasks,
            stop,
            self.resources.folder / "submitit",
            self.cluster,
            gpus=self.gpus,
            threads=self.resources.threads,
            options=dict(self.resources.slurm),
        )


@register("submitit-local")
class SubmititLocal(Slurm):
    """What Slurm does, by submitit on this machine."""

    cluster = "local"


def _executor(folder: Path, cluster: str, gpus: int, threads: int | None, options: Mapping[str, Any]) -> Any:
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise LauncherError("the Slurm launcher needs submitit: pip install submitit") from None
    parameters = {"name": "altersgd", "timeout_min": MINUTES_PER_JOB, "cpus_per_task": threads}
    parameters |= {"gpus_per_node": gpus} if gpus else {}
    try:
        executor = AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=MOST_REQUEUES)
        executor.update_parameters(**(parameters | dict(options)))
    except (RuntimeError, NameError, ValueError, AssertionError) as error:
        raise LauncherError(f"submitit: {error}") from error
    if cluster == "slurm" and not slurm_queue.keeps_accounts():
        print(
            "note: this cluster keeps no accounts (sacct); squeue tells what becomes of jobs", file=sys.stderr
        )
        slurm_queue.ask_the_queue()
    return executor


def _submit(executor: Any, group: Sequence[Task], threads: int | None, after: Any) -> dict[str | None, Any]:
    order = {"dependency": f"afterok:{after.job_id}", "kill-on-invalid-dep": "yes"} if after else {}
    executor.update_parameters(slurm_additional_parameters=order)
    try:
        with executor.batch():
            return {task.name: executor.submit(Training(task.command, task.log, threads)) for task in group}
    except RuntimeError as error:
        said = str(error).strip()
        no_gpus = "this cluster has no such GPUs: --gpus 0 asks for none, --slurm slurm_gres=... for others"
        hint = no_gpus if "generic resource" in said.lower() else "see --slurm and your cluster's manual"
        raise LauncherError(f"Slurm refuses the jobs ({said}); {hint}") from error


def _outcome(task: Task, job: Any, ended: Mapping[str | None, Event], stop: StopRequest) -> Event | None:
    if ended.get(task.needs, Event.DONE) != Event.DONE:
        job.cancel(check=False)  # Slurm does so too, but some minutes later
        return Event.SKIPPED
    if not job.done(force_check=stop.requested):
        return None
    if stop.requested and not job.paths.result_pickle.exists():
        return Event.STOPPED  # submitit would wait for the result
    return Event.FAILED if job.exception() else Event.DONE
