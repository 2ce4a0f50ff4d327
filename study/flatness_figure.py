"""The figure of flatness and forgetting: a panel for each curvature, a point for each run."""

from collections.abc import Callable, Iterable, Mapping

from matplotlib.ticker import LogLocator, NullLocator

from study.collection import Collection
from study.correlations import labelled, points_of
from tracking.plotting import Figure, pyplot
from tracking.text import drawn

MOST_IN_A_LINE, LEGEND_COLUMNS = 3, 3
Looks = Callable[[Iterable[str]], Mapping[str, tuple[str, str | None]]]  # label -> colour and marker


def flatness_figure(runs: Collection, looks_of: Looks) -> Figure | None:
    """Points of forgetting over curvature, on a scale of logarithms, with Spearman's rho."""
    panels = points_of(runs)
    if not panels:
        return None
    points = [labelled(runs, panel) for panel in panels]
    labels = dict.fromkeys(label for by_label in points for label in by_label)
    looks = looks_of(labels)
    columns = min(len(panels), MOST_IN_A_LINE)
    lines = -(-len(panels) // columns)
    size = (3.3 * columns, 2.9 * lines + 0.25 * -(-len(labels) // LEGEND_COLUMNS))
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, figsize=size, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    handles = {}
    for axis, panel, by_label in zip(axes.flat, panels, points, strict=False):
        for label, pairs in by_label.items():
            colour, marker = looks[label]
            curvature, forgotten = zip(*pairs, strict=True)
            handles[label] = axis.scatter(
                curvature, forgotten, color=colour, marker=marker or "o", s=26, label=drawn(label)
            )
        rho = "rho undefined" if panel.rho is None else f"rho = {panel.rho:.2f}"
        axis.set(xscale="log", xlabel=f"{panel.metric}\n({panel.measured})")
        # As plain numbers, for figures read no formulas; also within a decade.
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(f"{rho}, n = {len(panel.pairs)}", fontsize=9)
    for row in axes:
        row[0].set_ylabel("forgetting, points of mIoU")
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=8
    )
    return figure
