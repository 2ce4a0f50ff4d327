"""Which classes each incremental step learns. Plain data: this module imports nothing heavy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from data.dataset import DataError

IGNORE_INDEX = 255
SALIENT = 254  # a label of background pixels that look like an object, for methods that know saliency maps
BACKGROUND = 0


@dataclass(frozen=True)
class Step:
    """One incremental step: `old` and `new` hold foreground class ids of the data set, in learning order."""

    index: int
    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def seen(self) -> tuple[int, ...]:
        """Background, old, new. The position of a class in this tuple is its label in the network."""
        return (BACKGROUND, *self.old, *self.new)

    @property
    def num_old(self) -> int:
        return 1 + len(self.old)

    @property
    def num_new(self) -> int:
        return len(self.new)

    @property
    def num_classes(self) -> int:
        return len(self.seen)


def _groups(total: int, first: int, following: int) -> tuple[tuple[int, ...], ...]:
    """Return classes 1..first, then groups of `following` up to `total`:
    the literature's "first-following".
    """
    starts = range(first + 1, total + 1, following)
    return (
        tuple(range(1, first + 1)),
        *(tuple(range(start, min(start + following, total + 1))) for start in starts),
    )


# data set -> protocol -> the new classes of each step
PROTOCOLS: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "voc": {
        "offline": _groups(20, 20, 20),
        "19-1": _groups(20, 19, 1),
        "15-5": _groups(20, 15, 5),
        "15-1": _groups(20, 15, 1),
        "10-10": _groups(20, 10, 10),
        "10-5-5": _groups(20, 10, 5),
        "10-1": _groups(20, 10, 1),
        "5-5": _groups(20, 5, 5),
        "5-3": _groups(20, 5, 3),
        "5-1": _groups(20, 5, 1),
        "2-2": _groups(20, 2, 2),
        "2-1": _groups(20, 2, 1),
    },
    "ade": {
        "offline": _groups(150, 150, 150),
        "100-50": _groups(150, 100, 50),
        "100-10": _groups(150, 100, 10),
        "100-5": _groups(150, 100, 5),
        "50-50": _groups(150, 50, 50),
        "50-20": _groups(150, 50, 20),
        "50-10": _groups(150, 50, 10),
    },
}


def configured_steps(
    dataset: str,
    protocol: str | None,
    lists: Iterable[Iterable[int | str]] | None,
    class_names: Sequence[str],
    order: int | Sequence[int | str] | None = None,
) -> list[Step]:
    """Return the user's own lists of classes where there are some, else the protocol's,
    with its classes in another order if given.
    """
    if lists is not None:
        return steps_from_lists(lists, class_names)
    steps = protocol_steps(dataset, protocol)
    return steps if order is None else reordered(steps, order, class_names)


def reordered(
    steps: Sequence[Step], order: int | Sequence[int | str], class_names: Sequence[str]
) -> list[Step]:
    """Return steps of the same sizes that learn the classes in the order of a list,
    or in the one that a seed draws.

    A seed sorts the classes by a digest of (seed, class id): the same order on every machine and in every
    version.
    """
    sizes = [step.num_new for step in steps]
    if isinstance(order, int):
        order = sorted((*steps[-1].old, *steps[-1].new), key=lambda c: _digest(f"order {order} {c}"))
    if len(order) != sum(sizes):
        raise DataError(f"the order has {len(order)} classes, the protocol {sum(sizes)}; name each once")
    rest = iter(order)
    return steps_from_lists([[next(rest) for _ in range(size)] for size in sizes], class_names)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def steps_from_lists(
    lists: Iterable[Iterable[int | str]], class_names: Sequence[str] | None = None
) -> list[Step]:
    """Return steps from the new classes of each, as ids or (with `class_names`, whose index is the id)
    as names.

    DataError for what cannot be learned in order.
    """
    steps: list[Step] = []
    old: tuple[int, ...] = ()
    for index, ids in enumerate(lists):
        new = tuple(_class_id(entry, class_names, index) for entry in ids)
        if not new:
            raise DataError(f"step {index} has no classes; remove it or give it some")
        for position, class_id in enumerate(new):
            if class_id == BACKGROUND:
                raise DataError(f"step {index}: class 0 is the background, which every step has; remove it")
            if not 0 < class_id < IGNORE_INDEX:
                raise DataError(f"step {index}: class id {class_id} is outside 1..{IGNORE_INDEX - 1}")
            if class_id in old or class_id in new[:position]:
                raise DataError(f"step {index}: class {class_id} is learned twice; keep it in one step only")
        steps.append(Step(index, old, new))
        old += new
    if not steps:
        raise DataError("a protocol needs at least one step")
    return steps


def _class_id(entry: int | str, class_names: Sequence[str] | None, index: int) -> int:
    if isinstance(entry, str) and class_names is not None:
        if entry in class_names:
            return class_names.index(entry)
        close = get_close_matches(entry, class_names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the classes are {', '.join(class_names[1:])}"
        raise DataError(f"step {index}: no class is named {entry!r}; {hint}")
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise DataError(f"step {index}: {entry!r} is no class id (a whole number is wanted)")
    if class_names is not None and entry >= len(class_names):
        raise DataError(f"step {index}: class id {entry} is outside 1..{len(class_names) - 1}")
    return entry


def protocol_steps(dataset: str, protocol: str | None) -> list[Step]:
    """Return the steps of a named protocol, for example protocol_steps("voc", "15-1")."""
    if dataset not in PROTOCOLS:
        raise DataError(
            f"data set {dataset!r} has no named protocols (those with: {', '.join(PROTOCOLS)}); "
            "list the classes of each step yourself"
        )
    if protocol is None or protocol not in PROTOCOLS[dataset]:
        raise DataError(
            f"no protocol {protocol!r} for {dataset}; choose from {', '.join(PROTOCOLS[dataset])}"
        )
    return steps_from_lists(PROTOCOLS[dataset][protocol])
