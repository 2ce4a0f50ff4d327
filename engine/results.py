"""The metrics of a step as they stand in `results.json`, and what they depend on beside the config."""

import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from data.protocols import Step
from metrics import continual


def step_result(
    step: Step,
    steps: Sequence[Step],
    class_names: Sequence[str],
    counts: numpy.ndarray,
    ious: Sequence[float],
    earlier: Sequence[dict],
) -> dict[str, Any]:
    """Return the entry of `results.json` for a step, given those of the steps before it."""
    named = zip(step.seen, ious, strict=True)
    result = {
        "step": step.index,
        "classes": [class_names[c] for c in step.seen],
        "iou": {class_names[c]: None if numpy.isnan(v) else float(v) for c, v in named},
    }
    return result | summarise(result, earlier, steps, class_names) | {"confusion": counts.tolist()}


def summarise(
    result: Mapping[str, Any], earlier: Sequence[Mapping], steps: Sequence[Step], class_names: Sequence[str]
) -> dict[str, Any]:
    """Return the metrics of a step that follow from its IoU and from the steps before it.

    What is measured against all steps before is unknown if one of them has no metrics.
    """
    ids = {name: i for i, name in enumerate(class_names)}
    history = [{ids[name]: v for name, v in entry["iou"].items()} for entry in (*earlier, result)]
    if [entry["step"] for entry in earlier] == list(range(result["step"])):
        summary = continual.summary(history, steps)
    else:
        summary = continual.summary_of_one(history[-1], steps)
    known = dict(zip((entry["step"] for entry in (*earlier, result)), history, strict=True))
    whole = [known.get(index, {}) for index in range(result["step"] + 1)]
    return summary | {
        "forgetting": {class_names[c]: v for c, v in summary["forgetting"].items()},
        "metrics": continual.measure(whole, steps),
    }


def metrics_by_step(entries: Iterable[dict]) -> dict[int, dict]:
    """Return the `steps` of a results.json, each by the number of its step.

    A run that starts after a later step may lack those before it, so a place in the list is no number of a
    step.
    """
    return {entry.get("step", place): entry for place, entry in enumerate(entries)}


def steps_done(entries: Iterable[dict]) -> int:
    """Return how many steps of its protocol a run has behind it."""
    return max(metrics_by_step(entries), default=-1) + 1


def steps_asked_for(train: Mapping[str, Any], num_steps: int) -> int:
    """Return how many steps of its protocol a run is to do: a run is done when it has their metrics."""
    return num_steps if train["last_step"] is None else train["last_step"] + 1


def changed_lists(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return which lists of images differ between two records of the data, by what both know:
    older ones know no content.
    """
    changed = (key for key in now if key in before and before[key] != now[key])
    return list(dict.fromkeys(key.removesuffix("_content") for key in changed))


def environment(device: torch.device, world: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine() + " CPU",
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # AVX2, AVX512: they round otherwise
        "threads": torch.get_num_threads(),
        "world_size": world,
        "commit": _commit(),
    }


def _processor() -> str | None:
    """Return the name of the processor, on which seconds depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _commit() -> str | None:
    """Return the commit of this code, with a + when it was changed since."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
