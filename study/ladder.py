"""The table of the ladder: all methods of the field side by side, in both conventions of the mean, with what
each of them uses that others do not, and the published figure.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import study
from configs.schema import load_config
from engine.arguments import read_config
from study import paper
from study.cells import cell, means, name, number, row
from study.collection import Collection
from study.correlations import notes_on_order
from study.experiments import Experiment, ladder
from study.identity import OTHERS, PHASES, Setting, setting_of
from study.layouts import EMPTY, Row, Section, Table
from study.rungs import IN_BRIEF, LADDER, OwnRecipe, Rung, followed
from study.settings import found, groups, missing

PROJECT = Path(study.__file__).parent.parent  # from where overlays are named
METHODS = {method: row for row, (method, _) in (paper.METHODS | OTHERS).items()}
OTHER_TABLES = {"plop"}  # which have it too
FURTHER = [method for method, _ in OTHERS.values()]


def table_ladder(runs: Collection) -> Section:
    """Nothing unless a method ran that is in no other table."""
    title = "The ladder"
    if not any(s.method in FURTHER and s.method not in OTHER_TABLES for s in runs.cells):
        return Section("ladder", title, [])
    wanted = {setting: rung for rung, setting in settings_of_rungs(runs).items()}
    there = {setting: rung for setting, rung in wanted.items() if setting in runs.cells}
    more = [s for s in found(runs) if s.method in FURTHER and s not in wanted]
    published = paper.PUBLISHED.get(_published_mode(runs) or "", {})
    rows = [
        row(
            s,
            *(name(runs, s), *means(runs, s), cell(runs, s, "old with background")),
            *(cell(runs, s, key) for key in ("with background", 0, "metrics/hiou")),
            "; ".join(remarks(runs, s)) or EMPTY,
            *([printed(published.get(row_of(there[s]) if s in there else "", ()))] if published else []),
        )
        for s in [*there, *more]
    ]
    old, new, every = groups(runs)
    header = ["method", "seeds", old, new, every, "old", "all", "background", "hIoU", "uses"]
    spans = [("", 2), ("mIoU in percent", 3), ("with background", 2), ("", 3)]
    if published:
        header, spans = [*header, "old / new / all"], [*spans, (f"published ({paper.SETTING_IN_WORDS})", 1)]
    table = Table(
        "All methods: mIoU in percent after the last step", header, rows, spans, rules=_rules(there, rows)
    )
    absent = missing(runs, {name(runs, s): s for s in wanted})
    beside = {s: published.get(row_of(rung), ()) for s, rung in wanted.items()}
    said = [*notes(runs, bool(published)), *notes_on_order(runs, beside)]
    return Section("ladder", title, [table], said, absent)


def table_in_brief(runs: Collection) -> Section:
    """The ladder for a first screen: the best known rungs that have run, by short names, in fewer columns."""
    settings = settings_of_rungs(runs)
    published = paper.PUBLISHED.get(_published_mode(runs) or "", {})
    old, new, every = groups(runs)
    rows = [
        [
            *(short_name(rung), *means(runs, s), cell(runs, s, 0), cell(runs, s, "with background")),
            "; ".join(remark.partition(":")[0] for remark in remarks(runs, s)) or EMPTY,
            *([printed_all(published.get(row_of(rung), ()))] if published else []),
        ]
        for rung, s in ((rung, settings[rung]) for rung in IN_BRIEF)
        if s in runs.cells
    ]
    header = ["method", "seeds", old, new, every, "background", "all with background", "uses"]
    header += [f"published all ({paper.SETTING_IN_WORDS})"] if published else []
    table = Table("mIoU in percent after the last step", header, rows)
    return Section("brief", "The ladder in brief", [table] if rows else [])


def settings_of_rungs(runs: Collection) -> dict[Rung, Setting]:
    """Return the settings that the runs of `scripts.reproduce ladder` have under the recipe of the runs."""
    config = runs.reference.config
    data = {key: config["data"][key] for key in ("dataset", "protocol", "steps")}
    given = [f"data.{key}={json.dumps(value)}" for key, value in data.items() if value is not None]
    given += [f"optim.{key}={config['optim'][key]}" for key in ("lr", "lr_later")]
    given += [f"model.pretrained={json.dumps(config['model']['pretrained'])}"]
    experiments = ladder(load_config([], given))
    return {rung: _setting(experiment, given) for rung, experiment in zip(LADDER, experiments, strict=True)}


def _setting(experiment: Experiment, given: list[str]) -> Setting:
    overlays = [str(PROJECT / overlay) for overlay in experiment.overlays]
    config = read_config([*overlays, *given, *experiment.recipe, *experiment.settings])
    return setting_of(config.model_dump())


def row_of(rung: Rung) -> str:
    """Return how papers call a rung: "DKD-M"; MiB with AlterSGD is called as in its paper."""
    method = METHODS[rung.method]
    if rung.plus is not None:
        plus = PHASES.get(rung.plus, rung.plus)
        return plus if rung.method == "mib" else f"{method} + {plus}"
    return f"{method}-M" if rung.memory and rung.method != "mib_augm" else method


def short_name(rung: Rung) -> str:
    """Return "MiB + AlterSGD", "DKD-M": without the settings that a full table names."""
    if rung.plus is None:
        return row_of(rung)
    return f"{METHODS[rung.method]} + {PHASES.get(rung.plus, rung.plus.upper())}"


def remarks(runs: Collection, setting: Setting) -> list[str]:
    """Return what runs say of themselves; those of older versions say nothing."""
    every = [run.results.get("remarks", ()) for run in runs.cells.get(setting, {}).values()]
    return list(dict.fromkeys(remark for said in every for remark in said))


def printed(figures: Any) -> str:
    """Return "46.2 / 12.9 / 37.9 (20)": the classes that "all" is the mean of in brackets."""
    lines = [f"{' / '.join(map(number, means))} ({classes})" for *means, classes in figures]
    return ", ".join(lines) or EMPTY


def printed_all(figures: Any) -> str:
    """Return "37.9 (20), 40.7 (21)"."""
    return ", ".join(f"{number(means[-1])} ({classes})" for *means, classes in figures) or EMPTY


def notes(runs: Collection, published: bool) -> list[str]:
    lines = [
        "Mean ± standard deviation over seeds. The new classes are the same in both conventions: the "
        "background counts as old. hIoU: the harmonic mean of old and new."
    ]
    own: dict[tuple[OwnRecipe, float], dict[str, None]] = {}
    for run in runs.runs:
        for part in followed(run.config).items():
            own.setdefault(part, {})[METHODS[run.setting.method]] = None
    lines += [
        f"Otherwise than the rest, {', '.join(names)} with {part.key}={value:g}: {part.why}."
        for (part, value), names in own.items()
    ]
    if published:
        lines.append(
            "Published: in brackets the classes that the mean of all is over, 20 without and 21 with the "
            "background; SSUL's with saliency maps, and a checkpoint that was chosen on the test images."
        )
    return lines


def _published_mode(runs: Collection) -> str | None:
    """The mode of the images, on the data that the published figures are of."""
    data = runs.reference.config["data"]
    of_voc = data["dataset"] == "voc" and data["protocol"] == "15-1" and data["order"] is None
    return data["mode"] if of_voc else None


def _rules(rungs: Mapping[Setting, Rung], rows: Sequence[Row]) -> list[int]:
    """Return where a part begins: with a memory, with something on top, what is not asked for."""
    kinds = [(rung.memory > 0, rung.plus) for rung in rungs.values()]
    parts = ["memory" if memory else "on top" if plus else "alone" for memory, plus in kinds]
    parts += ["more"] * (len(rows) - len(parts))
    return [i for i in range(1, len(parts)) if parts[i] != parts[i - 1]]
