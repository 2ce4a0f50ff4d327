"""The section `readings` of a report: the four readings of AlterSGD over p and lambda, their controls,
and a scoreboard.

The scoreboard's criteria stand in docs/altersgd.md; here each is a function of the means over seeds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from study import identity, paper
from study.cells import KEYS, cell, difference, listed, means, name, number, p_value, row, signed
from study.collection import Collection
from study.identity import Setting
from study.layouts import EMPTY, Row, Section, Table
from study.readings import CONTROLLED_P, CORNERS, PUBLISHED_P, READINGS, SIXTHS, Reading
from study.settings import beside_paper, mib
from study.spreads import spread

COLLAPSED, KEPT, NEW_GONE = 5.0, -2.0, 2.0  # points of mIoU, of the criteria
MIB = Fraction(1)  # the share p at which nothing alternates
PLACES = ("boundary", "half 1", "half 2", "end")
CURVATURE = {
    "l_seg": "",
    "l_seg + λ R": "objective_",
    "old classes, test images": "old_",
}


# ----------------------------------------------------------------------------------------------- the settings


def epochs(runs: Collection) -> int:
    return runs.reference.config["train"]["epochs_later"]


def setting_of(
    runs: Collection,
    reading: Reading,
    p: Fraction,
    lambda_a: float | None = None,
    lambda_b: float | None = None,
) -> Setting:
    """Return the setting that stands for the paper's p and lambdas in this reading."""
    base = mib(runs, lambda_a)
    return identity.alternating(
        base, p=reading.share(p, epochs(runs)), lambda_b=lambda_b, **dict(reading.changes)
    )


def controls_of(runs: Collection, reading: Reading, p: Fraction) -> list[Setting]:
    controls = reading.controls(p, epochs(runs))
    return [identity.alternating(mib(runs), phase=phase, p=share) for phase, share in controls]


def over_p(runs: Collection, reading: Reading) -> dict[Fraction, Setting]:
    """Return the paper's p -> the setting that stands for it; at the last one, 1, nothing alternates."""
    return {p: setting_of(runs, reading, p) for p in SIXTHS} | {MIB: mib(runs)}


def stops(runs: Collection) -> dict[Fraction, Setting]:
    """Return the paper's p -> MiB that stops there, with the learning rates of the whole step;
    at the last one, 1, it is MiB.
    """
    return {p: identity.alternating(mib(runs), phase="stop", p=p) for p in (*SIXTHS, MIB)}


def over_lambda(runs: Collection, reading: Reading) -> dict[tuple[float, float], Setting]:
    pairs = [(x, x) for x in paper.LAMBDAS] + list(CORNERS)
    return {(a, b): setting_of(runs, reading, PUBLISHED_P, a, b) for a, b in pairs}


def wanted(runs: Collection) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Return what `scripts.reproduce readings` runs over p with the controls, and over lambda,
    by the names of the tables.
    """
    settings, lambdas = [mib(runs)], [mib(runs, x) for x in paper.LAMBDAS]
    for reading in READINGS:
        settings += over_p(runs, reading).values()
        settings += [control for p in CONTROLLED_P for control in controls_of(runs, reading, p)]
        settings += stops(runs).values()
        lambdas += over_lambda(runs, reading).values()
    others = [setting for setting in lambdas if setting not in settings]
    return {name(runs, s): s for s in settings}, {name(runs, s): s for s in others}


def ran(runs: Collection) -> bool:
    """Return whether there is a run of a reading other than the default."""
    return any(paper.READING.keys() & dict(setting.changes).keys() for setting in runs.cells)


# --------------------------------------------------------------------------------------------- the scoreboard


@dataclass(frozen=True)
class Verdict:
    holds: bool | None  # None: the runs it needs are not there
    shown: str = EMPTY

    def __str__(self) -> str:
        return self.shown if self.holds is None else f"{'yes' if self.holds else 'no'}: {self.shown}"


Judge = Callable[[Collection, Reading], Verdict]
UNKNOWN = Verdict(None)


def _mean(runs: Collection, setting: Setting, key: str) -> float | None:
    return spread(runs.values(setting, key).values()).mean


def _gain(runs: Collection, ours: Setting, theirs: Setting, key: str, least: float) -> Verdict:
    """Return whether `ours` minus `theirs` is above `least`, over the seeds that both have."""
    pair = difference(runs, ours, theirs, key)
    if pair.spread.mean is None:
        return UNKNOWN
    return Verdict(pair.spread.mean > least, signed(pair))


def gain(runs: Collection, reading: Reading) -> Verdict:
    return _gain(runs, setting_of(runs, reading, PUBLISHED_P), mib(runs), "old", 0.0)


def kept(runs: Collection, reading: Reading) -> Verdict:
    return _gain(runs, setting_of(runs, reading, PUBLISHED_P), mib(runs), "new", KEPT)


def collapse(runs: Collection, reading: Reading) -> Verdict:
    values = [_mean(runs, setting_of(runs, reading, p), "all") for p in SIXTHS[:2]]
    if None in values:
        return UNKNOWN
    return Verdict(all(v is not None and v < COLLAPSED for v in values), ", ".join(map(number, values)))


def middle(runs: Collection, reading: Reading) -> Verdict:
    setting = setting_of(runs, reading, Fraction(1, 2))
    old, new, plain = _mean(runs, setting, "old"), _mean(runs, setting, "new"), _mean(runs, mib(runs), "old")
    if old is None or new is None or plain is None:
        return UNKNOWN
    return Verdict(old < plain / 2 and new < NEW_GONE, f"{old:.1f} and {new:.1f}")


def best(runs: Collection, reading: Reading) -> Verdict:
    settings = over_p(runs, reading)
    same = runs.on_shared_seeds(settings.values())
    values = {p: _mean(same, setting, "all") for p, setting in settings.items()}
    if None in values.values():
        return UNKNOWN
    highest = max(reversed(values), key=lambda p: (values[p] or 0.0, p == PUBLISHED_P))
    where = "MiB" if highest == MIB else f"p {show_share(reading.share(highest, epochs(runs)))}"
    return Verdict(highest == PUBLISHED_P, f"{where} with {number(values[highest])}")


def gain_at_every_lambda(runs: Collection, reading: Reading) -> Verdict:
    settings = over_lambda(runs, reading)
    pairs = [difference(runs, settings[x, x], mib(runs, x), "old") for x in paper.LAMBDAS]
    if any(pair.spread.mean is None for pair in pairs):
        return UNKNOWN
    return Verdict(all((pair.spread.mean or 0.0) > 0 for pair in pairs), ", ".join(map(signed, pairs)))


def order_over_lambda(runs: Collection, reading: Reading) -> Verdict:
    ours = {x: over_lambda(runs, reading)[x, x] for x in paper.LAMBDAS}
    plain = {x: mib(runs, x) for x in paper.LAMBDAS}
    same = runs.on_shared_seeds([*ours.values(), *plain.values()])
    orders = []
    for settings in (ours, plain):
        values = {x: _mean(same, setting, "all") for x, setting in settings.items()}
        if None in values.values():
            return UNKNOWN
        orders.append(sorted(values, key=lambda x: -(values[x] or 0.0)))
    return Verdict(orders[0] == orders[1], " > ".join(f"{x:g}" for x in orders[0]))


def old_fall_with_lambda_b(runs: Collection, reading: Reading) -> Verdict:
    settings = over_lambda(runs, reading)
    return _gain(runs, settings[100, 1], settings[100, 1000], "old", 0.0)


def new_rise_with_lambda_b(runs: Collection, reading: Reading) -> Verdict:
    settings = over_lambda(runs, reading)
    return _gain(runs, settings[100, 1000], settings[100, 1], "new", 0.0)


def keeps_at_1_1000(runs: Collection, reading: Reading) -> Verdict:
    return _gain(runs, over_lambda(runs, reading)[1, 1000], mib(runs, 1), "old", 0.0)


def keeps_at_10_100(runs: Collection, reading: Reading) -> Verdict:
    return _gain(runs, over_lambda(runs, reading)[10, 100], mib(runs, 10), "old", 0.0)


# What the paper prints -> the criterion; each is a row of the scoreboard.
FACTS: dict[str, Judge] = {
    "gain on old classes at p 25/30": gain,
    "new classes kept at p 25/30": kept,
    "collapse at p 5/30 and 10/30": collapse,
    "p 15/30 keeps little": middle,
    "p 25/30 is best": best,
    "gain on old classes at every λ": gain_at_every_lambda,
    "all classes over λ in MiB's order": order_over_lambda,
    "λ_a 100: old classes fall with λ_b": old_fall_with_lambda_b,
    "λ_a 100: new classes rise with λ_b": new_rise_with_lambda_b,
    "(1, 1000) keeps more than MiB with λ 1": keeps_at_1_1000,
    "(10, 100) keeps more than MiB with λ 10": keeps_at_10_100,
}


def scoreboard(runs: Collection) -> Table:
    judged = {fact: [judge(runs, reading) for reading in READINGS] for fact, judge in FACTS.items()}
    verdicts = {fact: of_readings for fact, of_readings in judged.items() if set(of_readings) != {UNKNOWN}}
    rows = [[fact, *map(str, of_readings)] for fact, of_readings in verdicts.items()]
    columns = list(zip(*verdicts.values(), strict=True))
    known = [[verdict.holds for verdict in column if verdict.holds is not None] for column in columns]
    if rows:
        rows.append(["facts reproduced", *(f"{sum(holds)} of {len(holds)}" for holds in known)])
    header = ["fact in the paper", *(reading.name for reading in READINGS)]
    title = "Which of the paper's facts each reading reproduces"
    return Table(title, header, rows, rules=[len(rows) - 1])


# ------------------------------------------------------------------------------------------- the other tables


def phase_and_share(setting: Setting) -> str:
    return "MiB" if setting.p == MIB else f"{identity.PHASES[setting.phase]}, p {show_share(setting.p)}"


def show_share(p: Fraction) -> str:
    return f"{p.numerator}/{p.denominator}"


def table_over_p(runs: Collection, groups: Sequence[str], papers: str) -> Table:
    rows: list[Row] = []
    rules: list[int] = []
    if mib(runs) in runs.cells:
        rows.append(row(mib(runs), "MiB", "1", *means(runs, mib(runs)), *[EMPTY] * 3, *_paper_at(MIB)))
    for reading in READINGS:
        rules.append(len(rows))
        # Of two of the paper's p that one share stands for, the later: 25/30 is the published one.
        for setting, p in {setting_of(runs, reading, p): p for p in SIXTHS}.items():
            if setting not in runs.cells:
                continue
            pairs = [difference(runs, setting, mib(runs), key) for key in KEYS]
            ours = *means(runs, setting), *map(listed, pairs)
            rows.append(row(setting, reading.name, show_share(setting.p), *ours, *_paper_at(p)))
    return Table(
        "mIoU in percent of the readings over p",
        ["reading", "p", "seeds", *groups, *groups, *paper.GROUPS],
        rows,
        [("", 3), ("mIoU in percent", 3), ("difference to MiB", 3), (papers, 3)],
        rules=rules,
    )


def _paper_at(p: Fraction) -> list[str]:
    return list(map(number, paper.FIGURE_P.get(p, (None,) * 3)))


def table_controls(runs: Collection, groups: Sequence[str]) -> Table:
    rows = []
    for reading in READINGS:
        for setting, p in {setting_of(runs, reading, p): p for p in CONTROLLED_P}.items():
            for control in (*controls_of(runs, reading, p), mib(runs)):
                pairs = [difference(runs, setting, control, key) for key in KEYS]
                shared = max(len(pair.values) for pair in pairs)
                what = reading.name, show_share(setting.p), phase_and_share(control), str(shared)
                found = (text for pair in pairs for text in (listed(pair), p_value(pair)))
                rows += [row(setting, *what, *found)] if shared else []
    return Table(
        "Each reading minus the control that lacks its second order, and minus MiB, in points of mIoU",
        ["reading", "p", "minus", "shared seeds", *["difference", "p"] * 3],
        rows,
        [("", 4), *((group, 2) for group in groups)],
    )


def table_of_controls(runs: Collection, groups: Sequence[str]) -> Table:
    """Return the controls' own scores; one that trains to the end, in steps of an epoch or two, is MiB."""
    settings = [
        control for p in CONTROLLED_P for reading in READINGS for control in controls_of(runs, reading, p)
    ] + list(stops(runs).values())
    there = {s for s in settings if s.p < MIB and s in runs.cells}
    rows = [
        row(s, identity.PHASES[s.phase], show_share(s.p), *means(runs, s))
        for s in sorted(there, key=lambda s: (-s.p, s.phase))
    ]
    return Table("mIoU in percent of the controls", ["control", "p", "seeds", *groups], rows)


def table_over_lambda(runs: Collection, groups: Sequence[str], papers: str) -> Table:
    columns = {reading.name: over_lambda(runs, reading) for reading in READINGS}
    rows = []
    for pair in next(iter(columns.values())):
        a, b = pair
        plain = [cell(runs, mib(runs, a), key) if a == b else EMPTY for key in KEYS[:2]]
        ours = [cell(runs, settings[pair], key) for settings in columns.values() for key in KEYS[:2]]
        if set(plain + ours) == {EMPTY}:
            continue
        theirs = [paper.TABLE_4[group][b][paper.LAMBDAS.index(a)] for group in paper.GROUPS[:2]]
        rows.append([f"{a:g}", f"{b:g}", *plain, *ours, *map(number, theirs)])
    spans = [("", 2), ("MiB", 2), *((reading, 2) for reading in columns), (papers, 2)]
    header = ["λ_a", "λ_b", *list(groups[:2]) * (len(columns) + 1), *paper.GROUPS[:2]]
    return Table("mIoU in percent over λ, at the p that stands for 25/30", header, rows, spans)


def table_curvature(runs: Collection) -> list[Table]:
    """Return what run.flatness logged at the places of a step: the geometric mean over the steps,
    one line a place.
    """
    settings = {name(runs, mib(runs)): mib(runs)} | {
        f"{reading.name}, p {show_share(s.p)}": s
        for reading in READINGS
        for s in [setting_of(runs, reading, p) for p in CONTROLLED_P]
    }
    settings |= {
        phase_and_share(s): s
        for p in CONTROLLED_P
        for reading in READINGS
        for s in controls_of(runs, reading, p)
    }
    rows: list[Row] = []
    rules: list[int] = []
    for label, setting in settings.items():
        logged = {place: _logged(runs, setting, place) for place in PLACES}
        found = {place: metrics for place, metrics in logged.items() if any(f != EMPTY for f in metrics)}
        if found:
            rules.append(len(rows))
        rows += [row(setting, label, place, *metrics) for place, metrics in found.items()]
    if not rows:
        return []
    header = ["setting", "where", *["loss", "squared gradient norm", "top eigenvalue"] * len(CURVATURE)]
    spans = [("", 2), *((title, 3) for title in CURVATURE)]
    title = "Curvature inside the steps after step 0, mean over the steps"
    return [Table(title, header, rows, spans, rules=rules[1:])]


def _logged(runs: Collection, setting: Setting, place: str) -> list[str]:
    metrics = [
        f"{prefix}{metric}"
        for prefix in CURVATURE.values()
        for metric in ("loss", "squared_gradient_norm", "top_eigenvalue")
    ]
    of_seeds = runs.cells.get(setting, {}).values()
    values = [[run.logged_flatness(metric, place) for run in of_seeds] for metric in metrics]
    return [_three_digits(v for v in of_metric if v is not None) for of_metric in values]


def _three_digits(values: Iterable[float]) -> str:
    mean = spread(values).mean
    return EMPTY if mean is None else f"{mean:.3g}"


def section(
    runs: Collection, groups: Sequence[str], papers: str, notes: Sequence[str], missing: Sequence[str]
) -> Section:
    tables = [
        scoreboard(runs),
        beside_paper(runs, table_over_p(runs, groups, papers)),
        table_controls(runs, groups),
        table_of_controls(runs, groups),
        beside_paper(runs, table_over_lambda(runs, groups, papers)),
        *table_curvature(runs),
    ]
    ours = [
        "By epoch, p is the nearest to the paper's that leaves an odd number of epochs, three at least. "
        "Criteria of the scoreboard: docs/altersgd.md.",
        *notes,
    ]
    return Section("readings", "Readings of the paper", tables, ours, missing)
