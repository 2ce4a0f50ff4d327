"""matplotlib without a display. Imported only where something is drawn, for loading it takes a while."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

__all__ = ["STYLE", "Axes", "Figure", "pyplot", "save", "without_formulas"]

STYLE = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


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
