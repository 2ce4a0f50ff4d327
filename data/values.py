"""Which values the masks hold, and whether these seem shifted against the class names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data.images import read_mask
from data.packs import File
from data.protocols import BACKGROUND, IGNORE_INDEX

LISTED = 30  # classes that a message names one by one
ENOUGH_MASKS = 50  # to tell thin regions from large ones


@dataclass
class ValueUse:
    """Where a mask value occurs."""

    example: File  # the mask that holds most of it
    most: int = 0  # its pixels there
    pixels: int = 0
    masks: int = 0


def uses_of_values(masks: Iterable[tuple[File, Mapping[int, int]]]) -> dict[int, ValueUse]:
    """By value, ascending, given the path of each mask and its numbers of pixels by value."""
    uses: dict[int, ValueUse] = {}
    for path, pixels in masks:
        for value, count in pixels.items():
            use = uses.setdefault(value, ValueUse(path))
            use.pixels += count
            use.masks += 1
            if count > use.most:
                use.example, use.most = path, count
    return dict(sorted(uses.items()))


def shift_warning(
    class_names: Sequence[str], uses: Mapping[int, ValueUse], masks: Sequence[File]
) -> str | None:
    """Signs that the masks count classes from another number than the names do. They may deceive:
    it is a warning.

    Masks that count from zero leave the last name without a pixel. Where they continue with void instead of
    255 (CamVid as it comes), void has the last name: it is in thin regions of every image, and 0, a class, is
    in large ones.
    """
    last = len(class_names) - 1
    values = uses.keys() - {IGNORE_INDEX}
    if values == set(range(1, last + 2)):
        return (
            f"the masks may count from one where the names count from zero: none holds 0 ({class_names[0]}), "
            f"and {last + 1} is beyond the last name"
        )
    if BACKGROUND not in uses:
        return None
    share = uses[BACKGROUND].pixels / sum(uses[value].pixels for value in values)
    if share > 0.5:  # it may well be the background
        return None
    if values == set(range(last)):
        sign = f"{last} ({class_names[last]}) never occurs"
    elif (
        uses.keys() == set(range(last + 1))
        and uses[last].masks >= uses[BACKGROUND].masks
        and _thinness(last, masks) > _thinness(BACKGROUND, masks)
    ):
        sign = (
            f"{last}, read as {class_names[last]}, is scattered over as many masks in thin regions, "
            "as void often is"
        )
    else:
        return None
    meant = [*class_names[1:], "void"] if last in values else class_names[1:]
    listed = ", ".join(meant) if len(meant) <= LISTED else f"{meant[0]}, {meant[1]}, ..., {meant[-1]}"
    return (
        f"the masks may count from zero: 0, read as {class_names[0]}, covers {share:.0%} of the pixels, and "
        f"{sign}. If 0 means {class_names[1]}, every value is read as the class before it; say "
        f"data.labels: [{listed}] (docs/own-data.md)"
    )


def _thinness(value: int, masks: Sequence[File]) -> float:
    """Return the share of its pixels beyond an edge to the left or above, over some masks."""
    edges = pixels = 0
    for path in masks[:: len(masks) // ENOUGH_MASKS + 1]:
        mask = read_mask(path)
        holds = mask == value
        pixels += int(np.count_nonzero(holds))
        edges += int(np.count_nonzero(holds[:, 1:] & (mask[:, 1:] != mask[:, :-1])))
        edges += int(np.count_nonzero(holds[1:] & (mask[1:] != mask[:-1])))
    return edges / max(pixels, 1)
