"""How far two orders agree, by Spearman's rank correlation: our order of the methods and the published one,
and measured flatness and forgetting over all runs of a report.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from study.cells import name
from study.collection import FLATNESS, LOGGED_FLATNESS, Collection, RecordedRun
from study.identity import Setting
from study.layouts import EMPTY, Section, Table
from study.settings import found as in_order
from study.spreads import spread

FEWEST = 4  # pairs of which a correlation is told
# How many classes a published mean of all is over -> the same mean of ours.
CONVENTIONS = {20: "all", 21: "with background"}
Published = Sequence[tuple[float | None, float | None, float, int]]  # old, new, all, classes
CALLED: dict[str | int, str] = {"gradient norm": "squared gradient norm"}  # as the related methods' table
MEASURED_ALIKE = ("step", "on", "pictures", "batch", "seed")  # of a flatness.json
AFTER_TRAINING, INSIDE_RUNS = "scripts.flatness, after the last step", "run.flatness, mean of later steps"


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return rho, equal values sharing their mean rank; None for fewer than FEWEST pairs,
    or where all values of a side are equal.
    """
    if len(one) < FEWEST or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    from scipy.stats import spearmanr  # takes a second to import

    return float(spearmanr(one, other).statistic)


def _rho(pairs: Iterable[tuple[float, float]]) -> float | None:
    pairs = list(pairs)
    return spearman([x for x, _ in pairs], [y for _, y in pairs])


# ------------------------------------------------------------------------------------ the order of the ladder


def notes_on_order(runs: Collection, published: Mapping[Setting, Published]) -> list[str]:
    """Return what is said under the ladder: rho between our means of all classes and the published ones.

    Ours is taken in the convention of the published figure. Since the two differ by points, rho of the rows
    of one convention is told too, where they are enough.
    """
    pairs: dict[int, dict[Setting, tuple[float, float]]] = {classes: {} for classes in CONVENTIONS}
    for setting, figures in published.items():
        for *_, every, classes in figures:
            ours = spread(runs.values(setting, CONVENTIONS[classes]).values()).mean
            if ours is not None:
                pairs[classes][setting] = ours, every
    without, counted = pairs.values()
    whole = _rho((counted | without).values())
    if whole is None:
        return []
    said = f"Spearman's rho {whole:.2f} over {len(counted | without)} rows"
    parts = {classes: _rho(of.values()) for classes, of in pairs.items()}
    known = [
        f"{rho:.2f} over the {len(pairs[classes])} of {classes} classes"
        for classes, rho in parts.items()
        if rho is not None
    ]
    also = f" ({', '.join(known)})" if known else ""
    return [f"Our order of the methods by all classes and the published one: {said}{also}."]


# ------------------------------------------------------------------------------------ flatness and forgetting


@dataclass(frozen=True)
class Points:
    """Every run of which a curvature and the forgetting are known."""

    metric: str
    measured: str
    by_setting: Mapping[Setting, Sequence[tuple[float, float]]]  # curvature and points of forgetting

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return [pair for pairs in self.by_setting.values() for pair in pairs]

    @property
    def rho(self) -> float | None:
        return _rho(self.pairs)

    @property
    def rho_of_settings(self) -> float | None:
        """Of the means over seeds, geometric ones of curvature: seeds of a method are no methods."""
        return _rho(
            (statistics.geometric_mean(x for x, _ in pairs), statistics.fmean(y for _, y in pairs))
            for pairs in self.by_setting.values()
        )


def points_of(runs: Collection) -> list[Points]:
    """Return the points of each curvature that enough runs have. It must be positive: its axis is one of
    logarithms.
    """
    alike = measured_alike(runs)

    def after_training(run: RecordedRun, read: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        return read(run.flatness) if run in alike else None

    sources: list[tuple[str, str, Callable[[RecordedRun], float | None]]] = [
        (CALLED.get(key, str(key)), AFTER_TRAINING, partial(after_training, read=read))
        for key, read in FLATNESS.items()
    ]
    sources += [
        (key.replace("_", " "), INSIDE_RUNS, partial(RecordedRun.handed_over, metric=key))
        for key in LOGGED_FLATNESS
    ]
    found = []
    for metric, measured, value in sources:
        by_setting = {}
        for setting in in_order(runs):
            known = [(value(run), forgetting(run)) for run in runs.cells[setting].values()]
            pairs = [(x, y) for x, y in known if x is not None and x > 0 and y is not None]
            if pairs:
                by_setting[setting] = pairs
        points = Points(metric, measured, by_setting)
        found += [points] if len(points.pairs) >= FEWEST else []
    return found


def forgetting(run: RecordedRun) -> float | None:
    """Return it in points."""
    value = run.results["steps"][-1].get("mean_forgetting")
    return None if value is None else 100 * value


def measured_alike(runs: Collection) -> list[RecordedRun]:
    """Return the runs whose flatness.json was made as most are: of the same step, on as many images."""

    def how(run: RecordedRun) -> tuple[Any, ...]:
        return tuple(run.flatness_options.get(key) for key in MEASURED_ALIKE)

    measured = [run for run in runs.runs if run.flatness]
    most = Counter(map(how, measured)).most_common(1)
    return [run for run in measured if how(run) == most[0][0]]


def table_flatness(runs: Collection) -> Section:
    """Nothing unless enough runs carry a curvature."""
    title = "Flatness and forgetting"
    points = points_of(runs)
    if not points:
        return Section("flatness", title, [])
    rows = [
        [
            *(p.metric, p.measured, str(len(p.pairs)), _two_digits(p.rho)),
            *(str(len(p.by_setting)), _two_digits(p.rho_of_settings)),
        ]
        for p in points
    ]
    table = Table(
        "Rank correlation of curvature with forgetting",
        ["curvature of l_seg", "measured by", "n", "rho", "n", "rho"],
        rows,
        [("", 2), ("runs", 2), ("settings, mean over seeds", 2)],
    )
    notes = [
        "Spearman's rho, over all runs of this report that have both; above 0, what is flatter forgets less. "
        f"None is told of fewer than {FEWEST}, and none of them says what is the cause."
    ]
    other = sum(bool(run.flatness) for run in runs.runs) - len(measured_alike(runs))
    if other:
        notes.append(
            f"Left out: {other} measured by scripts.flatness at another step or on other images than most."
        )
    return Section("flatness", title, [table], notes)


def labelled(runs: Collection, points: Points) -> dict[str, Sequence[tuple[float, float]]]:
    """Return the points by the names of their settings."""
    return {name(runs, setting): pairs for setting, pairs in points.by_setting.items()}


def _two_digits(rho: float | None) -> str:
    return EMPTY if rho is None else f"{rho:.2f}"
