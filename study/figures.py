"""The figures of a report, drawn by matplotlib."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from data.protocols import BACKGROUND
from engine.run_folder import RunError
from study import identity, paper
from study.cells import KEYS, name
from study.collection import Collection
from study.flatness_figure import flatness_figure
from study.identity import Setting
from study.layouts import Image
from study.readings import READINGS
from study.scoreboard import over_p, stops
from study.settings import (
    altersgd,
    consolidate,
    groups,
    mib,
    over_lambda,
    own_methods,
    paper_header,
    rows_of_methods,
    shares,
)
from study.spreads import Spread, spread
from tracking import plotting
from tracking.examples import draw_examples, size_of
from tracking.plotting import Axes, Figure, pyplot
from tracking.text import drawn

# Distinct to the colour-blind (after Okabe and Ito); what a report is about has the strongest colours.
# fmt: off
COLOURS = {
    "MiB": "#0072B2", "AlterSGD": "#D55E00", "Consolidate": "#009E73", "Joint": "#000000", "FT": "#999999",
    "PI": "#CC79A7", "EWC": "#E69F00", "RW": "#8C6D31", "LwF": "#56B4E9", "LwF-MC": "#7B4FA3", "ILT": "#B5A900",
}
MARKERS = {
    "MiB": "o", "AlterSGD": "s", "Consolidate": "D", "FT": "v", "PI": "^", "EWC": "<", "RW": ">", "LwF": "P",
    "LwF-MC": "X", "ILT": "*",
}
STYLE = plotting.STYLE | {
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "report",
    "text.parse_math": False,
}
# fmt: on
# Of what has none above: a user's own methods.
OTHER_COLOURS, OTHER_MARKERS = ("#882255", "#117733", "#332288", "#AA4499", "#44AA99"), "hpd8H^"
READING_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#555555")  # the last is the control's
GROUP_COLOURS, GROUP_MARKERS = ("#0072B2", "#D55E00", "#000000"), "osD"  # old, new, all
MOST_LABELS = 40  # classes that are named in a heat map
MOST_PANELS = 6  # in a row


def images(section: str, runs: Collection) -> list[Image]:
    """The figures that belong to a section of the report, as SVG."""
    made = []
    with pyplot.rc_context(STYLE):
        for label, (caption, draw) in FIGURES.get(section, {}).items():
            figure = draw(runs)
            if figure is not None:
                made.append(Image(label, caption, _svg(plotting.unclipped(figure))))
    return made


def predictions(runs: Collection, count: int) -> Image:
    """Image, truth, and what MiB, AlterSGD and a user's own methods see after the last step, by the first
    seed that all of them have."""
    from study.panels import examples

    own = own_methods(runs)
    wanted = {"MiB": mib(runs), "AlterSGD": altersgd(runs)} | own
    compared = {label: runs.cells.get(s, {}) for label, s in wanted.items() if not own or s in runs.cells}
    shared = sorted(set.intersection(*map(set, compared.values())))
    if not shared:
        named = " and one of ".join(compared)
        raise RunError(f"--pictures: no seed has a finished run of {named}; leave --pictures out")
    folders = [seeds[shared[0]].folder for seeds in compared.values()]
    shown = examples(folders, [len(runs.steps) - 1] * len(folders), count)
    titles = ["image", "truth", *map(drawn, compared)]
    width, height = size_of(shown, len(titles))
    figure = pyplot.figure(figsize=(1.6 * width, 1.3 * height), layout="constrained")
    draw_examples(figure, shown, titles, 1.6 * width)
    plotting.without_formulas(figure)
    return Image("pictures", f"After the last step, seed {shared[0]}.", _png(figure), "png")


# -------------------------------------------------------------------------------------------- one figure each


def steps_figure(runs: Collection) -> Figure | None:
    """mIoU of the old classes after each step."""
    series = {label: runs.old_classes_by_step(setting) for label, setting in _methods(runs).items()}
    if not series:
        return None
    figure, axis = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    looks = _looks(series)
    for label, spreads in series.items():
        colour, marker = looks[label]
        look: dict[str, Any] = {"color": colour, "label": drawn(label)}
        if len(spreads) < len(runs.steps):  # all classes at once
            axis.axhline(spreads[-1].mean, linestyle="--", linewidth=1.2, **look)
            continue
        means = np.array([np.nan if s.mean is None else s.mean for s in spreads])
        widths = np.array([s.deviation or 0.0 for s in spreads])
        steps = np.arange(len(spreads))
        # The control often lies right on AlterSGD, which is seen through it.
        control = {"linestyle": "--", "markerfacecolor": "none", "markersize": 9}
        look |= control if label == "Consolidate" else {"markersize": 5}
        axis.plot(steps, means, marker=marker, **look)
        axis.fill_between(steps, means - widths, means + widths, color=colour, alpha=0.18, linewidth=0)
    axis.set(xlabel="step", ylabel=f"mIoU of the old classes ({groups(runs)[0]}), %", ylim=(0, None))
    axis.set_xticks(range(len(runs.steps)))
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def classes_figure(runs: Collection) -> Figure | None:
    """A heat map per method: IoU of each class after each step; what is not learned yet stays empty."""
    maps = {label: runs.classes_by_step(setting) for label, setting in _methods(runs).items()}
    if not maps:
        return None
    names = [drawn(label) for c, label in runs.reference.class_names.items() if c != BACKGROUND]
    lines = math.ceil(len(maps) / MOST_PANELS)
    columns = math.ceil(len(maps) / lines)
    size = (1.8 + 1.35 * columns, lines * min(max(0.17 * len(names) + 0.6, 2.2), 9.0))
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, figsize=size, layout="constrained")
    for axis in axes.flat[len(maps) :]:
        axis.axis("off")
    for number, (label, rows) in enumerate(maps.items()):
        axis = axes.flat[number]
        values = np.array([[np.nan if v is None else v for v in row] for row in rows], dtype=float)
        mesh = axis.pcolormesh(np.ma.masked_invalid(values), vmin=0, vmax=100, cmap="viridis")
        axis.set_title(textwrap.fill(drawn(label), 18), fontsize=9)
        axis.grid(False)
        axis.invert_yaxis()
        axis.set_xticks(np.arange(values.shape[1]) + 0.5, range(values.shape[1]))
        named = names if number % columns == 0 and len(names) <= MOST_LABELS else []
        axis.set_yticks(np.arange(len(named)) + 0.5, named, fontsize=7)
        axis.tick_params(length=0)
        if number + columns >= len(maps):
            axis.set_xlabel("step")
    figure.colorbar(mesh, ax=axes, label="IoU, %", shrink=0.8 / lines, aspect=20)
    return figure


def p_figure(runs: Collection) -> Figure:
    """mIoU of the groups over p."""
    settings = shares(runs)
    same = runs.on_shared_seeds(settings.values())
    ours = {float(p): _spreads(same, setting) for p, setting in settings.items()}
    theirs = {
        float(p): [0.0 if isinstance(value, str) else value for value in values]  # ALMOST_ZERO
        for p, values in (paper.FIGURE_P.items() if _with_paper(runs) else ())
    }
    figure, axis = pyplot.subplots(figsize=(6.8, 3.6), layout="constrained")
    for number, (colour, marker) in enumerate(zip(GROUP_COLOURS, GROUP_MARKERS, strict=True)):
        label = f"{groups(runs)[number]}, ours", f"{paper.GROUPS[number]}, paper"
        # The paper's points are not joined: between them lie some that its text does not give.
        _curves(axis, ours, theirs, number, label, papers_line="none", color=colour, marker=marker)
    axis.set(xlabel="p: share of normal training in a step", ylabel="mIoU, %", ylim=(0, None))
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def lambda_figure(runs: Collection) -> Figure:
    """A panel per group: mIoU over lambda."""
    settings = over_lambda(runs)
    same = runs.on_shared_seeds(setting for pair in settings.values() for setting in pair.values())
    figure, axes = pyplot.subplots(1, 3, figsize=(9.2, 3.3), layout="constrained")
    for number, axis in enumerate(axes):
        for label in ("MiB", "AlterSGD"):
            ours = {x: _spreads(same, pair[label]) for x, pair in settings.items() if x > 0}
            theirs = {x: means[label] for x, means in paper.TABLE_3.items()} if _with_paper(runs) else {}
            look: dict[str, Any] = {"color": COLOURS[label], "marker": MARKERS[label], "markersize": 5}
            _curves(axis, ours, theirs, number, (f"{label}, ours", f"{label}, paper"), **look)
        group, papers = groups(runs)[number], paper.GROUPS[number]
        title = f"{group} (paper: {papers})" if group != papers and _with_paper(runs) else group
        axis.set(xscale="log", xlabel="λ", ylim=(0, None), title=title)
        axis.set_xticks(paper.LAMBDAS, paper.LAMBDAS)
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("mIoU, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def readings_figure(runs: Collection) -> Figure | None:
    """A panel per group, a curve per reading over p, that of the control which stops at p,
    and the paper's points.
    """
    curves = {reading.name: list(over_p(runs, reading).values()) for reading in READINGS}
    if not any(
        setting in runs.cells and setting.p < 1 for settings in curves.values() for setting in settings
    ):
        return None
    curves["stop, a control"] = list(stops(runs).values())
    figure, axes = pyplot.subplots(1, 3, figsize=(10.4, 3.9), layout="constrained")
    looks = zip(READING_COLOURS, "osDv^", ("-", "-", "--", "--", ":"), strict=True)
    for (label, settings), (colour, marker, line) in zip(curves.items(), looks, strict=True):
        same = runs.on_shared_seeds(settings)
        shares = {float(setting.p): _spreads(same, setting) for setting in settings}
        for number, axis in enumerate(axes):
            known = {x: spreads[number] for x, spreads in shares.items() if spreads[number].mean is not None}
            values, bars = [s.mean for s in known.values()], [s.deviation or 0.0 for s in known.values()]
            look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linestyle": line}
            axis.errorbar(list(known), values, yerr=bars, capsize=2.5, label=label, **look)
    for number, axis in enumerate(axes):
        points = {float(p): values[number] for p, values in paper.FIGURE_P.items()}
        printed = {p: 0.0 if isinstance(v, str) else v for p, v in points.items() if v is not None}
        look = {"color": "black", "marker": "*", "markersize": 9, "markerfacecolor": "white"}
        if _with_paper(runs):
            axis.plot(
                list(printed), list(printed.values()), linestyle="none", label=paper_header(runs), **look
            )
        axis.set(xlabel="p", ylim=(-1, None), title=groups(runs)[number])
    axes[0].set_ylabel("mIoU, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


# section -> file name -> caption and how it is drawn
FIGURES: dict[str, dict[str, tuple[str, Callable[[Collection], Figure | None]]]] = {
    "table1": {
        "steps": ("The old classes after each step; bands: standard deviation over seeds.", steps_figure),
        "classes": ("IoU of each class after each step, mean over seeds.", classes_figure),
    },
    "flatness": {
        "flatness": (
            "Forgetting over curvature, a point for each run; rho: Spearman's rank correlation.",
            lambda runs: flatness_figure(runs, _looks),
        )
    },
    "table3": {"lambda": ("mIoU over λ; bars: standard deviation over seeds.", lambda_figure)},
    "readings": {
        "readings": ("mIoU over p in four readings; bars: standard deviation over seeds.", readings_figure)
    },
    "figure-p": {
        "p": ("mIoU over p; bars: standard deviation over seeds. Paper: what its text gives.", p_figure)
    },
}


# ----------------------------------------------------------------------------------------------------- pieces


def _methods(runs: Collection) -> dict[str, Setting]:
    """Return the rows of table 1 and the control, where they ran."""
    order = [*rows_of_methods(runs).values(), consolidate(runs)]
    return {name(runs, setting): setting for setting in order if setting in runs.cells}


def _looks(labels: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """Return a colour and a marker for each; those without one of their own share none with another."""
    own = [label for label in labels if label not in COLOURS]
    others = zip(own, cycle(OTHER_COLOURS), cycle(OTHER_MARKERS), strict=False)  # coprime: all pairs come
    return {label: (COLOURS[label], MARKERS.get(label)) for label in COLOURS} | {
        label: (colour, marker) for label, colour, marker in others
    }


def _with_paper(runs: Collection) -> bool:
    return identity.is_of_its_data(runs.reference.config)


def _spreads(runs: Collection, setting: Setting) -> list[Spread]:
    return [spread(runs.values(setting, key).values()) for key in KEYS]


def _curves(
    axis: Axes,
    ours: Mapping[float, Sequence[Spread]],
    theirs: Mapping[float, Sequence[float | None]],
    number: int,
    labels: tuple[str, str],
    papers_line: str = ":",
    **look: Any,
) -> None:
    """Metric `number` of each point: ours solid with error bars, the paper's hollow."""
    known = {x: spreads[number] for x, spreads in ours.items() if spreads[number].mean is not None}
    means, bars = [s.mean for s in known.values()], [s.deviation or 0.0 for s in known.values()]
    axis.plot(list(known), means, label=labels[0], **look)
    axis.errorbar(list(known), means, yerr=bars, fmt="none", ecolor=look["color"], capsize=2.5)
    printed = {x: values[number] for x, values in theirs.items() if values[number] is not None}
    hollow = {"markerfacecolor": "white", "linestyle": papers_line}
    if printed:
        axis.plot(list(printed), list(printed.values()), label=labels[1], **look, **hollow)


def _svg(figure: Figure) -> bytes:
    """Return the same bytes for the same figure, and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    pyplot.close(figure)
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()
