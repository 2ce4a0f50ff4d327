"""How the cost of an iteration grows with classes, steps and ranks."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from data.protocols import Step, protocol_steps, steps_from_lists
from scripts.benchmarks.measure import Measurement, Options, Target, interleave, ratio, timed
from scripts.benchmarks.training import begin, settings

ROOT = Path(__file__).parent.parent.parent


def scaling(options: Options) -> list[Measurement]:
    return [classes(options), steps(options), ranks(options)]


def classes(options: Options) -> Measurement:
    """All classes of VOC or of ADE in one step."""
    variants = {
        "21 classes": iterations(options, protocol_steps("voc", "offline")),
        "151 classes": iterations(options, protocol_steps("ade", "offline")),
    }
    samples = interleave(variants, options.times(7))
    return ratio("151 classes / 21, one step", samples, "151 classes", "21 classes", Target(high=151 / 21))


def steps(options: Options) -> Measurement:
    """The last step of ADE 100-10 and of 100-1: 151 classes in 6 and in 51 classifiers."""
    one_by_one = steps_from_lists([range(1, 101), *([class_id] for class_id in range(101, 151))])
    variants = {
        "6 classifiers": iterations(options, protocol_steps("ade", "100-10")),
        "51 classifiers": iterations(options, one_by_one),
    }
    samples = interleave(variants, options.times(7))
    what = "51 classifiers / 6, 151 classes"
    return ratio(what, samples, "51 classifiers", "6 classifiers", Target(high=51 / 6))


def iterations(options: Options, of_steps: Sequence[Step]) -> Callable[[], float]:
    with tempfile.TemporaryDirectory() as folder:
        return timed(begin(folder, "method.name=mib", *settings(options, 256), steps=of_steps).iterate)


def ranks(options: Options) -> Measurement:
    """One rank and two (gloo), one thread each, with the same total batch."""
    variants = {"1 rank": under_torchrun(1, options), "2 ranks": under_torchrun(2, options)}
    samples = interleave(variants, options.times(5), warm_ups=0)
    return ratio("2 ranks / 1, same total batch, a thread each", samples, "2 ranks", "1 rank")


def under_torchrun(world: int, options: Options) -> Callable[[], float]:
    """Return the median iteration of a process group."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
            words += ["-m", "scripts.benchmarks.ranks", folder, *(["--quick"] if options.quick else [])]
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)} ended with code {done.returncode}:\n{done.stderr}")
        return statistics.median(json.loads(done.stdout))

    return measure
