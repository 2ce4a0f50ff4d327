"""Test images and what several networks see in them, drawn: a row for each image, and a legend.

A class is told by its number, too, which stands in its regions and in the legend: among twenty colours some
look alike, and not only to the colour-blind. matplotlib is imported late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.protocols import BACKGROUND, IGNORE_INDEX
from tracking.text import drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

CELL = 1.15  # inches of a panel's width
LEGEND_COLUMN, LEGEND_ROW = 1.3, 0.2  # inches of an entry
LEAST_DEPTH = 1 / 24  # of an image's height: smaller regions have no room for a number


@dataclass(frozen=True)
class Examples:
    """Images (H, W, 3) as bytes; of each the truth and what each network sees, (H, W) class ids."""

    images: Sequence[np.ndarray]
    labels: Sequence[Sequence[np.ndarray]]
    names: Sequence[str]  # by class id
    palette: np.ndarray  # (256, 3) bytes

    @property
    def shown(self) -> list[int]:
        """The class ids that occur in any panel."""
        return sorted({int(c) for row in self.labels for labels in row for c in np.unique(labels)})

    def entry(self, class_id: int) -> str:
        """Return what the legend says of a class: "7 car"; background and void have no number."""
        if class_id >= len(self.names):
            return "void"
        name = drawn(self.names[class_id])
        return name if class_id == BACKGROUND else f"{class_id} {name}"


def size_of(examples: Examples, columns: int) -> tuple[float, float]:
    """Return width and height in inches that so many columns of panels take, with their legend."""
    width, rows = CELL * columns, len(examples.images)
    legend = -(-len(examples.shown) // _entries_in_a_row(width)) * LEGEND_ROW
    return width, 1.25 * rows + legend + 0.3


def draw_examples(figure: FigureBase, examples: Examples, titles: Sequence[str], width: float) -> None:
    """Draw image, truth and what each network sees, under their titles, into a figure of constrained layout;
    below them every class that occurs.
    """
    from matplotlib.patches import Patch

    grid = figure.subplots(len(examples.images), len(titles), squeeze=False)
    for axis in grid.flat:
        axis.axis("off")
    for axis, title in zip(grid[0], titles, strict=True):
        axis.set_title(drawn(title), fontsize=9)
    for row, image, seen in zip(grid, examples.images, examples.labels, strict=True):
        row[0].imshow(image, interpolation="nearest")
        for axis, labels in zip(row[1:], seen, strict=True):
            axis.imshow(examples.palette[labels], interpolation="nearest")
            _number_regions(axis, labels)
    figure.legend(
        handles=[
            Patch(facecolor=examples.palette[c] / 255, edgecolor="grey", label=examples.entry(c))
            for c in examples.shown
        ],
        loc="outside lower center",
        ncols=_entries_in_a_row(width),
        fontsize=8,
        handlelength=1.2,
        frameon=False,
    )


def _entries_in_a_row(width: float) -> int:
    return max(1, int(width / LEGEND_COLUMN))


def _number_regions(axis: Axes, labels: np.ndarray) -> None:
    from matplotlib.patheffects import withStroke

    for class_id in np.unique(labels):
        if class_id not in (BACKGROUND, IGNORE_INDEX):
            depth, row, column = deepest(labels == class_id)
            if depth >= LEAST_DEPTH * len(labels):
                edge = [withStroke(linewidth=1.5, foreground="black")]  # is read on any colour
                look = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
                axis.text(column, row, str(class_id), path_effects=edge, **look)


def deepest(region: np.ndarray) -> tuple[int, int, int]:
    """Return how often a region (H, W) can be peeled before nothing is left,
    and row and column of a pixel that is left last.
    """
    depth, left = 0, np.pad(region, 1)
    while left.any():
        depth, last = depth + 1, left
        left = left.copy()
        left[1:-1, 1:-1] &= last[:-2, 1:-1] & last[2:, 1:-1] & last[1:-1, :-2] & last[1:-1, 2:]
    rows, columns = np.nonzero(last)
    middle = len(rows) // 2
    return depth, int(rows[middle]) - 1, int(columns[middle]) - 1
