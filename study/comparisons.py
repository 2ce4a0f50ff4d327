"""The tables of a report that the paper does not have: ablations, controls, differences, forgetting,
costs, related methods.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from data.protocols import BACKGROUND
from study import paper, scoreboard
from study.cells import (
    FURTHER,
    KEYS,
    background_taken_for,
    cell,
    cell_of_ratio,
    difference,
    further,
    listed,
    means,
    name,
    number,
    p_value,
    paper_differences,
    ratio,
    row,
    scientific,
    seeds,
    show,
    signed,
    time_of_an_image,
)
from study.collection import (
    BENCHMARK_FILE,
    FLATNESS,
    LOGGED_FLATNESS,
    Collection,
    RecordedRun,
    machine_differences,
    steps_0_of_one_recipe,
)
from study.identity import Setting
from study.layouts import EMPTY, Row, Section, Table
from study.settings import (
    ablations,
    altersgd,
    beside_paper,
    consolidate,
    found,
    groups,
    mib,
    missing,
    paper_header,
    ran,
    related_methods,
)
from study.spreads import SMALLEST_TEST, Difference, spread
from tracking.tables import metrics_in

NOT_CORRECTED = (
    "Mean ± standard deviation of the differences over the seeds that both have, and p of a paired t test, "
    f"not corrected for the number of comparisons. With fewer than {SMALLEST_TEST} such seeds, too few for a "
    "test, each difference is listed."
)


def notes_on_pairs(runs: Collection) -> list[str]:
    """Return what the differences of pairs rest on, and which pairs do not go out from one model."""
    return [NOT_CORRECTED, *(_trained_again(runs, models) for models in steps_0_of_one_recipe(runs.runs))]


def _trained_again(runs: Collection, models: Sequence[Sequence[RecordedRun]]) -> str:
    """Name the runs that do not have MiB's step 0, or the one that most have."""
    seed, plain = models[0][0].seed, mib(runs)
    settings = sorted(
        ([run.setting for run in model] for model in models), key=lambda found: (plain in found, len(found))
    )
    *others, usual = settings
    control = plain if plain in usual else usual[0]
    old, *theirs = (number(runs.values(found[0], "first")[seed]) for found in (usual, *others))
    names = "; ".join(name(runs, setting) for found in others for setting in found)
    return (
        f"Of seed {seed} these go out from another step 0 than {name(runs, control)}, trained anew by the "
        f"same recipe ({groups(runs)[0]}: {', '.join(theirs)} instead of {old}), which is part of their "
        f"differences: {names}."
    )


def table_ablations(runs: Collection) -> Section:
    controls = [mib(runs), consolidate(runs), altersgd(runs)]
    settings = {name(runs, s): s for s in [*controls, *ablations(runs)]}
    rows = [
        row(
            s,
            *(label, *means(runs, s), *further(runs, s), cell(runs, s, "forgetting")),
            *(signed(difference(runs, s, control, "all")) if s != control else EMPTY for control in controls),
        )
        for label, s in ran(runs, settings).items()
    ]
    table = Table(
        "What the paper leaves open, against MiB, the control and default AlterSGD",
        [
            *("phase", "seeds", *groups(runs), *FURTHER, "forgetting"),
            *(name(runs, control) for control in controls),
        ],
        rows,
        [("", 2), ("mIoU in percent", 3), ("", 4), ("difference of all to", 3)],
        rules=[sum(control in runs.cells for control in controls)],
    )
    notes = ["Differences: the mean over the seeds that both have."]
    return Section("ablations", "Ablations of the phase", [table], notes, missing(runs, settings))


def table_alternation(runs: Collection) -> Section:
    """Return every setting of AlterSGD that ran beside its own control, and the published one if it ran."""
    rows = []
    for setting in (s for s in found(runs) if s.phase == "altersgd"):
        if setting != altersgd(runs) and _control(setting) not in runs.cells:
            continue
        pairs = [difference(runs, setting, _control(setting), key) for key in KEYS]
        shared = str(max(len(d.values) for d in pairs))
        rows.append(row(setting, name(runs, setting), *means(runs, setting), shared, *_differences(pairs)))
    table = Table(
        "AlterSGD minus Consolidate with the same options, in points of mIoU",
        ["phase", "seeds", *groups(runs), "shared seeds", *["difference", "p"] * 3],
        rows,
        [("", 2), ("mIoU in percent", 3), ("", 1), *((group, 2) for group in groups(runs))],
    )
    wanted = {name(runs, s): s for s in [altersgd(runs), consolidate(runs)]}
    title = "What alternating adds"
    return Section("alternation", title, [table], notes_on_pairs(runs), missing(runs, wanted))


def _control(setting: Setting) -> Setting:
    return replace(setting, phase="consolidate")


def table_differences(runs: Collection) -> Section:
    controls = [mib(runs), consolidate(runs), altersgd(runs)]
    changed = [s for s in ablations(runs) if s in runs.cells]
    compared = {
        controls[0]: [s for s in found(runs) if s != controls[0]],
        controls[1]: [controls[2], *changed],
        controls[2]: changed,
    }
    tables = [differences_table(runs, control, others) for control, others in compared.items()]
    wanted = {name(runs, control): control for control in controls}
    return Section(
        "differences", "Differences, seed by seed", tables, notes_on_pairs(runs), missing(runs, wanted)
    )


def differences_table(runs: Collection, control: Setting, others: Sequence[Setting]) -> Table:
    control_name = name(runs, control)
    rows = []
    for setting in others:
        pairs = [difference(runs, setting, control, key) for key in KEYS]
        shared = max(len(d.values) for d in pairs)
        if not shared:
            continue
        label = name(runs, setting)
        theirs = paper_differences(label) if control_name == "MiB" else []
        rows.append(row(setting, label, str(shared), *_differences(pairs), *theirs))
    header = ["setting", "shared seeds", *["difference", "p"] * 3]
    spans = [("", 2), *((group, 2) for group in groups(runs))]
    title = f"Difference to {control_name}, in points of mIoU"
    if control_name != "MiB":
        return Table(title, header, rows, spans)
    header, spans = [*header, *paper.GROUPS], [*spans, (paper_header(runs), 3)]
    return beside_paper(runs, Table(title, header, rows, spans))


def _differences(pairs: Iterable[Difference]) -> list[str]:
    return [text for pair in pairs for text in (listed(pair), p_value(pair))]


def table_forgetting(runs: Collection) -> Section:
    old = groups(runs)[0]
    rows = [
        row(
            s,
            *(name(runs, s), seeds(runs, s)),
            *(cell(runs, s, key) for key in ("first", "old", "forgetting", BACKGROUND)),
            background_taken_for(runs, s),
        )
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
        "No mean counts the background. The class that most of its lost pixels are taken for, and their "
        "share in percent.",
    ]
    return Section("forgetting", "Forgetting", [table], notes)


def table_metrics(runs: Collection) -> Section:
    """Return what files of metrics/ register, where runs have it."""
    names = metrics_in(run.results["steps"][-1] for run in runs.runs)
    rows = [
        row(s, name(runs, s), *means(runs, s), *(cell(runs, s, f"metrics/{metric}") for metric in names))
        for s in found(runs)
    ]
    table = Table(
        "Further metrics in percent after the last step", ["setting", "seeds", *groups(runs), *names], rows
    )
    return Section("metrics", "Further metrics", [table] if names else [])


def table_evaluations(runs: Collection) -> Section:
    """Scores in other settings than the one that the runs have in common,
    each beside the same seeds in that one.
    """
    rows: list[Row] = []
    rules: list[int] = []
    unfit = []
    for evaluation, scored in runs.evaluations.items():
        unfit += [run.place for run in scored.runs if not run.is_finished]
        for setting, seeds_of in scored.cells.items():
            whole = {seed: run for seed, run in seeds_of.items() if run.is_finished}
            own = {seed: runs.cells[setting][seed] for seed in whole}
            rules += [len(rows)] if whole else []
            for title, cells in {"as trained": own, evaluation: whole}.items() if whole else ():
                part = replace(runs, cells={setting: cells})
                metrics = [*means(part, setting), cell(part, setting, "forgetting")]
                rows.append(row(setting, name(runs, setting), title, *metrics))
    header = ["setting", "evaluation", "seeds", *groups(runs), "forgetting"]
    table = Table(
        "mIoU in percent of the same models, scored in other settings", header, rows, rules=rules[1:]
    )
    notes = [f"Left out, for the last step was not scored: {', '.join(unfit)}."] if unfit else []
    return Section("evaluations", "Other evaluation settings", [table] if rows else [], notes)


def table_costs(runs: Collection) -> Section:
    """Seconds, if all runs were made alike: else they mean nothing and are left out. Ratios are those of a
    benchmark, whose variants took turns: what else a machine did while runs trained is in their seconds.
    """
    unlike = machine_differences(runs.runs)
    if unlike:
        return Section("costs", "Costs", [], [f"Seconds are left out: made under {'; '.join(unlike)}."])
    rows = []
    for setting in (s for s in found(runs) if s.method != "joint"):
        ours = runs.values(setting, "seconds")
        seconds = show(spread(ours.values()), 0)
        time = time_of_an_image(runs, setting)
        rows.append(row(setting, name(runs, setting), str(len(ours)), seconds, time))
    notes = [
        "Training alone, without scoring. Time: of an image in an iteration of a step's last part, MiB = 1, "
        f"by scripts.benchmark updates --json <folder of the runs>/{BENCHMARK_FILE}."
    ]
    if any("processor" not in run.results.get("environment", {}) for run in runs.runs):
        notes.append("Older runs do not tell their processor: seconds compare only if it was the same.")
    header = ["setting", "seeds", "seconds", "time, MiB = 1"]
    table = Table("Seconds of training in the steps after step 0", header, rows)
    return Section("costs", "Costs", [table], notes)


def table_related_methods(runs: Collection) -> Section:
    """AlterSGD beside other roads to flat minima: what is learned and kept, how flat it ends,
    and what it costs.
    """
    plain = mib(runs)
    controls = [plain, altersgd(runs), consolidate(runs)]
    settings = {name(runs, s): s for s in [*controls, *related_methods(runs)]}
    rows = [
        row(
            s,
            *(label, *means(runs, s), *further(runs, s), cell(runs, s, "forgetting")),
            *(scientific(runs, s, key) for key in FLATNESS),
            ratio(runs, s, plain, "gradients"),
            time_of_an_image(runs, s),
        )
        for label, s in ran(runs, settings).items()
    ]
    table = Table(
        "AlterSGD and related methods",
        [
            *("setting", "seeds", *groups(runs), *FURTHER, "forgetting"),
            *("squared gradient norm", "top eigenvalue", "trace", "gradients", "time"),
        ],
        rows,
        [("", 2), ("mIoU in percent", 3), ("", 4), ("l_seg, norms in eval", 3), ("cost, MiB = 1", 2)],
        rules=[sum(control in runs.cells for control in controls)],
    )
    tables, notes = (
        [table],
        [
            "Gradients: of single images, in the steps after step 0. Time: of an image in an iteration of "
            "the step's last part, by scripts.benchmark updates."
        ],
    )
    changes = [
        row(s, label, *(cell_of_ratio(runs, s, key) for key in LOGGED_FLATNESS))
        for label, s in settings.items()
    ]
    changes = [cells for cells in changes if any(cell != EMPTY for cell in cells[1:])]
    if changes:
        title = (
            "What the last iterations of a step do: value at its end over that at the share p, "
            "mean of the steps"
        )
        tables.append(Table(title, ["setting", "squared gradient norm", "top eigenvalue"], changes))
        notes.append("In brackets: the number of seeds. Below 1 it gets flatter.")
    return Section("related", "Related methods", tables, notes, missing(runs, settings))


def table_readings(runs: Collection) -> Section:
    """Return the four readings of the paper, with a scoreboard."""
    if scoreboard.ran(runs):
        absent = [line for wanted in scoreboard.wanted(runs) for line in missing(runs, wanted)]
    else:
        absent = ["every reading but the default, and their controls"]
    return scoreboard.section(runs, groups(runs), paper_header(runs), notes_on_pairs(runs), absent)
