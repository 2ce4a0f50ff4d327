"""matplotlib without a display. Imported only where something is drawn, for loading it takes a while."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["STYLE", "Axes", "Figure", "pyplot", "save"]

STYLE = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
