"""matplotlib without a display. Imported only where something is drawn, for loading it takes a while."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

__all__ = ["STYLE", "Axes", "Figure", "look", "pyplot", "save", "unclipped", "without_formulas"]

STYLE = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
# Distinct to the colour-blind (Okabe and Ito; their yellow is too light on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, LINES = "osD^vP*X", ("-", "--", "-.", ":")  # eight beside seven colours: 56 pairs


def look(number: int) -> dict[str, Any]:
    """Return how the curve of this number is drawn, unlike any of the first 56:
    by colour, by marker and by line, so that one of the three suffices to tell it from its neighbours.

    Every second marker is hollow: of two curves that lie on each other both are seen.
    """
    colour = COLOURS[number % len(COLOURS)]
    return {
        "color": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "markerfacecolor": "none" if number % 2 else colour,
        "markersize": 8 if number % 2 else 5,
    }


def unclipped(figure: Figure) -> Figure:
    """Return the figure with markers that are drawn whole where they lie on an axis, and in front of it."""
    bars = ("_", "|")  # the ends of error bars, which may lie beyond the axes
    for axis in figure.axes:
        for line in axis.get_lines():
            if line.get_marker() not in ("None", "none", "", " ", None, *bars):
                line.set(clip_on=False, zorder=3)
    return figure


def without_formulas(figure: Figure) -> Figure:
    """Return the figure with every text as it reads: names with dollar signs.

    Not for logarithmic axes, whose numbers are formulas.
    """
    for words in figure.findobj(Text):
        words.set_parse_math(False)
    return figure


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
