"""A run's folder: what is in it, who may write to it, and whether it can be trusted.

config.yaml     the resolved config
results.json    every metric, after each step
step_<i>.pt     the model after step i and the method's statistics
resume.pt       the newest state inside a step
progress.json   the iteration that training has reached in a step, its last one, and the seconds spent on it
evaluations/    what trackers keep of scores in another setting than the run's own, by name of the setting
"""

import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from configs.errors import UserError
from data.files import write_atomically
from engine import checkpoint

SECONDS_FOR_A_LOOK = 1.0  # in which `is_held` of another process must have ended
STEP_FILE = re.compile(r"step_(0|[1-9][0-9]{0,8})\.pt")
PROGRESS = {"step": int, "iteration": int, "total": int, "seconds": float}  # what progress.json holds


class RunError(UserError, ValueError):
    """The run cannot continue as asked."""


_held: WeakSet[IO[str]] = WeakSet()  # the locks of this process


def _leave_locks_to_the_parent() -> None:
    """A forked process, such as one that loads images, may outlive a killed run
    and would keep its folder locked.
    """
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_locks_to_the_parent)


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.resume_checkpoint = path / "resume.pt"
        self.config_file = path / "config.yaml"
        self.results_file = path / "results.json"
        self.progress_file = path / "progress.json"
        self._written_atomically = (self.config_file, self.results_file, self.progress_file)
        self._lock_file = path / ".lock"
        self._lock: IO[str] | None = None

    def step_checkpoint(self, step: int) -> Path:
        return self.path / f"step_{step}.pt"

    def board(self, evaluation: str | None) -> Path:
        """Where trackers keep the curves: those of another evaluation setting are a run of their own."""
        return self.path if evaluation is None else self.path / "evaluations" / evaluation

    def saved_steps(self) -> dict[int, Path]:
        """Return the step checkpoints that are there, by number. A step_best.pt of somebody's own is none."""
        found = (STEP_FILE.fullmatch(path.name) for path in self.path.glob("step_*.pt"))
        return {int(match[1]): self.path / match[0] for match in found if match}

    def lock(self) -> None:
        """Refuse a folder that another live process is writing to,
        and remove what a killed one was about to write.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._lock_file, "a")  # noqa: SIM115 (held for as long as the run lives)
        except OSError as error:
            raise RunError(
                f"{self.path}: no run can write here ({error.strerror}); choose another run.folder or "
                "run.name"
            ) from error
        _held.add(self._lock)
        self._take_lock(self._lock, until=time.monotonic() + SECONDS_FOR_A_LOOK)
        with suppress(OSError):  # a full disk: the ranks then have no name to compare, no more
            os.ftruncate(self._lock.fileno(), 0)
            os.write(self._lock.fileno(), uuid.uuid4().hex.encode())
        for pattern in (".*.tmp", *(f".{file.name}.*" for file in self._written_atomically)):
            for unfinished in self.path.glob(pattern):
                with suppress(OSError):
                    unfinished.unlink()

    def _take_lock(self, lock: IO[str], until: float) -> None:
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(0.02)
                    continue
                self.unlock()
                raise RunError(
                    f"{self.path}: another run is writing to this folder; wait for it, or give this one a "
                    "run.name of its own"
                ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def is_held(self) -> bool:
        """Return whether a living process has locked the folder.

        Asks for a shared lock, so that one look does not see another.
        """
        try:
            with open(self._lock_file, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def sight(self) -> dict[str, str | int]:
        """Return what tells whether two machines see the same folder: who has locked it,
        and the sizes of what a start depends on.
        """
        holder = self._lock_file.read_text() if self._lock_file.exists() else "nobody"
        files = [*self.path.glob("*.pt"), *self.path.glob(self.results_file.name)]
        return {"locked by": holder} | {file.name: file.stat().st_size for file in files}

    def read_results(self) -> dict[str, Any] | None:
        return read_results(self.results_file)

    def earlier_results(self) -> dict[str, Any] | None:
        """Return what an earlier start left, if it is something to resume."""
        results = self.read_results()
        if results is None:
            return None
        data, steps = results.get("data"), results.get("steps")
        has_data = isinstance(data, dict) and {"train", "test"} <= data.keys()
        if not has_data or not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise RunError(
                f"{self.results_file}: does not say which data its metrics are of (no data or no steps), as "
                "train.py does; move it away, the metrics are computed again"
            )
        return results

    def write_results(self, results: dict[str, Any]) -> None:
        self._write(self.results_file, json.dumps(results, indent=1) + "\n")

    def read_progress(self) -> dict[str, Any] | None:
        """Return what `write_progress` was told last; None if there is no such file, or a damaged one."""
        try:
            progress = json.loads(self.progress_file.read_bytes())
            return {name: kind(progress[name]) for name, kind in PROGRESS.items()}
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return None

    def write_progress(self, *, step: int, iteration: int, total: int, seconds: float) -> None:
        """Note where training stands.

        A full disk does not matter here: the next checkpoint says so, and what to do.
        """
        progress = {"step": step, "iteration": iteration, "total": total, "seconds": round(seconds, 3)}
        with suppress(OSError):
            write_atomically(self.progress_file, (json.dumps(progress) + "\n").encode(), sync=False)

    def write_config(self, text: str) -> None:
        self._write(self.config_file, text)

    def _write(self, file: Path, text: str) -> None:
        try:
            write_atomically(file, text.encode())
        except OSError as error:
            raise RunError(
                f"{file}: could not be written ({error.strerror}). The one before it and all checkpoints are "
                "untouched: make room or repair the disk, then start the same command again"
            ) from error

    def lacks(self, step: int) -> RunError:
        """Return what to raise where the checkpoint of a step is wanted and not there."""
        return RunError(
            f"{self.step_checkpoint(step)} is missing: train step {step} first, "
            "or give the checkpoint as train.start_from"
        )

    def drop_resume(self) -> None:
        for stale in (self.resume_checkpoint, checkpoint.previous_path(self.resume_checkpoint)):
            stale.unlink(missing_ok=True)

    def set_damaged_steps_aside(self, say: Callable[[str], None]) -> None:
        """Training resumes from the newest step checkpoint: if it is damaged, from the one before."""
        for _, path in sorted(self.saved_steps().items(), reverse=True):
            try:
                checkpoint.verify(path)
                return
            except checkpoint.CheckpointError as error:
                aside = path.with_suffix(".damaged")
                path.rename(aside)
                say(f"{error}; it is kept as {aside.name}, and the step is trained again from the one before")


def read_results(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(results, dict):
            raise ValueError(f"it holds a {type(results).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path}: not readable as JSON ({error}); move it away, the metrics are computed again"
        ) from error
    return results
