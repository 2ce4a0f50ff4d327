"""A run's folder: its config, its checkpoints, and `results.json`.

config.yaml     the resolved config            step_<i>.pt   the model after step i and the method's statistics
results.json    every figure, after each step  resume.pt     the newest state inside a step
"""

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from data.protocols import Step
from metrics import continual


class RunError(ValueError):
    """The run folder cannot be used as asked."""


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.resume_checkpoint = path / "resume.pt"
        self.config_file = path / "config.yaml"
        self.results_file = path / "results.json"
        self._lock = None

    def step_checkpoint(self, step: int) -> Path:
        return self.path / f"step_{step}.pt"

    def lock(self) -> None:
        """Refuse a folder that another live process is writing to."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 (held for as long as the run lives)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                f"{self.path}: another run is writing to this folder; wait for it, or give this one a run.name of its own"
            ) from error

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def read_results(self) -> dict[str, Any] | None:
        return read_results(self.results_file)

    def write_results(self, results: dict[str, Any]) -> None:
        write_atomically(self.results_file, json.dumps(results, indent=1) + "\n")


def read_results(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(
            f"{path}: not readable as JSON ({error}); move it away, the figures are computed again"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def step_result(
    step: Step,
    steps: Sequence[Step],
    class_names: Sequence[str],
    counts: numpy.ndarray,
    ious: Sequence[float],
    earlier: Sequence[dict],
) -> dict[str, Any]:
    """The entry of `results.json` for a step, given those of the steps before it."""
    ids = {name: i for i, name in enumerate(class_names)}
    history = [{ids[name]: value for name, value in result["iou"].items()} for result in earlier]
    history.append({c: None if numpy.isnan(v) else float(v) for c, v in zip(step.seen, ious, strict=True)})
    summary = continual.summary(history, steps)
    summary["forgetting"] = {class_names[c]: v for c, v in summary["forgetting"].items()}
    return {
        "step": step.index,
        "classes": [class_names[c] for c in step.seen],
        "iou": {class_names[c]: v for c, v in history[-1].items()},
        **summary,
        "confusion": counts.tolist(),
    }


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """What a result depends on beside the config."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine() + " CPU",
        "threads": torch.get_num_threads(),
        "world_size": world,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of this code, with a + when it was changed since."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
