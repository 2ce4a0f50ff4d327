"""What every part of the benchmark measures with: interleaved times, allocated bytes, saved bytes,
measurements and targets.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from models.segmenter import Segmenter

Samples = dict[str, list[float]]  # by variant
CPU_RECIPE = "configs/voc/15-1_cpu.yaml"


class Skipped(Exception):
    """A part that cannot be measured as asked; the message says why."""


def channels_last(model: Segmenter) -> Segmenter:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # unknown to torch's own stubs


@dataclass(frozen=True)
class Options:
    quick: bool = False
    repeats: int | None = None  # None: what each part thinks enough
    recipe: str = CPU_RECIPE
    voc192: Path | None = None
    fullres: Path | None = None

    def times(self, usual: int) -> int:
        return self.repeats or (2 if self.quick else usual)


@dataclass(frozen=True)
class Target:
    low: float = 0.0
    high: float = math.inf

    def __str__(self) -> str:
        if self.low == 0:
            return f"<= {self.high:.3g}"
        return f">= {self.low:.3g}" if self.high == math.inf else f"{self.low:.3g} to {self.high:.3g}"

    def met(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Measurement:
    """One row of the table. Without a value, `note` says why."""

    what: str
    value: float | None = None
    unit: str = "x"
    low: float | None = None  # the spread: the smallest and the largest of the samples
    high: float | None = None
    target: Target | None = None
    raw: Samples = field(default_factory=dict)
    raw_unit: str = "s"
    note: str = ""

    @property
    def measured(self) -> str:
        if self.value is None:
            return f"skipped: {self.note}"
        spread = f" ({self.low:.4g} - {self.high:.4g})" if self.low != self.high else ""
        return f"{self.value:.4g} {self.unit}{spread}"

    @property
    def met(self) -> str:
        if self.value is None or self.target is None:
            return "-"
        return "yes" if self.target.met(self.value) else "NO"


def summary(
    what: str,
    samples: Sequence[float],
    target: Target | None = None,
    *,
    unit: str = "x",
    raw: Samples | None = None,
    raw_unit: str = "s",
) -> Measurement:
    """Return the median of the samples with their range."""
    raw = {what: list(samples)} if raw is None else raw
    value = statistics.median(samples)
    return Measurement(what, value, unit, min(samples), max(samples), target, raw, raw_unit)


def ratio(
    what: str, samples: Samples, over: str, under: str, target: Target | None = None, *, raw_unit: str = "s"
) -> Measurement:
    """Return the median of the ratios of neighbours: whatever slows the machine down for a
    while slows both of them.
    """
    ratios = [a / b for a, b in zip(samples[over], samples[under], strict=True)]
    return summary(
        what, ratios, target, raw={name: samples[name] for name in (over, under)}, raw_unit=raw_unit
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """Return the action as a measurement of its seconds."""

    def measure() -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    return measure


def interleave(measurements: Mapping[str, Callable[[], float]], repeats: int, warm_ups: int = 2) -> Samples:
    """Return samples of each variant, taken in turn after some warm-ups; who begins
    changes (A B C, B C A, ...).

    What ran just before leaves its traces in caches and memory, and no variant should always come after the
    same one.
    """
    say(f"  {' | '.join(measurements)}: {repeats} times")
    for _ in range(warm_ups):
        for measure in measurements.values():
            measure()
    samples: Samples = {name: [] for name in measurements}
    names = list(measurements)
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(measurements[name]())
    return samples


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_bytes(action: Callable[[], object]) -> int:
    """Return the most that torch's allocator has given to `action` and not yet got back, at any moment."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(changes), default=0)


def saved_bytes(model: nn.Module, images: Tensor) -> int:
    """Return what the forward pass keeps for the backward pass, parameters and buffers left out,
    each storage once.
    """
    permanent = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor  # the graph holds it, so no other storage takes its address

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images)
    del output
    return sum(size for address, size in sizes.items() if address not in permanent)
