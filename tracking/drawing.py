"""Images for trackers as (H, W, 3) bytes: tiles with titles, the confusion matrix, the losses of a step.

matplotlib is imported late, and what it draws is None (the confusion matrix: grey cells without names) where
it is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tracking.text import drawn

COLUMNS = 4  # input, truth and two steps: about as wide as a card in a browser
TILE_HEIGHT, TITLE_HEIGHT, GAP, FONT = 144, 22, 4, 18  # titles can be read on a card, where all is smaller
MOST_CELLS_WITH_NUMBERS = 25
LEARN, KEEP, PHASE = "#0072B2", "#E69F00", "#D55E00"  # distinct to the colour-blind (Okabe and Ito)


def tiles(images: Mapping[str, np.ndarray | None], legend: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Images (H, W, 3) under their titles, all as large as the first (None leaves a gap),
    then names in their colours.
    """
    height, width = next(pixels.shape[:2] for pixels in images.values() if pixels is not None)
    size = (max(1, round(width * TILE_HEIGHT / height)), TILE_HEIGHT)
    across, down = size[0] + GAP, size[1] + TITLE_HEIGHT
    below, names = -(-len(images) // COLUMNS) * down, -(-len(legend) // COLUMNS) * TITLE_HEIGHT
    sheet = Image.new("RGB", (COLUMNS * across - GAP, below + names), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT)
    for place, (title, pixels) in enumerate(images.items()):
        left, top = place % COLUMNS * across, place // COLUMNS * down
        pen.text((left + 2, top), drawn(title), fill="black", font=font)
        if pixels is not None:
            # Nearest, or colours would appear that stand for no class.
            tile = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
            sheet.paste(tile, (left, top + TITLE_HEIGHT))
    for place, (name, colour) in enumerate(legend.items()):
        left, top = place % COLUMNS * across, below + place // COLUMNS * TITLE_HEIGHT
        pen.rectangle((left, top + 3, left + 15, top + 18), fill=tuple(map(int, colour)))
        pen.text((left + 19, top), drawn(name)[: size[0] // 10], fill="black", font=font)
    return np.asarray(sheet)


def confusion(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Rows are the truth and add up to 1; numbers are percent."""
    rates = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = _figure(side := 2 + max(0.12, min(0.4, 8 / len(names))) * len(names), side)
    if figure is None:
        cell = max(4, 320 // len(names))
        grey = np.kron(255 * (1 - rates), np.ones((cell, cell))).round().astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    axes = figure.add_subplot()
    axes.imshow(rates, cmap="Blues", vmin=0, vmax=1)
    font = max(5.0, min(9.0, 300 / len(names)))
    # parse_math: a name with dollar signs is no formula.
    labels = list(map(drawn, names))
    axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=font, parse_math=False)
    axes.set_yticks(range(len(names)), labels, fontsize=font, parse_math=False)
    axes.set(xlabel="predicted", ylabel="truth")
    if len(names) <= MOST_CELLS_WITH_NUMBERS:
        for row, column in np.argwhere(rates >= 0.005):
            rate = rates[row, column]
            colour = "white" if rate > 0.5 else "black"
            axes.text(
                column, row, f"{100 * rate:.0f}", ha="center", va="center", fontsize=font - 1, color=colour
            )
    return _rendered(figure)


class Logged(NamedTuple):
    """Of one iteration of a step: l_seg, its sign in the objective, and lambda R."""

    iteration: int
    learn: float
    keep: float
    sign: float


@dataclass
class Curves:
    """What was logged of a step: a phase begins after iteration `boundary` of `total`."""

    title: str
    total: int
    boundary: int
    entries: list[Logged] = field(default_factory=list)


def losses(curves: Curves) -> np.ndarray | None:
    """Both losses of a step, the phase shaded, iterations marked whose
    segmentation loss ascends or is left out.
    """
    figure = _figure(6.4, 3.4)
    if figure is None or not curves.entries:
        return None
    iterations, learn, keep, _ = zip(*curves.entries, strict=True)
    left = figure.add_subplot()
    left.plot(iterations, learn, color=LEARN, linewidth=1.2)
    left.set_xlim(0, curves.total + 0.5)
    left.set_xlabel("iteration of the step")
    left.set_ylabel("l_seg", color=LEARN)
    left.set_title(curves.title, fontsize=10)
    if any(keep):
        right = left.twinx()
        right.plot(iterations, keep, color=KEEP, linewidth=1.2, linestyle="--")
        right.set_ylabel("lambda R (dashed)", color=KEEP)
    if curves.boundary < curves.total:
        left.axvspan(curves.boundary + 0.5, curves.total + 0.5, color=PHASE, alpha=0.12, label="phase")
    for sign, marker, label in ((-1, "v", "ascent"), (0, "x", "left out")):
        marked = [entry for entry in curves.entries if entry.sign == sign]
        if marked:
            points = [entry.iteration for entry in marked], [entry.learn for entry in marked]
            left.plot(*points, marker, color=PHASE, markersize=4, label=label, clip_on=False)
    if left.get_legend_handles_labels()[0]:
        left.legend(loc="upper right", fontsize=8)
    return _rendered(figure)


def _figure(width: float, height: float) -> Any:
    """Return an empty figure in inches that belongs to no window, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def _rendered(figure: Any) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3]
