"""The tables of the paper with our numbers beside its own, and all tables of a report by name.

A section is made by a function of the collected runs; SECTIONS holds them by the name that `--tables` and the
markers of a Markdown file use.
"""

from collections.abc import Callable, Iterable, Sequence

from data.protocols import BACKGROUND
from study import comparisons, correlations, identity, ladder, orders, paper
from study.cells import FURTHER, KEYS, cell, further, means, number, row, seeds
from study.collection import Collection
from study.layouts import EMPTY, Row, Section, Table
from study.settings import (
    beside_paper,
    grid,
    groups,
    left_out,
    missing,
    over_lambda,
    pair_of,
    paper_header,
    ran,
    rows_of_methods,
    shares,
)

CLASSES_IN_A_TABLE = 15
CONTRADICTION = (
    f"The paper's means of {' and '.join(paper.CONTRADICTORY)} do not follow from its rows per class; "
    "they are shown as printed."
)
NOT_PRINTED = (None,) * len(paper.GROUPS)
SEEDS_IN_BRACKETS = "In brackets: the number of seeds."


def table_1(runs: Collection) -> Section:
    wanted = rows_of_methods(runs)
    rows = ran(runs, wanted)
    table = Table(
        "mIoU in percent after the last step",
        ["method", "seeds", *groups(runs), *FURTHER, *paper.GROUPS],
        [
            row(
                setting,
                name,
                *means(runs, setting),
                *further(runs, setting),
                *map(number, paper.MEANS.get(name, NOT_PRINTED)),
            )
            for name, setting in rows.items()
        ],
        [("", 1), ("ours", 7), (paper_header(runs), 3)],
        rules=_rules(rows),
    )
    notes = [
        "Means over foreground classes, but for the one with background; hIoU: the harmonic mean of old and "
        "new. Mean ± standard deviation over seeds."
    ]
    contradictory = any(name in rows for name in paper.CONTRADICTORY)
    notes += [CONTRADICTION] if contradictory and identity.is_of_its_data(runs.reference.config) else []
    table = beside_paper(runs, table)
    return Section("table1", "Table 1: the methods", [table], notes, missing(runs, wanted))


def table_2(runs: Collection) -> Section:
    wanted = rows_of_methods(runs)
    names = runs.reference.class_names
    with_paper = identity.is_of_its_data(runs.reference.config)
    old = [c for c in runs.steps[0].new if c != BACKGROUND]
    new = [c for c in runs.steps[-1].seen if c != BACKGROUND and c not in old]
    tables = []
    for classes in (chunk for part in (old, new) for chunk in _chunks(part, CLASSES_IN_A_TABLE)):
        lines: list[Row] = []
        rules: list[int] = []
        for method, setting in ran(runs, wanted).items():
            rules.append(len(lines))
            ours = (cell(runs, setting, c) for c in classes)
            lines.append(row(setting, method, seeds(runs, setting), *ours))
            if with_paper and method in paper.PER_CLASS and all(names[c] in paper.CLASSES for c in classes):
                theirs = dict(zip(paper.CLASSES, paper.PER_CLASS[method], strict=True))
                printed = (number(theirs[names[c]]) for c in classes)
                lines.append(row(setting, f"{method}, {paper_header(runs)}", "", *printed))
        header = ["method", "seeds", *(names[c] for c in classes)]
        ends = dict.fromkeys((names[classes[0]], names[classes[-1]]))  # one name for one class
        title = f"IoU in percent of {' to '.join(ends)} after the last step"
        tables.append(Table(title, header, lines, rules=rules[1:]))
    return Section("table2", "Table 2: each class", tables, missing=missing(runs, wanted))


def table_3(runs: Collection) -> Section:
    settings = over_lambda(runs)
    wanted = {f"{name}, λ {x:g}": setting for x, pair in settings.items() for name, setting in pair.items()}
    same = runs.on_shared_seeds(wanted.values())
    rows = []
    for strength, pair in settings.items():
        if not ran(runs, pair):
            continue
        theirs = paper.TABLE_3.get(strength, {})
        cells = [f"{strength:g}"]
        cells += [cell(same, setting, key, with_seeds=True) for key in KEYS for setting in pair.values()]
        cells += [number(theirs[name][i]) if theirs else EMPTY for i in range(3) for name in pair]
        rows.append(cells)
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
    return Section("table3", "Table 3: λ", [beside_paper(runs, table)], notes, missing(runs, wanted))


def table_4(runs: Collection) -> Section:
    values = grid(runs)
    wanted = {f"λ_a {a:g}, λ_b {b:g}": pair_of(a, b) for b in values for a in values}
    same = runs.on_shared_seeds(wanted.values())
    tables = []
    for key, group, paper_group in zip(KEYS, groups(runs), paper.GROUPS, strict=True):
        rows = [
            [
                f"{b:g}",
                *(cell(same, pair_of(a, b), key, with_seeds=True) for a in values),
                *_paper_grid(paper_group, b),
            ]
            for b in values
            if any(pair_of(a, b) in runs.cells for a in values)
        ]
        columns = [f"λ_a {a:g}" for a in (*values, *paper.LAMBDAS)]
        theirs = paper_header(runs) if group == paper_group else f"{paper_header(runs)}, {paper_group}"
        title = f"mIoU in percent of {group} for λ_a in descents and λ_b in ascents"
        spans = [("", 1), ("ours", len(values)), (theirs, len(paper.LAMBDAS))]
        tables.append(beside_paper(runs, Table(title, ["λ_b", *columns], rows, spans)))
    notes = [SEEDS_IN_BRACKETS, *left_out(runs, same, wanted.values())]
    return Section("table4", "Table 4: λ_a and λ_b", tables, notes, missing(runs, wanted))


def table_p(runs: Collection) -> Section:
    settings = shares(runs)
    same = runs.on_shared_seeds(settings.values())
    rows = [
        row(
            setting,
            identity.show_p(p),
            *means(same, setting),
            *map(number, paper.FIGURE_P.get(p, (None,) * 3)),
        )
        for p, setting in settings.items()
        if setting in runs.cells
    ]
    table = Table(
        "mIoU in percent for different p, the share of normal training in a step",
        ["p", "seeds", *groups(runs), *paper.GROUPS],
        rows,
        [("", 1), ("ours", 4), (paper_header(runs), 3)],
    )
    known = " The paper's text gives but some points of its figure."
    notes = [
        "At p = 30/30 nothing alternates: MiB." + known * identity.is_of_its_data(runs.reference.config),
        *left_out(runs, same, settings.values()),
    ]
    wanted = {f"p {identity.show_p(p)}": setting for p, setting in settings.items()}
    return Section("figure-p", "Figure over p", [beside_paper(runs, table)], notes, missing(runs, wanted))


def _paper_grid(group: str, lambda_b: float) -> list[str]:
    return list(map(number, paper.TABLE_4[group].get(lambda_b, (None,) * len(paper.LAMBDAS))))


def _rules(rows: Iterable[str]) -> list[int]:
    """The paper sets MiB and AlterSGD apart; a user's own methods come after them."""
    names = list(rows)
    return [i for i, row in enumerate(names) if row in ("MiB", "Joint") or names[i - 1] == "AlterSGD"]


def _chunks(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


SECTIONS: dict[str, Callable[[Collection], Section]] = {
    "table1": table_1,
    "table2": table_2,
    "table3": table_3,
    "table4": table_4,
    "figure-p": table_p,
    "ablations": comparisons.table_ablations,
    "alternation": comparisons.table_alternation,
    "readings": comparisons.table_readings,
    "differences": comparisons.table_differences,
    "related": comparisons.table_related_methods,
    "ladder": ladder.table_ladder,
    "forgetting": comparisons.table_forgetting,
    "flatness": correlations.table_flatness,
    "orders": orders.table_orders,
    "metrics": comparisons.table_metrics,
    "evaluations": comparisons.table_evaluations,
    "costs": comparisons.table_costs,
}
# What a report shows in full anyway, cut for the first screen of a Markdown file.
IN_DOCUMENTS: dict[str, Callable[[Collection], Section]] = {"ladder-in-brief": ladder.table_in_brief}
