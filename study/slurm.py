"""Start train.py on a Slurm cluster, as job arrays through submitit, and watch them by squeue.

What becomes of a job is known from the result that it leaves, or from its state in Slurm's queue, which every
cluster has, whether or not it keeps accounts (sacct, on which submitit relies).
"""

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from study.launchers import (
    Event,
    Events,
    Launcher,
    LauncherError,
    StopRequest,
    Task,
    done_before,
    note_exit,
    register,
    start,
    train_command,
)

POLL_SECONDS = 1.0  # between two looks for results
SECONDS_BETWEEN_LOOKS = 10.0  # at Slurm's queue
SECONDS_BETWEEN_LAST_LOOKS = 2.0  # while all jobs are being cancelled
PATIENCE_SECONDS = 15.0  # with a job that has ended and whose result is not there: slow disks, lost jobs
MINUTES_PER_JOB = 24 * 60
MOST_REQUEUES = 100  # of a job that reached its time limit

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
GONE = "not in the queue"
NO_SUCH_GPUS = ("generic resource", "requested node configuration is not available")


class Training:
    """train.py as a job of submitit, which resumes where it was when Slurm queues it again.

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
        finally:
            if self.process.poll() is None:
                self.process.terminate()
        if code and self.told:
            make_room()
            sys.exit(code)  # all is saved; no result, which to the launcher would be the end
        if code:
            note_exit(self.log, code)
            raise RuntimeError(f"train.py ended with exit code {code}; its log: {self.log}")

    def checkpoint(self) -> Any:
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


def make_room() -> None:
    """Have Slurm queue this job again if it is preempted with a time of grace: Slurm then leaves its state as
    it is, and takes it for failed when it ends by itself. Else it is cancelled, or queued again already.
    """
    _ignore_user_signals()  # or submitit would queue it a second time
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        ask = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
        if subprocess.run(ask, capture_output=True, text=True).stdout.strip() == "RUNNING":
            subprocess.run(["scontrol", "requeue", job])


# ------------------------------------------------------------------------------------------------- the queue


class Queue:
    """The states of the user's jobs, as squeue tells them, which is asked now and then."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.asked = float("-inf")
        self.silent = False

    def state(self, job: Any) -> str:
        return self.states.get(job.job_id, GONE)

    def look(self, seconds_between: float) -> bool:
        """Return whether the states are new."""
        if time.monotonic() - self.asked < seconds_between:
            return False
        self.asked = time.monotonic()
        # --array: a line for each element of an array, of which squeue would otherwise cut off the list
        ask = ["squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}"]
        try:
            answer = subprocess.run([*ask, "--format=%i|%T"], capture_output=True, text=True, timeout=120)
            problem = answer.stderr.strip() if answer.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            if not self.silent:
                print(f"note: squeue does not answer ({problem}); it is asked again", file=sys.stderr)
            self.silent = True
            return False
        self.silent = False
        self.states = dict(line.strip().split("|") for line in answer.stdout.splitlines() if "|" in line)
        return True


class LocalQueue(Queue):
    """The same for submitit's processes of this machine."""

    def state(self, job: Any) -> str:
        return "COMPLETED" if job.done() else "RUNNING"

    def look(self, seconds_between: float) -> bool:
        return True


# -------------------------------------------------------------------------------------------------- the jobs


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
    queue = Queue() if cluster == "slurm" else LocalQueue()
    by_name: dict[str | None, Task] = {task.name: task for task in tasks}
    jobs: dict[str | None, Any] = _queued_before(queue, folder, tasks) if cluster == "slurm" else {}
    yield from ((by_name[name], Event.SUBMITTED) for name in jobs)
    groups: dict[str | None, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.needs is not None):
        if task.name not in jobs:
            groups.setdefault(task.needs, []).append(task)
    ended, ended_at, told = done_before(tasks), dict[str | None, float](), False
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
        time.sleep(POLL_SECONDS)
        with suppress(OSError):
            folder.chmod(folder.stat().st_mode)  # a disk on the network then tells what is new in it
        is_news = queue.look(SECONDS_BETWEEN_LAST_LOOKS if told else SECONDS_BETWEEN_LOOKS)
        for name, job in list(jobs.items()):
            if is_news and queue.state(job) in {*ENDED, GONE}:
                ended_at.setdefault(name, time.monotonic())
            elif is_news:
                ended_at.pop(name, None)  # queued again
            event = _outcome(by_name[name], job, queue.state(job), ended_at.get(name), ended, stop)
            if event is not None:
                ended[name] = event
                del jobs[name]
                yield by_name[name], event


def _outcome(
    task: Task,
    job: Any,
    state: str,
    ended_at: float | None,
    ended: Mapping[str | None, Event],
    stop: StopRequest,
) -> Event | None:
    """What became of a job, if it is known: by its result, or by its state some time after its end."""
    before = ended.get(task.needs, Event.DONE if task.needs is None else None)
    if before not in (None, Event.DONE) and not stop.requested:
        job.cancel(check=False)  # Slurm does so too, but some minutes later
        return Event.SKIPPED
    if job.paths.result_pickle.exists():
        return Event.FAILED if job.exception() else Event.DONE
    if ended_at is None or (before is None and not stop.requested):
        return None  # it is cancelled by Slurm if what it needs has failed, which is heard in a moment
    if stop.requested or state == "CANCELLED":
        return Event.STOPPED
    if time.monotonic() - ended_at < PATIENCE_SECONDS:
        return None
    with open(task.log, "a", encoding="utf-8") as file:
        file.write(f"Slurm's job {job.job_id} ended without a result; its state: {state}\n")
    return Event.FAILED


def _queued_before(queue: Queue, folder: Path, tasks: Sequence[Task]) -> dict[str | None, Any]:
    """Return the jobs of an earlier start of the same command that are still in the queue."""
    from submitit import SlurmJob

    queue.look(0)
    names = {task.log.absolute(): task.name for task in tasks}
    found: dict[str | None, Any] = {}
    for identity, state in queue.states.items():
        job: Any = SlurmJob(folder, identity)
        if state not in ENDED and job.paths.submitted_pickle.exists():
            name = names.get(job.submission().function.log.absolute())
            if name is not None:
                found[name] = job
    return found


def _executor(folder: Path, cluster: str, gpus: int, threads: int | None, options: Mapping[str, Any]) -> Any:
    try:
        from submitit import AutoExecutor
    except ImportError:
        raise LauncherError("the Slurm launcher needs submitit: pip install submitit") from None
    parameters: dict[str, Any] = {"name": "altersgd", "timeout_min": MINUTES_PER_JOB}
    parameters |= {"gpus_per_node": gpus} if gpus else {}
    if threads:
        # by its manual srun no longer takes this number from its job since Slurm 22.05
        parameters |= {"cpus_per_task": threads, "slurm_srun_args": [f"--cpus-per-task={threads}"]}
    try:
        executor = AutoExecutor(folder=folder, cluster=cluster, slurm_max_num_timeout=MOST_REQUEUES)
        executor.update_parameters(**(parameters | dict(options)))
    except (RuntimeError, NameError, ValueError, AssertionError) as error:
        raise LauncherError(f"submitit: {error}") from error
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
        is_known = any(text in said.lower() for text in NO_SUCH_GPUS)
        hint = no_gpus if is_known else "see --slurm and your cluster's manual"
        raise LauncherError(f"Slurm refuses the jobs ({said}); {hint}") from error


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
