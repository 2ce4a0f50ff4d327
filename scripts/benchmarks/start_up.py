"""How long one waits for an answer of train.py: for its help, for an error, for the first iteration."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from data import shapes
from scripts.benchmarks.measure import Measurement, Options, Target, interleave, ratio, summary, timed

ROOT = Path(__file__).parent.parent.parent
FIRST_ITERATION = b"seg="  # what the progress bar shows from the first logged iteration on


def start_up(options: Options) -> list[Measurement]:
    variants = {
        "import torch": command("-c", "import torch"),
        "help": command("train.py", "--help"),
        "config error": command("train.py", "optim.lrr=1", code=2),
    }
    samples = interleave(variants, options.times(9), warm_ups=1)
    answers = [
        ratio(f"train.py, {answer} / import torch", samples, answer, "import torch", Target(high=1.3))
        for answer in ("help", "config error")
    ]
    with tempfile.TemporaryDirectory() as folder:
        launches = interleave({"launch": launch(Path(folder), options)}, options.times(5), warm_ups=1)[
            "launch"
        ]
    what = "launch to first iteration, quickstart, index at hand"
    return [*answers, summary(what, launches, Target(high=6), unit="s")]


def command(*words: str, code: int = 0) -> Callable[[], float]:
    """Return a Python process from start to end."""

    def run() -> None:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != code:
            raise RuntimeError(f"{' '.join(words)} ended with code {done.returncode}:\n{done.stderr}")

    return timed(run)


def launch(folder: Path, options: Options) -> Callable[[], float]:
    """Return seconds from the start of a run on generated images to its first iteration."""
    size, images = (32, 40) if options.quick else (64, 3000)
    shapes.generate(folder / "shapes", train=images, val=max(20, images // 8), size=size, progress=False)
    words = ["train.py", "configs/quickstart.yaml", f"data.root={folder}/shapes", f"data.crop={size}"]
    words += [
        "data.protocol=offline",
        f"data.cache={folder}/cache",
        f"run.folder={folder}",
        "run.log_every=1",
    ]
    runs = count()

    def measure() -> float:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words, f"run.name=launch_{next(runs)}"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with process:
            wait_for(FIRST_ITERATION, process)
            seconds = time.perf_counter() - started
            process.terminate()
            process.communicate()  # its loader processes must be gone before the next launch
        return seconds

    return measure


def wait_for(text: bytes, process: subprocess.Popen) -> None:
    assert process.stderr is not None  # it is a pipe
    shown = b""
    while text not in shown:
        more = os.read(process.stderr.fileno(), 4096)
        if not more:
            raise RuntimeError(
                f"train.py ended before its first iteration:\n{shown.decode(errors='replace')}"
            )
        shown += more
