"""Old images that come back: which ones a step may see again, and with which labels. No pixels are copied.

The memory of a step is a pure function of the seed and of what the steps before it saw, so a resumed run,
every rank and every worker agree on it without storing anything. It never gets back what it once gave up:
each memory is a part of the one before it and of the images of the step between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from data.protocols import Step


class Kept(NamedTuple):
    """An image of the training set, and the step whose labels it has: those of the step that saw it."""

    position: int
    step: int


def choose_memory(
    classes_per_image: Sequence[frozenset[int]],
    train_images: Sequence[Sequence[int]],
    steps: Sequence[Step],
    step: Step,
    size: int,
    seed: int,
) -> list[Kept]:
    """Return at most `size` images of the steps before `step`, as many of each old class as the others allow.

    The classes take turns; each takes the image that shows it and comes first in an order drawn by the seed.
    """
    memory: list[Kept] = []
    for before in steps[: step.index]:
        known = {kept.position for kept in memory}
        memory += [Kept(i, before.index) for i in train_images[before.index] if i not in known]
        classes = [c for earlier in steps[: before.index + 1] for c in earlier.new]
        labelled = {kept: classes_per_image[kept.position] & {*steps[kept.step].new} for kept in memory}
        memory = _in_turns(
            sorted(memory, key=lambda kept: _order(seed, kept.position)), classes, labelled, size
        )
    return memory


def _in_turns(
    candidates: Sequence[Kept], classes: Sequence[int], labelled: dict[Kept, frozenset[int]], size: int
) -> list[Kept]:
    """Return one candidate after the other for each class, until there are `size` or none is left."""
    queues = [[kept for kept in reversed(candidates) if c in labelled[kept]] for c in classes]
    chosen: dict[Kept, None] = {}
    while any(queues) and len(chosen) < size:
        for queue in queues:
            while queue and queue[-1] in chosen:
                queue.pop()
            if queue and len(chosen) < size:
                chosen[queue.pop()] = None
    return list(chosen)


def _order(seed: int, position: int) -> bytes:
    return hashlib.blake2b(f"memory {seed} {position}".encode(), digest_size=8).digest()
