"""The four readings of the paper: at which shares they are compared, how their runs are told apart, and what
is said of them."""

import copy
import json
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_report import Page, check_latex

import train
from configs.schema import load_config
from data.protocols import protocol_steps
from engine.arguments import read_config
from engine.results import step_result
from methods.phases.altersgd import AlterSGD
from scripts import report
from study import experiments, figures, identity, paper
from study import scoreboard as report_readings
from study.collection import Collection, RecordedRun, collect
from study.comparisons import table_readings
from study.experiments import Job
from study.identity import Setting, alternating
from study.layouts import EMPTY, Table
from study.plan import PRESETS, PlannedRun
from study.readings import CONTROLLED_P, READINGS, SIXTHS, ending_on_a_descent
from study.scoreboard import FACTS, mib, over_lambda, over_p

ROOT = Path(train.__file__).parent
BASE = load_config([], ["data.root=/nowhere", "data.protocol=15-1"]).model_dump(mode="json")
PLAN = protocol_steps("voc", "15-1")
NAMES = ("background", *paper.CLASSES)
MIB, ALTERSGD = "configs/methods/mib.yaml", "configs/altersgd.yaml"
BY_ITERATION, SEG_BY_EPOCH, ALL_BY_ITERATION, ALL_BY_EPOCH = READINGS

pytestmark = pytest.mark.usefixtures("at_the_root")


# ---- at which p --------------------------------------------------------------------------------------------


def thirtieths(*shares: int) -> list[Fraction]:
    return [Fraction(share, 30) for share in shares]


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        (30, thirtieths(5, 9, 15, 19, 25)),
        (12, [Fraction(share, 12) for share in (1, 3, 5, 7, 9)]),
        (10, [Fraction(share, 10) for share in (1, 3, 5, 7, 7)]),
        (3, [Fraction(0)] * 5),
        (
            2,
            [Fraction(1, 2)] * 5,
        ),  # one epoch is left, however near 0 would be: of two the model would be an ascent's
        (1, [Fraction(0)] * 5),
    ],
)
def test_the_shares_that_stand_for_the_papers(epochs, expected):
    assert [ending_on_a_descent(p, epochs) for p in SIXTHS] == expected


@pytest.mark.parametrize("epochs", range(1, 41))
def test_by_epoch_a_step_is_cut_at_an_epoch_and_ends_on_a_descent(epochs):
    for p in SIXTHS:
        share = ending_on_a_descent(p, epochs)
        left = epochs - share * epochs
        assert left.denominator == 1 and left % 2 == 1 and (left >= 3 or epochs < 3)
        odd = [Fraction(epochs - n, epochs) for n in range(3 if epochs > 2 else 1, epochs + 1, 2)]
        nearest = min(abs(other - p) for other in odd)
        assert abs(share - p) == nearest and share == min(o for o in odd if abs(o - p) == nearest)
        for epoch in (1, 5, 16):  # iterations; p goes through a config, as a float
            total, phase = epochs * epoch, AlterSGD(float(share), 1.0, every=epoch)
            assert phase.boundary(total) == share * total
            assert not phase.ascends(total, total)
            assert any(phase.ascends(t, total) for t in range(1, total + 1)) == (epochs > 2)


def test_only_readings_by_epoch_choose_their_share():
    p = Fraction(2, 3)
    assert [reading.share(p, 30) for reading in READINGS] == thirtieths(20, 19, 20, 19)
    assert [reading.share(Fraction(1), 30) for reading in READINGS] == [1] * 4
    assert [reading.by_epoch for reading in READINGS] == [False, True, False, True]


def test_controls_of_whole_epochs_of_all_of_l_also_train_for_the_one_that_does_not_cancel():
    p, both = Fraction(5, 6), ["pause", "stop"]
    assert BY_ITERATION.controls(p, 12) == [("consolidate", p)]
    assert SEG_BY_EPOCH.controls(p, 12) == [("consolidate", Fraction(9, 12))]
    assert ALL_BY_ITERATION.controls(p, 12) == [(phase, p) for phase in both]
    shares = (Fraction(9, 12), Fraction(10, 12))
    assert ALL_BY_EPOCH.controls(p, 12) == [(phase, share) for share in shares for phase in both]


# ---- which setting a run has -------------------------------------------------------------------------------


def setting(*arguments: str) -> Setting:
    config = read_config([*arguments, "data.root=/nowhere"]).model_dump(mode="json")
    return identity.setting_of(config)


CONSOLIDATE, PAUSE, STOP = ((MIB, f"configs/{name}.yaml") for name in ("consolidate", "pause", "stop"))
OPTIONS = (
    "phase.flip=all",
    "phase.every=epoch",
    "phase.momentum=off",
    "phase.batch=same",
    "phase.lambda_b=1",
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((*CONSOLIDATE, "phase.every=epoch"), CONSOLIDATE),
        ((*CONSOLIDATE, "phase.every=7", "phase.momentum=off"), (*CONSOLIDATE, "phase.momentum=off")),
        ((*PAUSE, *OPTIONS, "phase.lr=hold", "phase.weight_decay=signed"), PAUSE),
        ((*STOP, *OPTIONS, "phase.lr=hold", "phase.weight_decay=signed"), STOP),
        ((MIB, "configs/altersgd_epoch.yaml"), (MIB, ALTERSGD, "phase.flip=all", "phase.every=epoch")),
        ((MIB, ALTERSGD, "phase.every=1"), (MIB, ALTERSGD)),
        ((MIB, "configs/altersgd_epoch.yaml", "phase.p=1"), (MIB,)),
        ((*PAUSE, "phase.p=1"), (MIB,)),
        ((*STOP, "phase.p=1"), (MIB,)),
    ],
)
def test_configs_that_train_alike_have_one_setting(one, other):
    assert setting(*one) == setting(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((MIB, ALTERSGD, "phase.flip=all"), (MIB, ALTERSGD)),
        ((MIB, ALTERSGD, "phase.every=epoch"), (MIB, ALTERSGD)),
        ((MIB, ALTERSGD, "phase.every=9"), (MIB, ALTERSGD, "phase.every=epoch")),
        ((MIB, ALTERSGD, "phase.every=9"), (MIB, ALTERSGD, "phase.every=8")),
        # its halves differ in the lambda of R, in the batches, in the decay
        ((*CONSOLIDATE, "phase.every=epoch", "phase.lambda_b=1"), (*CONSOLIDATE, "phase.lambda_b=1")),
        ((*CONSOLIDATE, "phase.every=epoch", "phase.batch=same"), (*CONSOLIDATE, "phase.batch=same")),
        (
            (*CONSOLIDATE, "phase.every=epoch", "phase.weight_decay=signed"),
            (*CONSOLIDATE, "phase.weight_decay=signed"),
        ),
        (PAUSE, STOP),
        (PAUSE, (MIB,)),
        (PAUSE, CONSOLIDATE),
        ((*PAUSE, "phase.p=0.5"), PAUSE),
        ((*PAUSE, "phase.lambda_a=1"), PAUSE),
        ((*PAUSE, "phase.from_step=0"), PAUSE),
    ],
)
def test_configs_that_train_in_different_ways_have_two(one, other):
    assert setting(*one) != setting(*other)


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        ((MIB, "configs/altersgd_epoch.yaml"), "AlterSGD, flip all, every epoch"),
        ((MIB, ALTERSGD, "phase.every=9", "phase.momentum=off"), "AlterSGD, every 9, momentum off"),
        ((*PAUSE, "phase.p=7/10"), "Pause, p 21/30"),
        ((*STOP, "phase.p=9/12", "method.strength=10"), "Stop, λ 10, p 0.75"),
        (("configs/methods/lwf.yaml", "configs/pause.yaml"), "LwF + Pause"),
    ],
)
def test_labels_say_how_the_paper_is_read(arguments, label):
    assert identity.label(setting(*arguments), "15-1") == label


@pytest.mark.parametrize("preset", PRESETS)
def test_the_report_wants_the_runs_that_are_planned_and_no_two_are_called_alike(preset):
    overlays = PRESETS[preset].overlays
    config = load_config(overlays)
    planned = experiments.readings(config)
    assert len({experiment.name for experiment in planned}) == len(planned)
    produced = [setting(*overlays, *e.overlays, *e.settings) for e in planned]
    assert len(set(produced)) == len(produced)
    nothing = Collection(RecordedRun(Path("run"), {"config": config.model_dump(mode="json")}, "run"))
    over_p_and_controls, over_lambdas = report_readings.wanted(nothing)
    wanted = over_p_and_controls | over_lambdas
    assert set(wanted.values()) == set(produced)
    assert len(wanted) == len(over_p_and_controls) + len(over_lambdas) == len(produced)
    assert all(identity.label(s, config.data.protocol) == label for label, s in wanted.items())


def test_stop_costs_what_it_runs_and_pause_what_it_passes(tmp_path):
    sizes = (100, 10, 7)

    def passes(phase: str, *options: str) -> int:
        overlays = ("configs/voc/15-1.yaml", f"configs/{phase}.yaml")
        config = read_config([*overlays, "data.steps=[[1], [2], [3]]", f"run.folder={tmp_path}", *options])
        return PlannedRun(Job("run", (), needs="step0"), config, sizes).passes()

    assert passes("pause") == passes("altersgd") == 30 * 17
    assert passes("stop") == 25 * 17
    assert passes("stop", "phase.p=0.5") == 15 * 17
    assert passes("stop", "phase.from_step=2") == 30 * 10 + 25 * 7


# ---- results made up here ----------------------------------------------------------------------------------

Scores = Mapping[Setting, tuple[float, float]]  # mIoU of old and new classes


def config_of(setting: Setting, seed: int = 1, epochs: int = 30) -> dict:
    config = copy.deepcopy(BASE)
    config["train"] |= {"seed": seed, "epochs_later": epochs}
    config["method"] |= {"name": setting.method, "strength": setting.lambda_a}
    if setting.phase != "descent":
        phase = {"name": setting.phase, "p": float(setting.p), "lambda_b": setting.lambda_b}
        config["phase"] |= phase | dict(setting.changes)
    assert identity.setting_of(config) == setting
    return config


def made_up(setting: Setting, figures: tuple[float, float], seed: int = 1, epochs: int = 30) -> RecordedRun:
    old, new = figures
    steps: list[dict] = []
    for step in PLAN:
        ious = [0.9 if c == 0 else (old if c in PLAN[0].new else new) / 100 for c in step.seen]
        steps.append(step_result(step, PLAN, NAMES, np.eye(step.num_classes, dtype=int), ious, steps))
    results = {
        "config": config_of(setting, seed, epochs),
        "protocol": [step.new for step in PLAN],
        "environment": {"device": "a CPU"},
        "data": {"train": "t", "test": "v"},
        "steps": steps,
    }
    name = f"{identity.label(setting, '15-1')} {seed}".replace("/", "-")
    return RecordedRun(Path(name), results, name)


def collected(figures: Scores, epochs: int = 30, seeds: Iterable[int] = (1,)) -> Collection:
    runs = collect([made_up(setting, f, seed, epochs) for setting, f in figures.items() for seed in seeds])
    assert runs is not None
    return runs


def no_runs(epochs: int = 30) -> Collection:
    return Collection(
        RecordedRun(Path("none"), {"config": config_of(Setting("mib", 100.0), epochs=epochs)}, "none")
    )


# Where the paper prints no number, one between its neighbours.
OVER_P = dict(zip(SIXTHS, [(0.5, 0.1), (1.0, 0.1), (14.1, 0.5), (35.0, 8.0), (52.7, 12.9)], strict=True))
PLAIN = {x: paper.TABLE_3[x]["MiB"][:2] for x in paper.LAMBDAS}


def as_printed(reading, epochs: int = 30) -> dict[Setting, tuple[float, float]]:
    """A reading whose runs have the paper's own numbers, beside MiB's."""
    runs = no_runs(epochs)
    found = {mib(runs, x): figures for x, figures in PLAIN.items()}
    found |= {s: OVER_P[p] for p, s in over_p(runs, reading).items() if p < 1}
    for (a, b), s in over_lambda(runs, reading).items():
        old, new, _ = (paper.TABLE_4[group][b][paper.LAMBDAS.index(a)] for group in paper.GROUPS)
        found[s] = (old, new)
    return found


def replaced(
    figures: Scores, reading, changes: Mapping, epochs: int = 30
) -> dict[Setting, tuple[float, float]]:
    """With other metrics (None: with no run) at a share, at (lambda_a, lambda_b), or of MiB with a lambda."""
    runs = no_runs(epochs)
    places = over_p(runs, reading) | over_lambda(runs, reading)
    places |= {f"MiB {x}": mib(runs, x) for x in paper.LAMBDAS}
    figures = dict(figures) | {places[place]: new for place, new in changes.items()}
    return {s: f for s, f in figures.items() if f is not None}


def column(table: Table, reading) -> dict[str, str]:
    number = list(table.header).index(reading.name)
    return {row[0]: row[number] for row in table.rows}


def verdicts(runs: Collection, reading) -> dict[str, str]:
    """What the scoreboard says of a reading, by the name of the criterion; a fact may have no row."""
    shown = column(report_readings.scoreboard(runs), reading)
    judged = {judge.__name__: shown.get(fact, EMPTY) for fact, judge in FACTS.items()}
    return judged | {"sum": shown["facts reproduced"]}


CRITERIA = {judge.__name__ for judge in FACTS.values()}


def said(shown: Mapping[str, str], word: str) -> set[str]:
    return {criterion for criterion in CRITERIA if re.match(rf"{word}(:|$)", shown[criterion])}


# ---- the scoreboard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", READINGS, ids=lambda reading: reading.name)
@pytest.mark.parametrize("epochs", [12, 30])
def test_the_papers_own_numbers_reproduce_all_of_its_facts(reading, epochs):
    runs = collected(as_printed(reading, epochs), epochs)
    shown = verdicts(runs, reading)
    assert said(shown, "yes") == CRITERIA and shown["sum"] == "11 of 11"
    assert shown["gain"] == "yes: +10.3" and shown["kept"] == "yes: +0.3"
    assert shown["middle"] == "yes: 14.1 and 0.5" and shown["collapse"] == "yes: 0.4, 0.8"
    assert shown["gain_at_every_lambda"] == "yes: +5.2, +12.6, +10.3, +2.7"
    assert shown["order_over_lambda"] == "yes: 100 > 10 > 1 > 1000"
    share = {12: "3/4", 30: "5/6"}[epochs] if reading.by_epoch else "5/6"
    assert shown["best"] == f"yes: p {share} with 42.7"
    for other in READINGS:
        if other != reading:
            shown = verdicts(runs, other)
            assert said(shown, EMPTY) == CRITERIA and shown["sum"] == "0 of 0"


P = dict(enumerate(SIXTHS, start=1))  # in sixths


@pytest.mark.parametrize(
    ("changes", "no"),
    [
        ({P[5]: (42.3, 13.9)}, {"gain", "gain_at_every_lambda", "order_over_lambda"}),
        ({P[5]: (52.7, 10.7)}, set()),  # not yet two points
        ({P[5]: (52.7, 10.5)}, {"kept"}),
        ({P[1]: (6.5, 0.1), P[2]: (6.5, 0.1)}, set()),  # 4.9 of all classes
        ({P[1]: (6.7, 0.1)}, {"collapse"}),  # 5.1
        ({P[2]: (6.7, 0.1)}, {"collapse"}),
        ({P[3]: (21.1, 1.9)}, set()),
        ({P[3]: (21.3, 1.9)}, {"middle"}),  # more than half of 42.4
        ({P[3]: (21.1, 2.1)}, {"middle"}),
        ({P[4]: (53.0, 13.0)}, {"best"}),
        ({P[4]: OVER_P[P[5]]}, set()),  # no better
        ({P[2]: (53.0, 13.0)}, {"best", "collapse"}),
        ({"MiB 100": (42.4, 44.2)}, {"best", "kept"}),
        ({(1, 1): (30.8, 11.8)}, {"gain_at_every_lambda"}),
        ({(10, 10): (36.2, 13.7)}, {"gain_at_every_lambda"}),
        ({(1000, 1000): (16.7, 5.6)}, {"gain_at_every_lambda"}),
        ({(10, 10): (53.0, 13.7)}, {"order_over_lambda"}),
        ({"MiB 1": (20.0, 0.0), "MiB 1000": (25.0, 0.0), (1000, 1000): (26.0, 0.0)}, {"order_over_lambda"}),
        ({(100, 1000): (55.2, 13.7)}, {"old_fall_with_lambda_b"}),
        ({(100, 1): (55.1, 13.8)}, {"new_rise_with_lambda_b"}),
        ({(1, 1000): (30.8, 60.0)}, {"keeps_at_1_1000"}),
        ({(10, 100): (36.2, 60.0)}, {"keeps_at_10_100"}),
        ({"MiB 1": (42.4, 11.4)}, {"keeps_at_1_1000", "gain_at_every_lambda", "order_over_lambda"}),
    ],
)
@pytest.mark.parametrize("reading", [BY_ITERATION, ALL_BY_EPOCH], ids=lambda reading: reading.name)
def test_a_fact_is_reproduced_or_not_by_the_criteria_of_the_document(reading, changes, no):
    shown = verdicts(collected(replaced(as_printed(reading), reading, changes)), reading)
    assert said(shown, "no") == no and said(shown, "yes") == CRITERIA - no
    assert shown["sum"] == f"{11 - len(no)} of 11"


OVER_100 = {"gain_at_every_lambda", "order_over_lambda"}


@pytest.mark.parametrize(
    ("gone", "unknown"),
    [
        (P[1], {"collapse", "best"}),
        (P[2], {"collapse", "best"}),
        (P[3], {"middle", "best"}),
        (P[4], {"best"}),
        (P[5], {"gain", "kept", "best", *OVER_100}),
        ("MiB 100", {"gain", "kept", "middle", "best", *OVER_100}),
        ("MiB 1", {"keeps_at_1_1000", *OVER_100}),
        ("MiB 10", {"keeps_at_10_100", *OVER_100}),
        ((10, 10), OVER_100),
        ((100, 1), {"old_fall_with_lambda_b", "new_rise_with_lambda_b"}),
        ((100, 1000), {"old_fall_with_lambda_b", "new_rise_with_lambda_b"}),
        ((1, 1000), {"keeps_at_1_1000"}),
        ((10, 100), {"keeps_at_10_100"}),
    ],
)
def test_without_the_runs_of_a_fact_nothing_is_said_of_it(gone, unknown):
    reading = SEG_BY_EPOCH
    shown = verdicts(collected(replaced(as_printed(reading), reading, {gone: None})), reading)
    assert said(shown, EMPTY) == unknown and said(shown, "yes") == CRITERIA - unknown
    known = 11 - len(unknown)
    assert shown["sum"] == f"{known} of {known}"


def test_where_two_of_the_papers_p_have_one_run_it_may_be_the_best():
    runs = no_runs(epochs=10)  # 20/30 and 25/30 are both 7/10
    settings = over_p(runs, ALL_BY_EPOCH)
    assert settings[P[4]] == settings[P[5]]
    shown = verdicts(collected(as_printed(ALL_BY_EPOCH, epochs=10), epochs=10), ALL_BY_EPOCH)
    assert shown["best"] == "yes: p 7/10 with 42.7"


def test_readings_are_judged_over_the_seeds_that_both_have():
    reading, runs = BY_ITERATION, no_runs()
    ours, plain = over_p(runs, reading)[P[5]], mib(runs)
    levels = {1: 30.0, 2: 60.0}  # of MiB, by seed
    made = [made_up(plain, (old, 10.0), seed) for seed, old in levels.items()]
    shown = verdicts(collect([*made, made_up(ours, (55.0, 10.0), 2)]), reading)
    assert shown["gain"] == "no: -5.0"  # and not 55 against a mean of 45
    shown = verdicts(
        collect([*made, made_up(ours, (35.0, 10.0), 1), made_up(ours, (59.0, 10.0), 2)]), reading
    )
    assert shown["gain"] == "yes: +2.0"
    # the best p: a seed that only one of them has does not count
    points = {s: OVER_P.get(p, (42.4, 12.6)) for p, s in over_p(runs, reading).items()}
    made = [made_up(s, figures, 1) for s, figures in points.items()]
    easy = made_up(over_p(runs, reading)[P[4]], (90.0, 90.0), 2)
    assert verdicts(collect([*made, easy]), reading)["best"].startswith("yes: p 5/6")


def test_the_document_has_a_criterion_for_every_fact():
    text = (ROOT / "docs/altersgd.md").read_text(encoding="utf-8")
    rows = text.split("| fact in the paper | criterion |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == len(FACTS) == 11


# ---- the other tables, and the report ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything() -> Collection:
    """All readings of 12 epochs and their controls, in three seeds with metrics that say which run they are
    of."""
    runs, made = no_runs(epochs=12), []
    wanted = [s for part in report_readings.wanted(runs) for s in part.values()]
    for number, s in enumerate(wanted):
        made += [made_up(s, (10 + number / 2 + seed, 5 + number / 4), seed, epochs=12) for seed in (1, 2, 3)]
    collection = collect(made)
    assert collection is not None
    return collection


def old(runs: Collection, setting: Setting) -> float:
    return sum(runs.values(setting, "old").values()) / 3


def test_every_reading_stands_over_p_beside_mib_and_the_paper(everything):
    table = report_readings.table_over_p(everything, ("1-15", "16-20", "all"), "paper")
    assert len(table.rows) == 1 + 4 * 5 and list(table.rules) == [1, 6, 11, 16]
    plain = old(everything, mib(everything))
    assert table.rows[0][:4] == ["MiB", "1", "3", f"{plain:.1f} ± 1.0"] and table.rows[0][-3] == "42.4"
    for number, reading in enumerate(READINGS):
        rows = table.rows[1 + 5 * number : 6 + 5 * number]
        shares = (
            ["1/12", "1/4", "5/12", "7/12", "3/4"]
            if reading.by_epoch
            else ["1/6", "1/3", "1/2", "2/3", "5/6"]
        )
        assert [row[1] for row in rows] == shares and {row[0] for row in rows} == {reading.name}
        value = old(everything, over_p(everything, reading)[P[4]])
        assert rows[3][3] == f"{value:.1f} ± 1.0" and rows[3][6] == f"{value - plain:+.1f} ± 0.0"
        assert rows[0][-3:] == [paper.ALMOST_ZERO] * 3 and rows[4][-3:] == ["52.7", "12.9", "42.7"]


def test_every_reading_stands_against_its_controls(everything):
    table = report_readings.table_controls(everything, ("1-15", "16-20", "all"))
    by_epoch = [row for row in table.rows if row[0] == ALL_BY_EPOCH.name]
    controls = ["Pause, p 3/4", "Stop, p 3/4", "Pause, p 5/6", "Stop, p 5/6", "MiB"]
    assert [row[2] for row in by_epoch[:5]] == controls and {row[1] for row in by_epoch[:5]} == {"3/4"}
    ours = over_p(everything, ALL_BY_EPOCH)[P[5]]
    base = mib(everything)
    shares = [Fraction(9, 12)] * 2 + [Fraction(10, 12)] * 2
    theirs = [
        alternating(base, phase=phase, p=p) for phase, p in zip(["pause", "stop"] * 2, shares, strict=True)
    ]
    for row, control in zip(by_epoch, [*theirs, base], strict=False):
        assert row[3] == "3" and row[4] == f"{old(everything, ours) - old(everything, control):+.1f} ± 0.0"
    for reading, names in {
        BY_ITERATION: ["Consolidate, p 5/6", "MiB", "Consolidate, p 2/3", "MiB"],
        SEG_BY_EPOCH: ["Consolidate, p 3/4", "MiB", "Consolidate, p 7/12", "MiB"],
    }.items():
        assert [row[2] for row in table.rows if row[0] == reading.name] == names
    own = report_readings.table_of_controls(everything, ("1-15", "16-20", "all"))
    listed = [tuple(row[:2]) for row in own.rows]
    assert len(set(listed)) == len(listed) and all(row[2] == "3" for row in own.rows)
    wanted = {
        s for p in CONTROLLED_P for r in READINGS for s in report_readings.controls_of(everything, r, p)
    }
    wanted |= {s for p, s in report_readings.stops(everything).items() if p < 1}
    assert len(listed) == len(wanted)


def test_every_reading_stands_over_lambda(everything):
    table = report_readings.table_over_lambda(everything, ("1-15", "16-20", "all"), "paper")
    rows = {tuple(row[:2]): row for row in table.rows}
    assert list(rows) == [
        *((str(x), str(x)) for x in paper.LAMBDAS),
        *(("1", "1000"), ("100", "1"), ("100", "1000"), ("10", "100")),
    ]
    assert rows["10", "10"][2] == f"{old(everything, mib(everything, 10)):.1f} ± 1.0"
    row = rows["1", "1000"]
    assert row[2:4] == [EMPTY, EMPTY] and row[-2:] == ["42.3", "2.3"]
    for number, reading in enumerate(READINGS):
        s = over_lambda(everything, reading)[1, 1000]
        assert (s.lambda_a, s.lambda_b) == (1, 1000) and row[
            4 + 2 * number
        ] == f"{old(everything, s):.1f} ± 1.0"


def test_curvature_is_the_geometric_mean_over_the_steps(everything):
    assert report_readings.table_curvature(everything) == []
    runs = no_runs()
    setting = over_p(runs, ALL_BY_EPOCH)[P[5]]
    made = made_up(setting, (50.0, 10.0))
    for step, value in zip(made.results["steps"][1:], (1.0, 16.0, 4.0, 4.0, 4.0), strict=True):
        step["flatness"] = {"half 1": {"top_eigenvalue": value, "objective_loss": 2.0}, "end": {"loss": 0.5}}
    del made.results["steps"][3]["flatness"]["end"]
    (table,) = report_readings.table_curvature(collect([made]))
    (row,) = table.rows  # of "end" a step is missing
    assert row[:2] == ["all of L by epoch, p 5/6", "half 1"]
    cells = dict(zip(zip(_spans(table), table.header, strict=True), row, strict=True))
    assert cells["l_seg", "top eigenvalue"] == "4" and cells["l_seg + λ R", "loss"] == "2"
    assert cells["l_seg", "loss"] == EMPTY


def _spans(table: Table) -> list[str]:
    return [group for group, width in table.groups for _ in range(width)]


def test_without_other_readings_their_runs_are_missing_in_one_line(everything):
    assert table_readings(everything).missing == []
    runs = collected({mib(no_runs()): (40.0, 10.0), alternating(mib(no_runs())): (41.0, 10.0)})
    assert table_readings(runs).missing == ["every reading but the default, and their controls"]
    one = over_p(no_runs(), ALL_BY_EPOCH)[P[5]]
    lines = table_readings(collected({mib(no_runs()): (40.0, 10.0), one: (41.0, 10.0)})).missing
    assert "Pause: seed 1" in lines and "AlterSGD, p 19/30, flip all, every epoch: seed 1" in lines
    assert not [line for line in lines if line.startswith(("MiB:", "AlterSGD, flip all, every epoch:"))]


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_runs_of_very_few_epochs_can_be_reported(epochs):
    """With one or two, a control that trains for an epoch more than its reading is MiB."""
    wanted = [s for part in report_readings.wanted(no_runs(epochs)) for s in part.values()]
    made = table_readings(collected(dict.fromkeys(wanted, (40.0, 10.0)), epochs))
    (controls,) = [table for table in made.tables if table.title == "mIoU in percent of the controls"]
    shares = {row[1] for row in controls.rows}
    assert {"5/6", "1/2"} <= shares and "1/1" not in shares
    assert {row[0] for row in controls.rows} == {"Consolidate", "Pause", "Stop"}


def test_the_section_is_in_every_format_with_its_figure(tmp_path):
    chosen = as_printed(ALL_BY_EPOCH) | as_printed(BY_ITERATION)
    for s, f in chosen.items():
        run = made_up(s, f)
        (tmp_path / "runs" / run.folder).mkdir(parents=True)
        (tmp_path / "runs" / run.folder / "results.json").write_text(json.dumps(run.results))
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "runs"), "--out", str(out), "--tables", "readings"]) == 0
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "## Readings of the paper" in text and "](figures/readings.svg)" in text
    assert "| facts reproduced | 11 of 11 | 0 of 0 | 0 of 0 | 11 of 11 |" in text
    assert "docs/altersgd.md" in text and "- Pause: seed 1 (Readings of the paper)" in text
    drawing = (out / "figures/readings.svg").read_bytes()
    latex = (out / "report.tex").read_text(encoding="utf-8")
    check_latex(latex)
    assert latex.count(r"\begin{table}") == 4 and "facts each reading reproduces" in latex
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert len(page.sources) == 1 and "facts reproduced" in page.text
    assert b"<svg" in drawing


def test_the_figure_has_a_curve_for_every_reading_at_its_own_shares(everything):
    figure = figures.readings_figure(everything)
    assert figure is not None
    for axis, key in zip(figure.axes, ("old", "new", "all"), strict=True):
        curves = {container.get_label(): container[0] for container in axis.containers}
        assert list(curves) == [*(reading.name for reading in READINGS), "stop, a control"]
        expected = {reading.name: over_p(everything, reading) for reading in READINGS}
        for name, points in (expected | {"stop, a control": report_readings.stops(everything)}).items():
            x = [float(setting.p) for setting in points.values()]
            y = [sum(everything.values(s, key).values()) / 3 for s in points.values()]
            assert curves[name].get_xdata().tolist() == pytest.approx(x)
            assert curves[name].get_ydata().tolist() == pytest.approx(y)
        for reading in READINGS:
            shares = [float(reading.share(p, 12)) for p in over_p(everything, reading)]
            assert curves[reading.name].get_xdata().tolist() == pytest.approx(shares)
        (papers,) = [line for line in axis.get_lines() if line.get_label().startswith("paper")]
        printed = {p: values[("old", "new", "all").index(key)] for p, values in paper.FIGURE_P.items()}
        printed = {float(p): 0.0 if isinstance(v, str) else v for p, v in printed.items() if v is not None}
        assert dict(zip(papers.get_xdata(), papers.get_ydata(), strict=True)) == printed
    figures.pyplot.close(figure)
    only_mib = collected({mib(no_runs()): (40.0, 10.0)})
    assert figures.readings_figure(only_mib) is None
