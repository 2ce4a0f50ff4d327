"""The tables of a report: which settings each of them wants, and how they are laid out.

A section is made by a function of the collected runs; SECTIONS holds them by the name that `--tables` and the markers of a
Markdown file use.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.protocols import BACKGROUND
from metrics.continual import group_names
from study import paper
from study import scoreboard as report_readings
from study.cells import (
    KEYS,
    background_taken_for,
    cell,
    cell_of_ratio,
    difference,
    listed,
    means,
    name,
    number,
    p_value,
    paper_differences,
    ratio,
    scientific,
    seeds,
    show,
    signed,
    time_of_a_picture,
)
from study.collection import (
    FLATNESS,
    LOGGED_FLATNESS,
    SMALLEST_TEST,
    Collection,
    Difference,
    machine_differences,
    spread,
)
from study.layouts import EMPTY, Section, Table
from study.paper import Setting

CLASSES_IN_A_TABLE = 15
CONTRADICTION = (
    f"The paper's means of {' and '.join(paper.CONTRADICTORY)} do not follow from its rows per class; "
    "they are shown as printed."
)
# Each choice that the paper leaves open alone, and what its theorem supposes. Step 0 stays shared, as in the paper.
ABLATIONS: list[dict[str, Any]] = [
    *({key: choice} for key, choices in paper.OPEN.items() for choice in choices[1:] if key != "from_step"),
    {"momentum": "off", "batch": "same", "lr": "hold"},
]
SEEDS_IN_BRACKETS = "In brackets: the number of seeds."
NOT_CORRECTED = (
    f"Mean ± standard deviation of the differences over the seeds that both have, and p of a paired t test, not corrected "
    f"for the number of comparisons. With fewer than {SMALLEST_TEST} such seeds, too few for a test, each difference is listed."
)


# ------------------------------------------------------------------------------------------------- what the tables are about


def groups(runs: Collection) -> list[str]:
    names = group_names(runs.steps)
    return [names["old"], names["new"], "all"]


def paper_header(runs: Collection) -> str:
    return "paper" if paper.is_papers(runs.reference.config) else f"paper ({paper.SETTING_IN_WORDS})"


def mib(runs: Collection, strength: float | None = None) -> Setting:
    return Setting("mib", paper.mib_strength(runs.protocol) if strength is None else float(strength))


def consolidate(runs: Collection) -> Setting:
    return paper.alternating(mib(runs), phase="consolidate")


def altersgd(runs: Collection) -> Setting:
    return paper.alternating(mib(runs))


def ablations(runs: Collection) -> list[Setting]:
    """Changes of AlterSGD and of the control that share lambda and p with them: those wanted, then others that ran."""
    wanted = [paper.alternating(mib(runs), **changes) for changes in ABLATIONS]
    common = ("mib", mib(runs).lambda_a, mib(runs).lambda_a, paper.DEFAULT_P)
    ran = [
        s
        for s in runs.cells
        if (s.method, s.lambda_a, s.lambda_b, s.p) == common
        and s.changes
        and not s.beside
        and not paper.READING.keys() & dict(s.changes).keys()
    ]
    return wanted + [s for s in ran if s not in wanted]


def found(runs: Collection) -> list[Setting]:
    """Every setting that ran, in the order of table 1, then the control, the ablations and the rest."""
    order = [*paper.rows(runs.protocol).values(), consolidate(runs), *ablations(runs)]
    rest = [s for s in runs.cells if s not in order]
    rest.sort(key=lambda s: (s.method, s.phase, s.p, s.lambda_a, s.lambda_b, str(s.changes)))
    return [s for s in order if s in runs.cells] + rest


def neighbours(runs: Collection) -> list[Setting]:
    """MiB with something else for flatness, and PLOP, as far as they ran."""
    return [s for s in found(runs) if (s.beside and s.phase == "descent") or s.method == "plop"]


def over_lambda(runs: Collection) -> dict[float, dict[str, Setting]]:
    """The settings of table 3 for the paper's lambdas and those that ran."""

    def at(strength: float) -> dict[str, Setting]:
        return {"MiB": mib(runs, strength), "AlterSGD": _pair(strength, strength)}

    ran = {s.lambda_a for s in runs.cells if s in at(s.lambda_a).values()}
    return {x: at(x) for x in sorted({*map(float, paper.LAMBDAS), *ran})}


def grid(runs: Collection) -> list[float]:
    """lambda_a and lambda_b of table 4: the paper's and those of runs where the two differ."""
    ran = {s for s in runs.cells if s == _pair(s.lambda_a, s.lambda_b) and s.lambda_a != s.lambda_b}
    return sorted({*map(float, paper.LAMBDAS), *(x for s in ran for x in (s.lambda_a, s.lambda_b))})


def shares(runs: Collection) -> dict:
    """p -> setting, for the paper's p and those that ran; p = 1 is plain MiB."""
    ran = {s.p for s in runs.cells if s == paper.alternating(mib(runs), p=s.p)}
    return {p: paper.alternating(mib(runs), p=p) for p in sorted({*paper.FIGURE_P, *ran})}


def _pair(lambda_a: float, lambda_b: float) -> Setting:
    return paper.alternating(Setting("mib", lambda_a), lambda_b=lambda_b)


# ---------------------------------------------------------------------------------------------------------------- the tables


def table_1(runs: Collection) -> Section:
    rows = paper.rows(runs.protocol)
    table = Table(
        "mIoU in percent after the last step",
        ["method", "seeds", *groups(runs), *paper.GROUPS],
        [[name, *means(runs, setting), *map(number, paper.MEANS[name])] for name, setting in rows.items()],
        [("", 1), ("ours", 4), (paper_header(runs), 3)],
        rules=_rules(rows),
    )
    notes = ["Means over foreground classes; mean ± standard deviation over seeds.", CONTRADICTION]
    return Section("table1", "Table 1: the methods", [table], notes, missing(runs, rows))


def table_2(runs: Collection) -> Section:
    rows = paper.rows(runs.protocol)
    names = runs.reference.class_names
    old = [c for c in runs.steps[0].new if c != BACKGROUND]
    new = [c for c in runs.steps[-1].seen if c != BACKGROUND and c not in old]
    tables = []
    for classes in (chunk for part in (old, new) for chunk in _chunks(part, CLASSES_IN_A_TABLE)):
        lines: list[list[str]] = []
        rules: list[int] = []
        for method, setting in rows.items():
            rules.append(len(lines))
            lines.append([method, seeds(runs, setting), *(cell(runs, setting, c) for c in classes)])
            if all(names[c] in paper.CLASSES for c in classes):
                theirs = dict(zip(paper.CLASSES, paper.PER_CLASS[method], strict=True))
                lines.append(
                    [f"{method}, {paper_header(runs)}", "", *(number(theirs[names[c]]) for c in classes)]
                )
        header = ["method", "seeds", *(names[c] for c in classes)]
        ends = dict.fromkeys((names[classes[0]], names[classes[-1]]))  # one name for one class
        title = f"IoU in percent of {' to '.join(ends)} after the last step"
        tables.append(Table(title, header, lines, rules=rules[1:]))
    return Section("table2", "Table 2: each class", tables, missing=missing(runs, rows))


def table_3(runs: Collection) -> Section:
    settings = over_lambda(runs)
    wanted = {f"{name}, λ {x:g}": setting for x, pair in settings.items() for name, setting in pair.items()}
    same = runs.on_shared_seeds(wanted.values())
    rows = []
    for strength, pair in settings.items():
        theirs = paper.TABLE_3.get(strength, {})
        row = [f"{strength:g}"]
        row += [cell(same, setting, key, with_seeds=True) for key in KEYS for setting in pair.values()]
        row += [number(theirs[name][i]) if theirs else EMPTY for i in range(3) for name in pair]
        rows.append(row)
    columns = [
        f"{group} {name}"
        for names in (groups(runs), paper.GROUPS)
        for group in names
        for name in paper.TABLE_3[1]
    ]
    table = Table(
        "mIoU in percent for different λ",
        ["λ", *columns],
        rows,
        [("", 1), ("ours", 6), (paper_header(runs), 6)],
    )
    notes = [SEEDS_IN_BRACKETS, *left_out(runs, same, wanted.values())]
    return Section("table3", "Table 3: λ", [table], notes, missing(runs, wanted))


def table_4(runs: Collection) -> Section:
    values = grid(runs)
    wanted = {f"λ_a {a:g}, λ_b {b:g}": _pair(a, b) for b in values for a in values}
    same = runs.on_shared_seeds(wanted.values())
    tables = []
    for key, group, paper_group in zip(KEYS, groups(runs), paper.GROUPS, strict=True):
        rows = [
            [
                f"{b:g}",
                *(cell(same, _pair(a, b), key, with_seeds=True) for a in values),
                *_paper_grid(paper_group, b),
            ]
            for b in values
        ]
        columns = [f"λ_a {a:g}" for a in (*values, *paper.LAMBDAS)]
        theirs = paper_header(runs) if group == paper_group else f"{paper_header(runs)}, {paper_group}"
        title = f"mIoU in percent of {group} for λ_a in descents and λ_b in ascents"
        spans = [("", 1), ("ours", len(values)), (theirs, len(paper.LAMBDAS))]
        tables.append(Table(title, ["λ_b", *columns], rows, spans))
    notes = [SEEDS_IN_BRACKETS, *left_out(runs, same, wanted.values())]
    return Section("table4", "Table 4: λ_a and λ_b", tables, notes, missing(runs, wanted))


def table_p(runs: Collection) -> Section:
    settings = shares(runs)
    same = runs.on_shared_seeds(settings.values())
    rows = [
        [paper.show_p(p), *means(same, setting), *map(number, paper.FIGURE_P.get(p, (None,) * 3))]
        for p, setting in settings.items()
    ]
    table = Table(
        "mIoU in percent for different p, the share of normal training in a step",
        ["p", "seeds", *groups(runs), *paper.GROUPS],
        rows,
        [("", 1), ("ours", 4), (paper_header(runs), 3)],
    )
    notes = [
        "At p = 30/30 nothing alternates: MiB. The paper's text gives but some points of its figure.",
        *left_out(runs, same, settings.values()),
    ]
    wanted = {f"p {paper.show_p(p)}": setting for p, setting in settings.items()}
    return Section("figure-p", "Figure over p", [table], notes, missing(runs, wanted))


def table_ablations(runs: Collection) -> Section:
    controls = [mib(runs), consolidate(runs), altersgd(runs)]
    settings = {name(runs, s): s for s in [*controls, *ablations(runs)]}
    rows = [
        [label, *means(runs, s), cell(runs, s, "forgetting")]
        + [signed(difference(runs, s, control, "all")) if s != control else EMPTY for control in controls]
        for label, s in settings.items()
    ]
    table = Table(
        "What the paper leaves open, against MiB, the control and default AlterSGD",
        ["phase", "seeds", *groups(runs), "forgetting", *(name(runs, control) for control in controls)],
        rows,
        [("", 2), ("mIoU in percent", 3), ("", 1), ("difference of all to", 3)],
        rules=[len(controls)],
    )
    notes = ["Differences: the mean over the seeds that both have."]
    return Section("ablations", "Ablations of the phase", [table], notes, missing(runs, settings))


def table_alternation(runs: Collection) -> Section:
    """Every setting of AlterSGD that ran beside its own control, and the published one if it ran or nothing else did."""
    ran = [s for s in found(runs) if s.phase == "altersgd" and _control(s) in runs.cells]
    published = [altersgd(runs)] if altersgd(runs) in runs.cells or not ran else []
    settings = list(dict.fromkeys([*published, *ran]))
    rows = []
    for setting in settings:
        pairs = [difference(runs, setting, _control(setting), key) for key in KEYS]
        shared = str(max(len(d.values) for d in pairs))
        rows.append([name(runs, setting), *means(runs, setting), shared, *_differences(pairs)])
    table = Table(
        "AlterSGD minus Consolidate with the same options, in points of mIoU",
        ["phase", "seeds", *groups(runs), "shared seeds", *["difference", "p"] * 3],
        rows,
        [("", 2), ("mIoU in percent", 3), ("", 1), *((group, 2) for group in groups(runs))],
    )
    wanted = {name(runs, s): s for s in [altersgd(runs), consolidate(runs)]}
    title = "What alternating adds"
    return Section("alternation", title, [table], [NOT_CORRECTED], missing(runs, wanted))


def _control(setting: Setting) -> Setting:
    return replace(setting, phase="consolidate")


def table_differences(runs: Collection) -> Section:
    controls = [mib(runs), consolidate(runs), altersgd(runs)]
    changed = [s for s in ablations(runs) if s in runs.cells]
    compared = {
        controls[0]: [s for s in found(runs) if s != controls[0]] or controls[1:],
        controls[1]: [controls[2], *changed],
        controls[2]: changed,
    }
    tables = [differences_table(runs, control, others) for control, others in compared.items() if others]
    wanted = {name(runs, control): control for control in controls}
    return Section("differences", "Differences, seed by seed", tables, [NOT_CORRECTED], missing(runs, wanted))


def differences_table(runs: Collection, control: Setting, others: Sequence[Setting]) -> Table:
    control_name = name(runs, control)
    rows = []
    for setting in others:
        pairs = [difference(runs, setting, control, key) for key in KEYS]
        row = [name(runs, setting), str(max(len(d.values) for d in pairs))]
        row += _differences(pairs)
        if control_name == "MiB":
            row += paper_differences(row[0])
        rows.append(row)
    header = ["setting", "shared seeds", *["difference", "p"] * 3]
    spans = [("", 2), *((group, 2) for group in groups(runs))]
    if control_name == "MiB":
        header, spans = [*header, *paper.GROUPS], [*spans, (paper_header(runs), 3)]
    return Table(f"Difference to {control_name}, in points of mIoU", header, rows, spans)


def _differences(pairs: Iterable[Difference]) -> list[str]:
    return [text for pair in pairs for text in (listed(pair), p_value(pair))]


def table_forgetting(runs: Collection) -> Section:
    old = groups(runs)[0]
    rows = [
        [
            *(name(runs, s), seeds(runs, s)),
            *(cell(runs, s, key) for key in ("first", "old", "forgetting", BACKGROUND)),
            background_taken_for(runs, s),
        ]
        for s in found(runs)
    ]
    table = Table(
        "What is forgotten, in points of mIoU",
        [
            *("setting", "seeds", f"{old} after step 0", f"{old} after the last", "forgetting"),
            *("IoU after the last", "pixels taken for"),
        ],
        rows,
        [("", 2), ("mIoU", 3), ("background", 2)],
    )
    notes = [
        "Forgetting: the mean drop of a foreground class from the best it had after an earlier step.",
        "No mean counts the background. The class that most of its lost pixels are taken for, and their share in percent.",
    ]
    return Section("forgetting", "Forgetting", [table], notes)


def table_costs(runs: Collection) -> Section:
    control = runs.values(mib(runs), "seconds")
    rows = []
    for setting in (s for s in found(runs) if s.method != "joint"):
        ours = runs.values(setting, "seconds")
        row = [name(runs, setting), str(len(ours)), show(spread(ours.values()), 0)]
        rows.append(
            [*row, ratio(runs, setting, mib(runs), "seconds"), str(len(ours.keys() & control.keys()))]
        )
    notes = ["Training alone, without scoring; the ratio is the mean over the seeds that both have."]
    unlike = machine_differences(runs.runs)
    if unlike:
        notes.append(f"Not made alike, so seconds cannot be compared: {'; '.join(unlike)}.")
    header = ["setting", "seeds", "seconds", "ratio to MiB", "shared seeds"]
    table = Table("Seconds of training in the steps after step 0", header, rows)
    return Section("costs", "Costs", [table], notes)


def table_neighbours(runs: Collection) -> Section:
    """AlterSGD beside other roads to flat minima: what is learned and kept, how flat it ends, and what it costs."""
    plain = mib(runs)
    settings = {name(runs, s): s for s in [plain, altersgd(runs), consolidate(runs), *neighbours(runs)]}
    rows = [
        [
            *(label, *means(runs, s), cell(runs, s, "forgetting")),
            *(scientific(runs, s, key) for key in FLATNESS),
            ratio(runs, s, plain, "gradients"),
            time_of_a_picture(runs, s),
        ]
        for label, s in settings.items()
    ]
    table = Table(
        "AlterSGD and its neighbours",
        [
            *("setting", "seeds", *groups(runs), "forgetting"),
            *("squared gradient norm", "top eigenvalue", "trace", "gradients", "time"),
        ],
        rows,
        [("", 2), ("mIoU in percent", 3), ("", 1), ("l_seg, norms in eval", 3), ("cost, MiB = 1", 2)],
        rules=[3],
    )
    tables, notes = (
        [table],
        [
            "Gradients: of single pictures, in the steps after step 0. Time: of a picture in an iteration of the step's "
            "last part, by scripts.benchmark updates."
        ],
    )
    changes = [
        [label, *(cell_of_ratio(runs, s, key) for key in LOGGED_FLATNESS)] for label, s in settings.items()
    ]
    changes = [row for row in changes if any(cell != EMPTY for cell in row[1:])]
    if changes:
        title = "What the last iterations of a step do: value at its end over that at the share p, mean of the steps"
        tables.append(Table(title, ["setting", "squared gradient norm", "top eigenvalue"], changes))
        notes.append("In brackets: the number of seeds. Below 1 it gets flatter.")
    return Section("neighbours", "Neighbours of AlterSGD", tables, notes, missing(runs, settings))


def table_readings(runs: Collection) -> Section:
    """The four readings of the paper, with a scoreboard."""
    if report_readings.ran(runs):
        absent = [line for wanted in report_readings.wanted(runs) for line in missing(runs, wanted)]
    else:
        absent = ["every reading but the default, and their controls"]
    return report_readings.section(runs, groups(runs), paper_header(runs), [NOT_CORRECTED], absent)


# --------------------------------------------------------------------------------------------------------------------- helpers


def missing(runs: Collection, wanted: Mapping[str, Setting]) -> list[str]:
    """Of the settings a table wants, those without a finished run for every seed that the table has anywhere."""
    all_seeds = runs.seeds(wanted.values())
    lines = []
    for label, setting in wanted.items():
        absent = [str(seed) for seed in all_seeds if seed not in runs.cells.get(setting, {})]
        if absent or not all_seeds:
            lines.append(
                f"{label}: {'seed' if len(absent) == 1 else 'seeds'} {', '.join(absent)}" if absent else label
            )
    return lines


def left_out(runs: Collection, same: Collection, settings: Iterable[Setting]) -> list[str]:
    """A note on the seeds that only some of the settings have, and which are not in `same`."""
    kept, all_seeds = same.seeds(settings), runs.seeds(settings)
    if kept == all_seeds:
        return []
    return [
        f"Of the seeds {', '.join(map(str, all_seeds))} only those that all of these have: {', '.join(map(str, kept))}."
    ]


def _paper_grid(group: str, lambda_b: float) -> list[str]:
    return list(map(number, paper.TABLE_4[group].get(lambda_b, (None,) * len(paper.LAMBDAS))))


def _rules(rows: Iterable[str]) -> list[int]:
    """The paper sets MiB and AlterSGD apart."""
    return [i for i, row in enumerate(rows) if row in ("MiB", "Joint")]


def _chunks(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


SECTIONS: dict[str, Callable[[Collection], Section]] = {
    "table1": table_1,
    "table2": table_2,
    "table3": table_3,
    "table4": table_4,
    "figure-p": table_p,
    "ablations": table_ablations,
    "alternation": table_alternation,
    "readings": table_readings,
    "differences": table_differences,
    "neighbours": table_neighbours,
    "forgetting": table_forgetting,
    "costs": table_costs,
}
