"""Which settings the tables and figures of a report want, by what ran, and what of them is missing."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from metrics.continual import group_names
from study import identity, paper
from study.collection import Collection
from study.identity import Setting
from study.layouts import Table, as_row

# Each choice that the paper leaves open alone, and what its theorem supposes. Step 0 stays shared, as in the
# paper.
ABLATIONS: list[dict[str, Any]] = [
    *({key: choice} for key, choices in paper.OPEN.items() for choice in choices[1:] if key != "from_step"),
    {"momentum": "off", "batch": "same", "lr": "hold"},
]


def groups(runs: Collection) -> list[str]:
    """Return the names of the groups of classes that means are over: old, new, all."""
    names = group_names(runs.steps)
    return [names["old"], names["new"], "all"]


def paper_header(runs: Collection) -> str:
    """Return the title above the paper's numbers, which says so where its recipe was another."""
    return "paper" if identity.is_papers(runs.reference.config) else f"paper ({paper.SETTING_IN_WORDS})"


def beside_paper(runs: Collection, table: Table) -> Table:
    """Return the table; without its last group of columns, the paper's,
    where these would stand beside numbers of other data.
    """
    if identity.is_of_its_data(runs.reference.config):
        return table
    width = table.groups[-1][1]
    rows = [as_row(row).without_last(width) for row in table.rows]
    return replace(table, header=table.header[:-width], rows=rows, groups=table.groups[:-1])


def mib(runs: Collection, strength: float | None = None) -> Setting:
    """Plain MiB, with the paper's lambda unless another is given."""
    return Setting("mib", identity.mib_strength(runs.protocol) if strength is None else float(strength))


def consolidate(runs: Collection) -> Setting:
    """Return the control of AlterSGD."""
    return identity.alternating(mib(runs), phase="consolidate")


def altersgd(runs: Collection) -> Setting:
    """AlterSGD as published."""
    return identity.alternating(mib(runs))


def ablations(runs: Collection) -> list[Setting]:
    """Changes of AlterSGD and of the control that share lambda and p with them: those wanted,
    then others that ran.
    """
    wanted = [identity.alternating(mib(runs), **changes) for changes in ABLATIONS]
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
    """Return every setting that ran, in the order of table 1, then the control,
    the ablations and the rest.
    """
    order = [*identity.rows(runs.protocol).values(), consolidate(runs), *ablations(runs)]
    rest = [s for s in runs.cells if s not in order]
    rest.sort(key=lambda s: (s.method, s.phase, s.p, s.lambda_a, s.lambda_b, str(s.changes)))
    return [s for s in order if s in runs.cells] + rest


def own_methods(runs: Collection) -> dict[str, Setting]:
    """Return the methods and phases that a user added, by name, in every setting that ran."""
    return {identity.label(s, runs.protocol): s for s in found(runs) if identity.is_own(s)}


def rows_of_methods(runs: Collection) -> dict[str, Setting]:
    """Return the rows of table 1: the paper's, and before Joint a user's own."""
    papers = identity.rows(runs.protocol)
    joint = {"Joint": papers.pop("Joint")}
    return papers | own_methods(runs) | joint


def related_methods(runs: Collection) -> list[Setting]:
    """MiB with something else for flatness, and PLOP, as far as they ran."""
    return [
        s
        for s in found(runs)
        if s.phase == "descent" and (s.method == "plop" or (s.beside and s.method == "mib"))
    ]


def over_lambda(runs: Collection) -> dict[float, dict[str, Setting]]:
    """Return the settings of table 3 for the paper's lambdas and those that ran."""

    def at(strength: float) -> dict[str, Setting]:
        return {"MiB": mib(runs, strength), "AlterSGD": pair_of(strength, strength)}

    ran = {s.lambda_a for s in runs.cells if s in at(s.lambda_a).values()}
    return {x: at(x) for x in sorted({*map(float, paper.LAMBDAS), *ran})}


def grid(runs: Collection) -> list[float]:
    """lambda_a and lambda_b of table 4: the paper's and those of runs where the two differ."""
    ran = {s for s in runs.cells if s == pair_of(s.lambda_a, s.lambda_b) and s.lambda_a != s.lambda_b}
    return sorted({*map(float, paper.LAMBDAS), *(x for s in ran for x in (s.lambda_a, s.lambda_b))})


def shares(runs: Collection) -> dict[Any, Setting]:
    """p -> setting, for the paper's p and those that ran; p = 1 is plain MiB."""
    ran = {s.p for s in runs.cells if s == identity.alternating(mib(runs), p=s.p)}
    return {p: identity.alternating(mib(runs), p=p) for p in sorted({*paper.FIGURE_P, *ran})}


def pair_of(lambda_a: float, lambda_b: float) -> Setting:
    """AlterSGD with a lambda for its descents and one for its ascents."""
    return identity.alternating(Setting("mib", lambda_a), lambda_b=lambda_b)


def ran(runs: Collection, wanted: Mapping[str, Setting]) -> dict[str, Setting]:
    """Of the settings a table wants, those that have a row in it."""
    return {label: setting for label, setting in wanted.items() if setting in runs.cells}


def missing(runs: Collection, wanted: Mapping[str, Setting]) -> list[str]:
    """Of the settings a table wants, those without a finished run for every seed
    that the table has anywhere.
    """
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
    """Return a note on the seeds that only some of the settings have, and which are not in `same`."""
    kept, all_seeds = same.seeds(settings), runs.seeds(settings)
    if kept == all_seeds:
        return []
    return [
        f"Of the seeds {', '.join(map(str, all_seeds))} only those that all of these have: "
        f"{', '.join(map(str, kept))}."
    ]
