"""What stands in a cell of a report's table: a mean with its spread over seeds, a difference, a ratio."""

from data.protocols import BACKGROUND
from study import identity, paper
from study.collection import Collection
from study.identity import Setting
from study.layouts import EMPTY, Row
from study.spreads import SMALLEST_TEST, Difference, Spread, paired, spread

KEYS = ("old", "new", "all")
FURTHER = ("background", "all with background", "hIoU")


def name(runs: Collection, setting: Setting) -> str:
    return identity.label(setting, runs.protocol)


def row(setting: Setting, *cells: str) -> Row:
    """Return a row that is of one setting."""
    return Row(cells, method=identity.family(setting))


def means(runs: Collection, setting: Setting) -> list[str]:
    return [seeds(runs, setting), *(cell(runs, setting, key) for key in KEYS)]


def further(runs: Collection, setting: Setting) -> list[str]:
    """The background's IoU, the mean that counts it, and hIoU: what means over foreground classes hide."""
    return [cell(runs, setting, key) for key in (BACKGROUND, "with background", "metrics/hiou")]


def seeds(runs: Collection, setting: Setting) -> str:
    return str(len(runs.cells.get(setting, {})))


def cell(runs: Collection, setting: Setting, key: str | int, with_seeds: bool = False) -> str:
    value = spread(runs.values(setting, key).values())
    return show(value) + (f" ({value.n})" if with_seeds and value.n else "")


def show(value: Spread, digits: int = 1) -> str:
    if value.mean is None:
        return EMPTY
    deviation = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{value.mean:.{digits}f}{deviation}"


def scientific(runs: Collection, setting: Setting, key: str | int) -> str:
    """Three digits, for numbers that span orders of magnitude."""
    value = spread(runs.values(setting, key).values())
    if value.mean is None:
        return EMPTY
    return f"{value.mean:.3g}" + ("" if value.deviation is None else f" ± {value.deviation:.2g}")


def cell_of_ratio(runs: Collection, setting: Setting, key: str) -> str:
    value = spread(runs.values(setting, key).values())
    return f"{show(value, 2)} ({value.n})" if value.n else EMPTY


def ratio(runs: Collection, setting: Setting, control: Setting, key: str) -> str:
    """Return the mean over the seeds that both have."""
    ours, theirs = runs.values(setting, key), runs.values(control, key)
    return show(spread(ours[seed] / theirs[seed] for seed in ours.keys() & theirs.keys() if theirs[seed]), 2)


def time_of_an_image(runs: Collection, setting: Setting) -> str:
    """Measured once for all seeds."""
    known = set(runs.values(setting, "time").values())
    return f"{known.pop():.2f}" if len(known) == 1 else EMPTY


def background_taken_for(runs: Collection, setting: Setting) -> str:
    """Return the class that most of its lost pixels are given to, and their share in percent,
    the mean over seeds.
    """
    shares: dict[str, list[float]] = {}
    for run in runs.cells.get(setting, {}).values():
        for label, share in run.background_taken_for.items():
            shares.setdefault(label, []).append(100 * share)
    shares.pop(runs.reference.class_names[BACKGROUND], None)
    most = max(shares, key=lambda label: sum(shares[label]), default=None)
    return EMPTY if most is None or not sum(shares[most]) else f"{most} {show(spread(shares[most]), 0)}"


def number(value: float | str | None) -> str:
    return EMPTY if value is None else value if isinstance(value, str) else f"{value:.1f}"


def difference(runs: Collection, setting: Setting, control: Setting, key: str) -> Difference:
    return paired(runs.values(setting, key), runs.values(control, key))


def listed(value: Difference) -> str:
    """Return each difference where there are too few for a test, else their mean and deviation."""
    if len(value.values) < SMALLEST_TEST:
        return ", ".join(f"{d:+.1f}" for d in value.values) or EMPTY
    return f"{value.spread.mean:+.1f} ± {value.spread.deviation:.1f}"


def signed(value: Difference) -> str:
    return f"{value.spread.mean:+.1f}" if value.values else EMPTY


def p_value(value: Difference) -> str:
    if 0 < len(value.values) < SMALLEST_TEST:
        return f"n < {SMALLEST_TEST}"
    return EMPTY if value.p is None else "< 0.001" if value.p < 0.001 else f"{value.p:.3f}"


def paper_differences(row: str) -> list[str]:
    if row not in paper.MEANS:
        return [EMPTY] * 3
    return [
        f"{ours - theirs:+.1f}" for ours, theirs in zip(paper.MEANS[row], paper.MEANS["MiB"], strict=True)
    ]
