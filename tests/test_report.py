"""scripts.report on results.json files made up here."""

import base64
import copy
import html.parser
import json
import re
import shutil
import statistics
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from configs.schema import load_config
from data.palette import voc_palette
from data.protocols import configured_steps, protocol_steps, steps_from_lists
from engine.results import step_result
from scripts import report
from study import figures, identity, layouts, page, paper
from study.report import MARKER, describe, read_runs, warnings
from study.spreads import paired, spread
from study.tables import SECTIONS
from tracking.examples import Examples
from tracking.text import latex

BASE = load_config([], ["data.root=/nowhere", "data.protocol=15-1"]).model_dump(mode="json")
LEVELS = {"ft": 0.02, "lwf": 0.05, "mib": 0.4, "altersgd": 0.5, "consolidate": 0.48, "offline": 0.7}
DASH = layouts.EMPTY
NAMES = ("background", *paper.CLASSES)


def write_run(
    folder: Path,
    name: str,
    *,
    method: str = "mib",
    phase: str = "descent",
    seed: int = 1,
    level: float | None = None,
    num_steps: int | None = None,
    names: tuple[str, ...] = NAMES,
    steps: list[list[int]] | None = None,
    **keys,
) -> dict:
    """A results.json as train.py writes it, with random metrics around a level; `train__epochs=5` changes
    train.epochs."""
    config = copy.deepcopy(BASE)
    config["train"]["seed"], config["phase"]["name"] = seed, phase
    config["method"] |= {"name": method, "strength": 0.0 if method == "ft" else 100.0}
    for key, value in keys.items():
        section, option = key.split("__")
        config[section][option] = value
    protocol = config["data"]["protocol"]
    plan = steps_from_lists(steps) if steps else protocol_steps("voc", protocol)
    level = level or LEVELS.get(phase) or LEVELS["offline" if protocol == "offline" else method]
    rng = np.random.default_rng([seed, int(1000 * level), len(method)])
    done = []
    for step in plan[:num_steps]:
        ious = np.clip(level * (1.2 - 0.05 * step.index) + rng.normal(0, 0.03, step.num_classes), 0.001, 1)
        costs = {"seconds": 100.0 + 10 * rng.random(), "images": 9, "iterations": 3}
        done.append(step_result(step, plan, names, np.eye(step.num_classes, dtype=int), ious, done) | costs)
    results = {
        "config": config,
        "protocol": [step.new for step in plan],
        "environment": {"device": "a CPU", "threads": 2, "world_size": 1, "torch": "2", "commit": "abc"},
        "data": {"train": "t", "test": "v"},
        "steps": done,
    }
    (folder / name).mkdir(parents=True)
    (folder / name / "results.json").write_text(json.dumps(results))
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[dict]]]:
    """Three seeds of some methods, two of the control, single runs of the other tables, one unfinished."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {
        "ft": {"method": "ft"},
        "mib": {},
        "altersgd": {"phase": "altersgd"},
        "consolidate": {"phase": "consolidate"},
        "joint": {"method": "ft", "data__protocol": "offline"},
    }
    made: dict[str, list[dict]] = {}
    for kind, keys in kinds.items():
        seeds = (1, 2) if kind == "consolidate" else (1, 2, 3)
        made[kind] = [write_run(folder / "deep", f"{kind}{seed}", seed=seed, **keys) for seed in seeds]
    altersgd = {"phase": "altersgd"}
    made["mib, 10"] = [write_run(folder, "a", method__strength=10.0)]
    made["alter, 10"] = [write_run(folder, "b", method__strength=10.0, **altersgd)]
    made["b 1"] = [write_run(folder, "c", phase__lambda_b=1.0, **altersgd)]
    made["p 20"] = [write_run(folder, "d", phase__p=20 / 30, **altersgd)]
    made["reset"] = [write_run(folder, "e", phase__momentum="reset", level=0.3, **altersgd)]
    write_run(folder, "still going", method="lwf", num_steps=3)
    write_run(folder, "step 0", method="ft", num_steps=1, train__last_step=0)
    return folder, made


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out")
    assert report.main([str(runs[0]), "--out", str(out)]) == 0
    return out


def section(folder: Path, name: str):
    return SECTIONS[name](read_runs([folder]))


def row(table: layouts.Table, first: str) -> dict[str, str]:
    """The cells of a row by header, those of the last group ("paper") under "paper: <header>"."""
    cells = next(r for r in table.rows if r[0] == first)
    return dict(zip(layouts._flat_header(table), cells, strict=True))


def last(results: list[dict], group: str) -> np.ndarray:
    return 100 * np.array([r["steps"][-1]["miou"][group] for r in results])


def shown(values: np.ndarray) -> str:
    return f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"


# ---- numbers -----------------------------------------------------------------------------------------------


def test_spread_and_paired_test_are_those_of_numpy_and_scipy():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(5, 1, 6), rng.normal(4, 1, 6)
    found = spread(ours)
    assert (found.mean, found.deviation, found.n) == (
        pytest.approx(ours.mean()),
        pytest.approx(ours.std(ddof=1)),
        6,
    )
    by_seed = dict(enumerate(ours)), dict(enumerate(theirs)) | {99: 1.0}
    difference = paired(*by_seed)
    assert difference.p == pytest.approx(ttest_rel(ours, theirs).pvalue)
    assert difference.spread.mean == pytest.approx((ours - theirs).mean())


def test_without_seeds_or_spread_there_is_no_test():
    assert spread([]) == spread(iter(())) and spread([]).mean is None
    assert spread([3.0]).deviation is None
    assert paired({1: 2.0, 2: 3.0}, {1: 1.0, 2: 1.0, 3: 5.0}).p is None  # two shared seeds
    assert paired({1: 2.0}, {2: 1.0}).values == ()
    assert paired({s: s + 1.0 for s in range(4)}, {s: float(s) for s in range(4)}).p is None


def test_table_1_holds_means_over_seeds_beside_the_papers(runs):
    folder, made = runs
    table = section(folder, "table1").tables[0]
    assert [r[0] for r in table.rows] == ["FT", "MiB", "AlterSGD", "Joint"]
    for name, kind in {"FT": "ft", "MiB": "mib", "AlterSGD": "altersgd"}.items():
        cells = row(table, name)
        assert cells["ours: seeds"] == "3"
        for header, group in {"1-15": "old", "16-20": "new", "all": "all"}.items():
            assert cells[f"ours: {header}"] == shown(last(made[kind], group))
    assert row(table, "AlterSGD")["paper: 1-15"] == "52.7"


def test_table_1_shows_the_background_and_what_counts_it(runs):
    folder, made = runs
    cells = row(section(folder, "table1").tables[0], "MiB")
    steps = [run["steps"][-1] for run in made["mib"]]
    assert cells["ours: background"] == shown(100 * np.array([step["iou"]["background"] for step in steps]))
    counted = [np.mean(list(step["iou"].values())) for step in steps]
    assert cells["ours: all with background"] == shown(100 * np.array(counted))
    harmonic = [2 / (1 / step["miou"]["old"] + 1 / step["miou"]["new"]) for step in steps]
    assert cells["ours: hIoU"] == shown(100 * np.array(harmonic))
    assert cells["ours: hIoU"] != DASH


def test_hiou_of_runs_that_are_older_than_it(tmp_path):
    new = write_run(tmp_path, "new")
    old = json.loads((tmp_path / "new/results.json").read_text())
    for step in old["steps"]:
        del step["metrics"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old/results.json").write_text(json.dumps(old))
    (tmp_path / "new/results.json").unlink()
    cells = row(section(tmp_path, "table1").tables[0], "MiB")
    assert cells["ours: hIoU"] == f"{100 * new['steps'][-1]['metrics']['hiou']:.1f}"


def test_joint_is_scored_in_the_groups_of_the_protocol(runs):
    folder, made = runs
    ious = np.array([[r["steps"][0]["iou"][c] for c in paper.CLASSES] for r in made["joint"]])
    cells = row(section(folder, "table1").tables[0], "Joint")
    assert cells["ours: 1-15"] == shown(100 * ious[:, :15].mean(axis=1))
    assert cells["ours: 16-20"] == shown(100 * ious[:, 15:].mean(axis=1))


def test_table_2_holds_each_class(runs):
    folder, made = runs
    first, second = section(folder, "table2").tables
    assert list(first.header) == ["method", "seeds", *paper.CLASSES[:15]]
    assert list(second.header) == ["method", "seeds", *paper.CLASSES[15:]]
    values = np.array([100 * r["steps"][-1]["iou"]["sofa"] for r in made["mib"]])
    assert row(second, "MiB")["sofa"] == shown(values)
    assert row(second, "MiB, paper")["sofa"] == "10.7"


def test_tables_over_lambda_and_p_find_their_runs(runs):
    folder, made = runs
    table = section(folder, "table3").tables[0]
    ten, hundred = row(table, "10"), row(table, "100")
    assert ten["ours: 1-15 MiB"] == f"{last(made['mib, 10'], 'old')[0]:.1f} (1)"
    assert ten["ours: all AlterSGD"] == f"{last(made['alter, 10'], 'all')[0]:.1f} (1)"
    assert ten["paper: all AlterSGD"] == "40.1"
    assert hundred["ours: 16-20 MiB"] == f"{last(made['mib'], 'new')[0]:.1f} (1)"
    assert [r[0] for r in table.rows] == ["10", "100"]

    old, _, every = section(folder, "table4").tables
    assert row(old, "1")["ours: λ_a 100"] == f"{last(made['b 1'], 'old')[0]:.1f} (1)"
    assert row(every, "10")["ours: λ_a 10"] == f"{last(made['alter, 10'], 'all')[0]:.1f} (1)"
    assert row(every, "1")["paper: λ_a 10"] == "37.5"
    assert [r[0] for r in every.rows] == ["1", "10", "100"]

    shares = section(folder, "figure-p").tables[0]
    assert [r[0] for r in shares.rows] == [f"{n}/30" for n in (20, 25, 30)]
    assert row(shares, "20/30")["ours: all"] == f"{last(made['p 20'], 'all')[0]:.1f}"
    assert row(shares, "30/30")["ours: all"] == f"{last(made['mib'], 'all')[0]:.1f}"
    assert row(shares, "25/30")["paper: 1-15"] == "52.7"


def test_curves_are_over_seeds_that_all_of_their_points_have(runs, tmp_path):
    only = "Of the seeds 1, 2, 3 only those that all of these have: 1."
    assert all(only in section(runs[0], name).notes for name in ("table3", "table4", "figure-p"))
    plain = [write_run(tmp_path, f"mib{seed}", seed=seed) for seed in (1, 2)]
    write_run(tmp_path, "other", seed=3, phase="altersgd")
    found = section(tmp_path, "figure-p")  # no seed is shared
    assert row(found.tables[0], "30/30")["ours: all"] == shown(last(plain, "all")) and len(found.notes) == 1
    write_run(tmp_path, "altersgd1", seed=1, phase="altersgd")
    write_run(tmp_path, "altersgd2", seed=2, phase="altersgd")
    found = section(tmp_path, "figure-p")
    assert row(found.tables[0], "25/30")["ours: seeds"] == "2" and found.notes[1].endswith("have: 1, 2.")
    assert row(section(tmp_path, "table1").tables[0], "AlterSGD")["ours: seeds"] == "3"


def test_differences_are_paired_by_seed(runs):
    folder, made = runs
    differences = section(folder, "differences")
    to_mib, to_control, to_altersgd = differences.tables
    for header, group in {"1-15": "old", "16-20": "new", "all": "all"}.items():
        ours, theirs = last(made["altersgd"], group), last(made["mib"], group)
        p = ttest_rel(ours, theirs).pvalue
        cells = row(to_mib, "AlterSGD")
        assert cells["shared seeds"] == "3"
        assert (
            cells[f"{header}: difference"]
            == f"{(ours - theirs).mean():+.1f} ± {(ours - theirs).std(ddof=1):.1f}"
        )
        assert cells[f"{header}: p"] == ("< 0.001" if p < 0.001 else f"{p:.3f}")
    assert row(to_mib, "AlterSGD")["paper: 1-15"] == "+10.3"
    two = last(made["consolidate"], "all") - last(made["mib"][:2], "all")
    cells = row(to_mib, "Consolidate")
    assert cells["all: difference"] == ", ".join(f"{d:+.1f}" for d in two) and cells["all: p"] == "n < 3"
    assert "too few for a test" in differences.notes[0]
    assert [r[0] for r in to_control.rows] == ["AlterSGD", "AlterSGD, momentum reset"]
    assert [r[0] for r in to_altersgd.rows] == ["AlterSGD, momentum reset"]


def test_ablations_stand_against_mib_the_control_and_altersgd(runs):
    folder, made = runs
    table = section(folder, "ablations").tables[0]
    assert [r[0] for r in table.rows[:3]] == ["MiB", "Consolidate", "AlterSGD"]
    cells = row(table, "AlterSGD, momentum reset")
    mine = last(made["reset"], "all")[0]
    for name, kind in {"MiB": "mib", "Consolidate": "consolidate", "AlterSGD": "altersgd"}.items():
        assert cells[f"difference of all to: {name}"] == f"{mine - last(made[kind], 'all')[0]:+.1f}"
    assert list(table.rules) == [3] and "AlterSGD, lr hold" not in [r[0] for r in table.rows]


def test_alternating_stands_against_the_control_with_the_same_options(tmp_path):
    made: dict[str, list[dict]] = {}
    for phase, level in {"altersgd": 0.5, "consolidate": 0.45}.items():
        made[phase] = [write_run(tmp_path, f"{phase}{s}", seed=s, phase=phase) for s in (1, 2, 3)]
        made[f"{phase}, hold"] = [
            write_run(tmp_path, f"{phase} hold", phase=phase, phase__lr="hold", level=level)
        ]
    write_run(tmp_path, "alone", phase="altersgd", phase__momentum="off")
    write_run(tmp_path, "longer", phase="consolidate", phase__lr="hold", phase__p=0.5, level=0.1)
    found = section(tmp_path, "alternation")
    assert [r[0] for r in found.tables[0].rows] == ["AlterSGD", "AlterSGD, lr hold"]
    cells = row(found.tables[0], "AlterSGD")
    by_seed = last(made["altersgd"], "old") - last(made["consolidate"], "old")
    assert cells["1-15: difference"] == f"{by_seed.mean():+.1f} ± {by_seed.std(ddof=1):.1f}"
    assert (cells["seeds"], cells["shared seeds"]) == ("3", "3")
    cells = row(found.tables[0], "AlterSGD, lr hold")
    alone = last(made["altersgd, hold"], "all")[0]
    assert cells["mIoU in percent: all"] == f"{alone:.1f}"
    assert cells["all: difference"] == f"{alone - last(made['consolidate, hold'], 'all')[0]:+.1f}"
    assert cells["all: p"] == "n < 3" and not found.missing
    (tmp_path / "consolidate3/results.json").unlink()
    assert section(tmp_path, "alternation").missing == ["Consolidate: seed 3"]
    for seed in (1, 2, 3):
        (tmp_path / f"altersgd{seed}/results.json").unlink()
    assert [r[0] for r in section(tmp_path, "alternation").tables[0].rows] == ["AlterSGD, lr hold"]


def test_forgetting_and_costs(runs, tmp_path):
    folder, made = runs
    forgotten = 100 * np.array([r["steps"][-1]["mean_forgetting"] for r in made["mib"]])
    cells = row(section(folder, "forgetting").tables[0], "MiB")
    assert cells["mIoU: forgetting"] == shown(forgotten)
    background = 100 * np.array([r["steps"][-1]["iou"]["background"] for r in made["mib"]])
    assert cells["background: IoU after the last"] == shown(background)
    assert cells["background: pixels taken for"] == DASH
    seconds = np.array([sum(step["seconds"] for step in r["steps"][1:]) for r in made["altersgd"]])
    costs = section(folder, "costs")
    table = costs.tables[0]
    assert row(table, "AlterSGD")["seconds"] == f"{seconds.mean():.0f} ± {seconds.std(ddof=1):.0f}"
    assert {r[-1] for r in table.rows} == {DASH}  # no benchmark, no ratio
    assert "Joint" not in [r[0] for r in table.rows]  # has no later steps
    assert len(costs.notes) == 2 and "do not tell their processor" in costs.notes[1]


@pytest.mark.parametrize(("key", "value"), [("threads", 8), ("processor", "another one")])
def test_seconds_of_runs_that_were_not_made_alike_are_left_out(key, value, tmp_path):
    for name, seed, here in (("one", 1, {}), ("two", 2, {key: value})):
        results = write_run(tmp_path / "runs", name, seed=seed)
        results["environment"] |= {"processor": "some"} | here
        (tmp_path / "runs" / name / "results.json").write_text(json.dumps(results))
    costs = section(tmp_path / "runs", "costs")
    assert not costs.tables and costs.notes[0].startswith(f"Seconds are left out: made under {key}: ")
    asked = ["--tables", "costs", "--formats", "markdown", "html"]
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *asked]) == 0
    for name in ("report.md", "report.html"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert "Seconds are left out" in text and "MiB = 1" not in text


def test_ratios_of_time_are_those_of_a_benchmark(tmp_path):
    for name, phase in (("mib", "descent"), ("altersgd", "altersgd"), ("consolidate", "consolidate")):
        write_run(tmp_path, name, phase=phase)
    measured = [{"what": "mib + altersgd / plain mib", "value": 1.014}]
    (tmp_path / "benchmark.json").write_text(json.dumps({"updates": {"figures": measured}}))
    times = {r[0]: r[-1] for r in section(tmp_path, "costs").tables[0].rows}
    assert times == {"MiB": "1.00", "AlterSGD": "1.01", "Consolidate": DASH}


def test_the_class_that_takes_the_background_is_named(tmp_path):
    for seed, (bird, cat) in {1: (30, 10), 2: (50, 20)}.items():
        results = write_run(tmp_path, str(seed), seed=seed)
        counts = np.eye(21, dtype=int)
        counts[0, [0, NAMES.index("bird"), NAMES.index("cat")]] = (100 - bird - cat, bird, cat)
        counts[NAMES.index("cat"), 0] = 1000
        results["steps"][-1]["confusion"] = counts.tolist()
        (tmp_path / str(seed) / "results.json").write_text(json.dumps(results))
    cells = row(section(tmp_path, "forgetting").tables[0], "MiB")
    assert cells["background: pixels taken for"] == "bird 40 ± 14"


# ---- what is missing, and what does not belong together ----------------------------------------------------


def test_missing_rows_seeds_and_settings_are_named(runs):
    folder, _ = runs
    assert {"ILT: seeds 1, 2, 3", "LwF: seeds 1, 2, 3"} <= set(section(folder, "table1").missing)
    assert not [line for line in section(folder, "table1").missing if line.startswith(("MiB", "AlterSGD"))]
    assert "MiB, λ 10: seeds 2, 3" in section(folder, "table3").missing
    assert "λ_a 1, λ_b 1000: seeds 1, 2, 3" in section(folder, "table4").missing
    assert "p 5/30: seeds 1, 2, 3" in section(folder, "figure-p").missing
    assert "Consolidate: seed 3" in section(folder, "ablations").missing
    wanted = {"AlterSGD, batch same", "AlterSGD, momentum off, batch same, lr hold"}
    assert {f"{label}: seeds 1, 2, 3" for label in wanted} <= set(section(folder, "ablations").missing)


@pytest.mark.slow
def test_missing_and_unfinished_runs_are_in_every_text(written):
    for name in ("report.md", "report.html"):
        text = (written / name).read_text(encoding="utf-8")
        assert "ILT: seeds 1, 2, 3 (Table 1, Table 2)" in text
        assert re.search(r"still going: 3 of 6 steps$|still going: 3 of 6 steps<", text, re.MULTILINE)
        assert "step 0: 1 of 6 steps, all that train.last_step=0 asks for" in text
        assert "--pictures N" in text


def test_runs_of_another_recipe_are_left_out_loudly(tmp_path, capsys):
    folder = tmp_path / "runs"
    results = [write_run(folder, f"mib{seed}", seed=seed) for seed in (1, 2)]
    write_run(folder, "longer", seed=3, train__epochs_later=60, data__evaluate_size=256)
    moved = write_run(folder, "moved", seed=4, data__root="/else/where", run__name="x", train__device="cpu")
    assert report.main([str(folder), "--out", str(tmp_path / "out"), "--tables", "costs"]) == 0
    said = [capsys.readouterr().err]
    said += [
        (tmp_path / "out" / name).read_text("utf-8") for name in ("report.md", "report.tex", "report.html")
    ]
    for text in said:
        assert "longer is left out" in text.replace("\\_", "_")
        for key in ("epochs_later", "evaluate_size"):
            assert key in text.replace("\\_", "_")
    cells = row(section(folder, "table1").tables[0], "MiB")
    assert cells["ours: all"] == shown(last([*results, moved], "all"))


def test_other_images_are_another_recipe_and_a_repeated_seed_is_not_averaged(tmp_path):
    first = write_run(tmp_path, "a")
    write_run(tmp_path, "again", level=0.9)
    other = write_run(tmp_path, "other", seed=2)
    other["data"]["train"] = "changed"
    (tmp_path / "other/results.json").write_text(json.dumps(other))
    collected = read_runs([tmp_path, tmp_path / "a"])  # a folder named twice is read once
    assert [run.folder.name for run, _ in collected.foreign] == ["other"]
    assert "pictures.train" in collected.foreign[0][1][0]
    assert [run.folder.name for run, _ in collected.repeated] == ["again"]
    assert (
        row(SECTIONS["table1"](collected).tables[0], "MiB")["ours: all"] == f"{last([first], 'all')[0]:.1f}"
    )


def test_runs_older_than_digests_of_the_content_pair_with_later_ones(tmp_path):
    old, new = write_run(tmp_path, "old"), write_run(tmp_path, "new", seed=2)
    for content in ("as it was", "changed"):
        new["data"]["train_content"] = content
        (tmp_path / "new/results.json").write_text(json.dumps(new))
        assert not read_runs([tmp_path]).foreign
    old["data"]["train_content"] = "as it was"
    (tmp_path / "old/results.json").write_text(json.dumps(old))
    ((_, differences),) = read_runs([tmp_path]).foreign
    assert "pictures.train_content" in differences[0]


OWN_STEPS = [[1, 2, 3], [4], [5]]
OWN_DATA = {
    "names": ("background", *(f"c{i}" for i in range(1, 6))),
    "steps": OWN_STEPS,
    "data__dataset": "folder",
    "data__protocol": None,
    "data__steps": OWN_STEPS,
    "method__strength": 10.0,
}


def test_other_protocols_keep_their_group_names(tmp_path):
    write_run(tmp_path, "mib", **OWN_DATA)
    write_run(tmp_path, "altersgd", phase="altersgd", **OWN_DATA)
    header = layouts._flat_header(section(tmp_path, "table1").tables[0])
    assert header[2:5] == ["ours: 1-3", "ours: 4-5", "ours: all"]
    assert row(section(tmp_path, "table1").tables[0], "AlterSGD")["ours: seeds"] == "1"


@pytest.mark.parametrize(
    "keys",
    [
        OWN_DATA,
        {"data__mode": "overlapped"},
        {"data__protocol": "10-1", "method__strength": 10.0},
    ],
    ids=["own data", "overlapped", "10-1"],
)
def test_the_papers_numbers_do_not_stand_beside_other_data(keys, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_svg", lambda figure: drawn.append(figure) or b"")
    write_run(tmp_path, "mib", **keys)
    write_run(tmp_path, "altersgd", phase="altersgd", **keys)
    write_run(tmp_path, "by epoch", phase="altersgd", phase__every="epoch", phase__p=27 / 30, **keys)
    collected = read_runs([tmp_path])
    for name, make in SECTIONS.items():
        for table in make(collected).tables:
            assert not [
                column for column in layouts._flat_header(table) if "paper" in column and name != "readings"
            ]
            assert not [group for group, _ in table.groups if group.startswith("paper")]
            assert sum(width for _, width in table.groups) in (0, len(table.header))
            assert {len(cells) for cells in table.rows} <= {len(table.header)}
            assert not [cells[0] for cells in table.rows if "paper" in cells[0]]
        figures.images(name, collected)
    legends = [text.get_text() for f in drawn for box in f.legends for text in box.get_texts()]
    legends += [
        t.get_text() for f in drawn for a in f.axes if a.get_legend() for t in a.get_legend().get_texts()
    ]
    assert legends and not [text for text in legends if "paper" in text]


def test_the_papers_numbers_say_that_they_are_of_voc_where_the_recipe_is_another(tmp_path):
    write_run(tmp_path, "mib", model__body="resnet_tiny")  # as with the embedded data, in the place of VOC
    header = layouts._flat_header(section(tmp_path, "table1").tables[0])
    assert header[8] == "paper (VOC, ResNet-101): 1-15"


def test_a_run_cut_by_last_step_is_done_and_not_unfinished(runs, tmp_path, capsys):
    asked = ["--tables", "table1", "--formats", "markdown"]
    assert report.main([str(runs[0]), "--out", str(tmp_path), *asked]) == 0
    assert "unfinished: 1, done as far as asked: 1" in capsys.readouterr().err
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    unfinished, done = text.split("## Unfinished")[1].split("## Done as far as asked")
    assert "still going: 3 of 6 steps" in unfinished and "step 0" not in unfinished
    assert "step 0: 1 of 6 steps, all that train.last_step=0 asks for" in done.split("## ")[0]
    write_run(tmp_path / "cut", "run", num_steps=1, train__last_step=0)
    assert report.main([str(tmp_path / "cut"), "--out", str(tmp_path / "out")]) == 2
    assert "(1 as far as train.last_step asks: without it they continue)" in capsys.readouterr().err


def test_seeds_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path):
    penalty = {"update__name": "gradient_penalty"}
    for name, seed, radius in (("a", 1, 0.01), ("b", 2, 0.01), ("wide", 3, 0.1)):
        write_run(tmp_path, name, seed=seed, update__radius=radius, **penalty)
    found = {row[0]: row[1] for row in section(tmp_path, "forgetting").tables[0].rows}
    assert found == {
        "MiB + gradient penalty 0.01": "2",
        "MiB + gradient penalty 0.01, radius 0.1": "1",
    }
    assert BASE["update"]["radius"] == identity.RADIUS


def test_scores_in_another_setting_have_a_table_of_their_own(tmp_path):
    own, flipped = [], []
    for seed in (1, 2, 3):
        results = write_run(tmp_path, f"mib{seed}", seed=seed)
        own.append(results)
        if seed < 3:
            other = write_run(tmp_path / "made", f"{seed}", seed=seed, level=0.6)
            flipped.append(other)
            scores = (
                other["steps"] if seed == 1 else other["steps"][-1:]
            )  # one was scored after the last step only
            settings = {"data.evaluate": "full", "data.evaluate_flip": True}
            results["evaluations"] = {"full_flip": {"settings": settings, "steps": scores}}
        else:
            results["evaluations"] = {"full_flip": {"settings": settings, "steps": own[0]["steps"][:2]}}
        (tmp_path / f"mib{seed}/results.json").write_text(json.dumps(results))
    shutil.rmtree(tmp_path / "made")
    assert row(section(tmp_path, "table1").tables[0], "MiB")["ours: all"] == shown(last(own, "all"))
    found = section(tmp_path, "evaluations")
    as_trained, other = found.tables[0].rows
    assert as_trained[:3] == ["MiB", "as trained", "2"] and other[:3] == ["MiB", "full_flip", "2"]
    assert as_trained[5] == shown(last(own[:2], "all")) and other[5] == shown(last(flipped, "all"))
    assert found.notes == [f"Left out, for the last step was not scored: {tmp_path / 'mib3'} [full_flip]."]
    assert not read_runs([tmp_path]).foreign


def test_one_step_0_for_all_seeds_is_said(tmp_path):
    first = write_run(tmp_path, "a")
    second = write_run(tmp_path, "b", seed=2)
    assert not [fact for fact in describe(read_runs([tmp_path])) if "one step 0" in fact]
    second["steps"][0] = first["steps"][0]
    (tmp_path / "b/results.json").write_text(json.dumps(second))
    assert [fact for fact in describe(read_runs([tmp_path])) if "one step 0" in fact]


def test_pairs_that_do_not_go_out_from_one_model_are_named(tmp_path):
    def write(name: str, **keys) -> dict:
        results = write_run(tmp_path, name, **keys)
        if "first" in models and keys.get("seed", 1) == 1 and "data__protocol" not in keys:
            results["steps"][0] = models["first"]
            (tmp_path / name / "results.json").write_text(json.dumps(results))
        return results

    models: dict[str, dict] = {}
    models["first"] = write("mib")["steps"][0]
    write("altersgd", phase="altersgd")
    write("dkd", method="dkd", level=0.6)  # which no other shares
    write("joint", method="ft", data__protocol="offline")  # whose step 0 has other classes
    write("in step 0", phase="altersgd", phase__from_step=0)
    (alone,) = section(tmp_path, "differences").notes
    assert "paired t test" in alone
    models["first"] = write_run(tmp_path, "stop", phase="stop", level=0.3)["steps"][0]
    write("pause", phase="pause", level=0.3)
    write_run(tmp_path, "of another seed", phase="stop", level=0.3, seed=2)
    for table in ("differences", "alternation"):
        _, note = section(tmp_path, table).notes
        assert note.startswith("Of seed 1 these go out from another step 0 than MiB, trained anew")
        assert note.endswith("their differences: Stop; Pause.")
        assert f"(1-15: {100 * models['first']['miou']['old']:.1f} instead of " in note


# ---- the formats -------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order; collects what a browser would load or run."""

    VOID = {"meta", "img", "br", "input"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.sources, self.targets, self.text = [], [], [], [], ""
        self.ids: list[str] = []
        self.rows: list[tuple[str, dict[str, str], list[str]]] = []  # section, attributes, cells
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        if tag == "tr":
            self.rows.append((self.ids[-1], values, []))
        elif tag == "td":
            self.rows[-1][2].append("")
        assert not [name for name in values if name.startswith("on")]
        self.sources += [values["src"]] if "src" in values else []
        self.targets += [values["href"]] if "href" in values else []
        self.open += [tag] if tag not in self.VOID else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "td":
            self.rows[-1][2][-1] += data


def test_the_page_is_whole_and_loads_nothing(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"link", "iframe", "object", "base"} & set(page.tags)
    assert page.targets and all(target.startswith("#") for target in page.targets)
    assert all(f'id="{target[1:]}"' in text for target in page.targets)
    assert len(page.sources) == 5  # steps, classes, lambda, p, readings
    assert "url(" not in text and "@import" not in text and "http" not in re.sub(r'src="[^"]*"', "", text)
    for source in page.sources:
        kind, data = source.split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        drawing = xml.fromstring(base64.b64decode(data))
        assert not [e for e in drawing.iter() if e.tag.endswith("script")]


def test_rows_and_sections_of_what_has_not_run_are_left_out(tmp_path):
    """In every format; what is wanted stays in the list of what is missing."""
    for seed in (1, 2):
        write_run(tmp_path / "runs", f"ft{seed}", seed=seed, method="ft")
    out = tmp_path / "out"
    assert report.main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert [cells[0] for section, _, cells in page.rows if section == "table1" and cells] == ["FT"]
    shown = {section for section, _, cells in page.rows if cells}
    assert shown == {"table1", "table2", "forgetting", "metrics", "costs", "runs"}
    assert not {"table3", "table4", "figure-p", "ablations", "differences", "readings"} & set(page.ids)
    assert page.targets == [f"#{name}" for name in page.ids if name != "filter"]
    for name in ("report.html", "report.md", "report.tex"):
        written = (out / name).read_text(encoding="utf-8")
        assert "Left out, for nothing of them has run: Table 3: λ; Table 4: λ_a and λ_b;" in written
        assert "Joint, paper" not in written and "LwF and LwF-MC" not in written
    for wanted in ("Joint: seeds 1, 2 (Table 1, Table 2)", "λ_a 1, λ_b 10 (Table 4)"):
        assert wanted in page.text and wanted in (out / "report.md").read_text(encoding="utf-8")
    assert not list(out.glob("figures/p.svg")), "nor is the paper's curve drawn alone"


def test_a_section_without_rows_has_no_notes_on_them_but_may_be_a_note():
    empty, full = (layouts.Table("t", ["a"], rows) for rows in ([], [["1"]]))
    assert not layouts.Section("s", "S", [empty], ["In brackets: seeds."]).notes
    assert layouts.Section("s", "S", [empty, full], ["In brackets: seeds."]).tables == [full]
    assert layouts.Section("s", "S", [], ["Seconds are left out."]).notes


def test_rows_say_to_the_filters_of_which_method_and_run_they_are(runs, written):
    page = Page((written / "report.html").read_text(encoding="utf-8"))
    by_name = {"MiB": "MiB", "MiB, paper": "MiB", "AlterSGD, momentum reset": "AlterSGD", "MiB, λ 10": "MiB"}
    found: dict[str, set[str | None]] = {name: set() for name in by_name}
    for _, attributes, cells in page.rows:
        if cells and cells[0] in found:
            found[cells[0]].add(attributes.get("data-method"))
    assert found == {name: {method} for name, method in by_name.items()}

    everywhere = {section for section, _, cells in page.rows if cells}
    methods = {section for section, attributes, cells in page.rows if cells and "data-method" in attributes}
    assert everywhere - methods == {"table3", "table4"}  # their rows are values of λ, their columns methods
    seeds = {section for section, attributes, _ in page.rows if "data-seed" in attributes}
    assert seeds == {"runs"}, "means are over all seeds"
    listed = [
        (attributes["data-seed"], cells)
        for section, attributes, cells in page.rows[1:]
        if section == "runs" and cells
    ]
    assert all(cells[1] == seed for seed, cells in listed)
    folders = {str(path.parent) for path in runs[0].rglob("results.json")}
    assert {cells[2] for _, cells in listed} == {f for f in folders if not f.endswith(("going", "step 0"))}


def test_the_filters_offer_what_ran_and_are_shown_by_the_script_alone(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    form = re.search(r'<form id="filter" hidden>.*?</form>', text, re.DOTALL)[0]
    offered = re.findall(r'<input type="checkbox" name="method" value="([^"]*)">', form)
    assert offered == ["FT", "MiB", "AlterSGD", "Joint", "Consolidate"]
    assert re.findall(r"<option(?: value=\"\")?>(\w+)</option>", form) == ["all", "1", "2", "3"]
    assert "tables of means are over all seeds" in form
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    for name in ("location.hash", "dataset.method", "dataset.seed", 'getElementById("filter")'):
        assert name in script
    assert not re.findall(r"https?:|//[a-z]|fetch|import|XMLHttp", re.sub(r"  // .*", "", script))


def test_a_method_is_called_without_its_options(tmp_path):
    kinds = {
        "MiB": {"method__strength": 10.0},
        "MiB + SAM": {"update__name": "sam"},
        "MiB + gradient penalty": {"update__name": "gradient_penalty", "update__radius": 0.1},
        "AlterSGD + memory": {"phase": "altersgd", "phase__p": 0.5, "method__memory": 100},
        "MiB + Stable SGD": {"model__dropout": 0.1, "optim__lr_decay": 0.8, "train__batch_size": 12},
        "LwF + AlterSGD": {"method": "lwf", "phase": "altersgd"},
    }
    for number, (name, keys) in enumerate(kinds.items()):
        write_run(tmp_path, str(number), **keys)
        (config,) = (json.loads((tmp_path / str(number) / "results.json").read_text())["config"],)
        assert identity.family(identity.setting_of(config)) == name


def test_names_of_groups_stand_over_their_columns_and_others_have_both_lines():
    table = layouts.Table("t", ["m", "s", "a", "b", "c"], [["1"] * 5], [("", 2), ("ours", 2), ("paper", 1)])
    head = re.search("<thead>(.*)</thead>", page._table(table))[1]
    assert head == (
        '<tr><th rowspan="2">m</th><th rowspan="2">s</th><th class="begin" colspan="2"><span>ours</span></th>'
        '<th class="begin" colspan="1"><span>paper</span></th></tr>'
        '<tr><th class="begin">a</th><th>b</th><th class="begin">c</th></tr>'
    )


def test_wide_tables_scroll_in_boxes_of_their_own(written):
    text = (written / "report.html").read_text(encoding="utf-8")
    assert text.count("<table") == text.count('<div class="scroll"><table') > 10
    assert ".scroll { overflow-x: auto;" in text


def test_the_same_runs_give_the_same_bytes(runs, written, tmp_path):
    assert report.main([str(runs[0]), "--out", str(tmp_path), "--tables", "figure-p"]) == 0
    assert (tmp_path / "figures/p.svg").read_bytes() == (written / "figures/p.svg").read_bytes()
    names = sorted(str(path.relative_to(written)) for path in written.rglob("*.*"))
    assert names == [
        *(f"figures/{name}.svg" for name in ("classes", "lambda", "p", "readings", "steps")),
        *("report.html", "report.md", "report.tex"),
    ]


def test_figures_named_in_the_markdown_exist(written):
    linked = re.findall(r"\]\((\S+)\)", (written / "report.md").read_text(encoding="utf-8"))
    assert len(linked) == 5 and all((written / place).is_file() for place in linked)


def test_markdown_tables_have_equal_rows(written):
    for block in (written / "report.md").read_text(encoding="utf-8").split("\n\n"):
        if block.startswith("| "):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def check_latex(text: str) -> None:
    """Environments and braces are closed, and the rows of a table have its number of columns."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert text.isascii()
    assert not re.findall(r"(?<!\\)[#_^~](?![ab]\$)", text)
    assert not re.findall(r"(?<!\\)%$", text.replace("{%", ""), re.MULTILINE) and "<" not in text
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        assert kind == "begin" or opened.pop() == name
        opened += [name] if kind == "begin" else []
    assert not opened
    for columns, body in re.findall(r"\\begin\{tabular\}\{(\w+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        for line in re.findall(r"^(.*)\\\\$", body, re.MULTILINE):
            wide = sum(int(width) - 1 for width in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + wide == len(columns)


def test_latex_is_well_formed(written):
    check_latex((written / "report.tex").read_text(encoding="utf-8"))


def test_special_characters_in_latex():
    assert latex(r"50% & a_b #1 $x {y} ~ ^ \z") == (
        r"50\% \& a\_b \#1 \$x \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}z"
    )
    assert latex("-1.2 ± 3.4, 15-1, λ_a 10") == r"$-$1.2 $\pm$ 3.4, 15-1, $\lambda_a$ 10"


def test_names_from_files_are_text_in_every_format(tmp_path):
    evil = "<script>alert(1)&_50%|"
    names = ("background", *paper.CLASSES[:-1], evil)
    for seed in (1, 2):
        write_run(tmp_path / "runs", f"{evil}{seed}", seed=seed, names=names)
    write_run(tmp_path / "runs", f"{evil} unfinished", num_steps=1, names=names)
    write_run(tmp_path / "runs", f"{evil} other", seed=5, names=names, model__body=evil)
    tables = ["--tables", "table1", "table2"]
    assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *tables]) == 0
    page = Page((tmp_path / "out/report.html").read_text(encoding="utf-8"))
    assert page.tags.count("script") == 1 and page.text.count(evil) >= 6
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "<script" not in text and r"&lt;script>alert(1)&\_50%\|" in text
    check_latex((tmp_path / "out/report.tex").read_text(encoding="utf-8"))


def test_formats_and_tables_can_be_chosen(runs, tmp_path):
    arguments = [str(runs[0]), "--out", str(tmp_path), "--formats", "latex", "--tables", "table3", "costs"]
    assert report.main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.tex"]
    assert (tmp_path / "report.tex").read_text().count(r"\begin{table}") == 2


# ---- images ------------------------------------------------------------------------------------------------


def test_images_are_drawn_when_asked_for(runs, tmp_path, monkeypatch):
    asked = []

    def panels(folders, steps, count):
        asked.append(([folder.name for folder in folders], steps, count))
        seen = [np.full((4, 6), class_id, np.uint8) for class_id in range(3)]
        return Examples([np.zeros((4, 6, 3), np.uint8)] * count, [seen] * count, NAMES, voc_palette())

    monkeypatch.setattr("study.panels.examples", panels)
    arguments = [str(runs[0]), "--out", str(tmp_path), "--tables", "costs", "--pictures", "2"]
    assert report.main(arguments) == 0
    assert asked == [(["mib1", "altersgd1"], [5, 5], 2)]
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [source.split(",")[0] for source in page.sources] == ["data:image/png;base64"]
    assert "--pictures N" not in page.text
    assert not (tmp_path / "figures").exists()  # images of a data set go nowhere else


def test_images_without_the_means_are_refused(runs, tmp_path, capsys):
    asked = ["--out", str(tmp_path / "out"), "--formats", "html", "--tables", "costs", "--pictures", "1"]
    assert report.main([str(runs[0]), *asked]) == 2  # neither config.yaml nor checkpoints
    assert "config.yaml" in capsys.readouterr().err
    write_run(tmp_path / "runs", "mib")
    assert report.main([str(tmp_path / "runs"), *asked]) == 2
    assert "no seed has a finished run of MiB and one of AlterSGD" in capsys.readouterr().err


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no results.json below"),
        ("{", "not readable as JSON"),
        ("[]", "it holds a list"),
        ('{"config": [], "protocol": [[1]], "steps": []}', "not as train.py writes it (AttributeError: "),
    ],
)
def test_results_that_cannot_be_used_are_named(content, message, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run/results.json").write_text(content)
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}") and message in error
    assert not (tmp_path / "out").exists()


def test_only_unfinished_runs_and_missing_folders_are_errors(tmp_path, capsys):
    write_run(tmp_path, "run", num_steps=2)
    assert report.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "none of 1 runs is finished" in capsys.readouterr().err
    assert report.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--out FOLDER"),
        (["runs"], "--out FOLDER"),
        (["runs", "--readme", "R.md"], "leave out folders"),
        (["runs", "--out", "o", "--check"], "--check goes with --readme"),
        (["runs", "--out", "o", "--tables", "table9"], "table9"),
        (["runs", "--out", "o", "--pictures", "3", "--formats", "latex"], "add html"),
        (["runs", "--out", "o", "--pictures", "-3"], "number of images"),
    ],
)
def test_bad_arguments_are_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main(["--help"])
    assert (
        stopped.value.code == 0 and "python -m scripts.report --readme README.md" in capsys.readouterr().out
    )


# ---- a Markdown file with markers --------------------------------------------------------------------------

README = """# Title

<!-- results:table1 committed -->
stale
<!-- /results -->

Between.

<!-- results:differences committed -->
<!-- /results -->
<!-- results:missing committed -->
<!-- /results -->
The end, with `<!-- results:table1 x -->` in words.
"""


@pytest.fixture
def readme(tmp_path) -> Path:
    for seed in (1, 2, 3):
        write_run(tmp_path / "committed", f"mib{seed}", seed=seed)
        write_run(tmp_path / "committed", f"altersgd{seed}", seed=seed, phase="altersgd")
    path = tmp_path / "README.md"
    path.write_text(README)
    return path


def test_a_readme_is_renewed_once(readme, capsys):
    arguments = ["--readme", str(readme)]
    assert report.main([*arguments, "--check"]) == 1
    shown = capsys.readouterr()
    assert "-stale" in shown.out and "+| MiB |" in shown.out
    assert f"--readme {readme}" in shown.err and readme.read_text() == README
    assert report.main(arguments) == 0
    fresh = readme.read_text(encoding="utf-8")
    table = layouts.markdown_section(section(readme.parent / "committed", "table1"))
    assert table in fresh and "stale" not in fresh and "- FT: seeds 1, 2, 3 (Table 1, Table 2)" in fresh
    assert fresh.startswith("# Title\n\n<!-- results:table1 committed -->\n\n| method |")
    assert "\nBetween.\n" in fresh and fresh.endswith(README.splitlines()[-1] + "\n")
    assert report.main([*arguments, "--check"]) == 0 and report.main(arguments) == 0
    assert readme.read_text(encoding="utf-8") == fresh


def test_a_changed_result_or_number_is_noticed_from_any_folder(readme, monkeypatch, capsys):
    write_run(readme.parent / "committed", "foreign", seed=9, train__epochs=2)
    assert report.main(["--readme", str(readme)]) == 0
    assert "> **Warning.** committed/foreign is left out" in readme.read_text(encoding="utf-8")
    monkeypatch.chdir(readme.parent)
    assert report.main(["--readme", "README.md", "--check"]) == 0
    readme.write_text(readme.read_text(encoding="utf-8").replace("| 52.7 |", "| 53.7 |"), encoding="utf-8")
    assert report.main(["--readme", "README.md", "--check"]) == 1
    write_run(readme.parent / "committed", "ft", method="ft")
    assert report.main(["--readme", "README.md"]) == 0
    assert report.main(["--readme", "README.md", "--check"]) == 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("nothing here\n", "nothing to renew"),
        ("<!-- results:table1 committed -->\n", "a marker is not complete"),
        ("<!-- results:table1 -->\n<!-- /results -->\n", "a marker is not complete"),
        ("<!-- results:tabel1 committed -->\n<!-- /results -->\n", "did you mean table1?"),
        ("<!-- results:table1 elsewhere -->\n<!-- /results -->\n", "elsewhere: no such folder"),
    ],
)
def test_bad_markers_are_explained(text, message, readme, capsys):
    readme.write_text(text)
    assert report.main(["--readme", str(readme), "--check"]) == 2
    assert message in capsys.readouterr().err
    assert report.main(["--readme", str(readme.parent / "none.md")]) == 2
    assert "none.md" in capsys.readouterr().err


# ---- related methods ---------------------------------------------------------------------------------------


def test_related_methods_stand_beside_altersgd_with_flatness_and_costs(tmp_path):
    kinds = {
        "mib": {},
        "sam": {"update__name": "sam"},
        "cpr": {"method__entropy": 0.1},
        "stable": {"model__dropout": 0.1, "optim__lr_decay": 0.8, "train__batch_size": 12},
        "plop": {"method": "plop", "level": 0.45, "method__strength": 0.01},
    }
    for kind, keys in kinds.items():
        for seed in (1, 2):
            results = write_run(tmp_path, f"{kind}{seed}", seed=seed, **keys)
            for step in results["steps"][1:]:
                step["gradient_evaluations"] = step["iterations"] * (2 if kind == "sam" else 1)
            (tmp_path / f"{kind}{seed}/results.json").write_text(json.dumps(results))
    for seed, norm in ((1, 2.0), (2, 4.0)):
        figures = {"gradient_norm2": norm, "eigenvalues": [7.0, 1.0], "trace": {"mean": 50.0}}
        (tmp_path / f"sam{seed}/flatness.json").write_text(json.dumps({"modes": {"eval": {"seg": figures}}}))
    (tmp_path / "cpr1/flatness.json").write_text("{ not JSON")
    logged = json.loads((tmp_path / "mib1/results.json").read_text())
    for step, end in zip(logged["steps"][1:], (2.0, 8.0, 4.0, 4.0, 4.0), strict=True):
        step["flatness"] = {
            "boundary": {"squared_gradient_norm": 1.0, "top_eigenvalue": 5.0},
            "end": {"squared_gradient_norm": end, "top_eigenvalue": None},
        }
    (tmp_path / "mib1/results.json").write_text(json.dumps(logged))

    timed = {"updates": {"figures": [{"what": "mib + sam / plain mib", "value": 1.8}]}}
    (tmp_path / "benchmark.json").write_text(json.dumps(timed))

    found = section(tmp_path, "related")
    table, changes = found.tables
    assert changes.rows == [["MiB", "4.00 (1)", DASH]]
    assert [r[0] for r in table.rows] == [
        *("MiB", "MiB + CPR 0.1", "MiB + SAM 0.05"),
        *("MiB + Stable SGD (dropout 0.1, learning rate x 0.8, batch 12)", "PLOP"),
    ]
    assert list(table.rules) == [1]
    assert found.missing == ["AlterSGD: seeds 1, 2", "Consolidate: seeds 1, 2"]
    sam = row(table, "MiB + SAM 0.05")
    assert sam["seeds"] == "2"
    assert sam["l_seg, norms in eval: squared gradient norm"] == "3 ± 1.4"
    assert sam["l_seg, norms in eval: top eigenvalue"] == "7 ± 0"
    assert sam["l_seg, norms in eval: trace"] == "50 ± 0"
    assert sam["cost, MiB = 1: gradients"] == "2.00 ± 0.00"
    assert sam["cost, MiB = 1: time"] == "1.80" and row(table, "MiB")["cost, MiB = 1: time"] == "1.00"
    assert row(table, "PLOP")["cost, MiB = 1: time"] == DASH
    stable = row(table, table.rows[3][0])
    assert stable["cost, MiB = 1: gradients"] == "0.50 ± 0.00"  # the same iterations at half the batch
    assert row(table, "MiB + CPR 0.1")["l_seg, norms in eval: trace"] == DASH


def test_a_small_batch_alone_is_another_recipe(tmp_path):
    write_run(tmp_path, "a")
    write_run(tmp_path, "b", seed=2)
    write_run(tmp_path, "c", seed=3, train__batch_size=12)
    assert [run.place for run, _ in read_runs([tmp_path]).foreign] == [str(tmp_path / "c")]


def test_runs_from_before_a_key_existed_have_its_default(tmp_path):
    old = write_run(tmp_path, "old")
    write_run(tmp_path, "new", seed=2)
    del old["config"]["update"], old["config"]["method"]["entropy"], old["config"]["model"]["dropout"]
    (tmp_path / "old/results.json").write_text(json.dumps(old))
    runs = read_runs([tmp_path])
    assert not runs.foreign and [len(seeds) for seeds in runs.cells.values()] == [2]


def test_a_table_that_is_left_of_several_keeps_its_name():
    filled, empty = layouts.Table("Difference to MiB", ["a"], [["1"]]), layouts.Table("none", ["a"], [])
    shown = layouts.markdown_section(layouts.Section("x", "X", [filled, empty]))
    assert shown.startswith("**Difference to MiB**\n") and "none" not in shown
    assert "**" not in layouts.markdown_section(layouts.Section("x", "X", [filled]))


ROOT = Path(__file__).parent.parent
PAGES = [path for place in ("*.md", "docs/*.md", "results/*/README.md") for path in sorted(ROOT.glob(place))]
GENERATED = [path.relative_to(ROOT).as_posix() for path in PAGES if MARKER.search(path.read_text())]


def test_the_pages_with_generated_tables_are_found():
    assert {"README.md", "docs/results.md", "results/voc-cpu-partial/README.md"} <= set(GENERATED)


@pytest.mark.parametrize("document", GENERATED)
def test_published_tables_are_those_of_the_committed_results(document, capsys):
    assert report.main(["--readme", str(ROOT / document), "--check"]) == 0, capsys.readouterr().out


# --- orders of the classes ----------------------------------------------------------------------------------


def write_orders(folder: Path, orders=(None, None, 0, 1), **keys) -> list[dict]:
    """A run of each order; those of the same order have different seeds."""
    plans = [configured_steps("voc", "15-1", None, NAMES, order) for order in orders]
    return [
        write_run(folder, f"{i}", seed=1 + i, steps=[step.new for step in plan], data__order=order, **keys)
        for i, (order, plan) in enumerate(zip(orders, plans, strict=True))
    ]


def test_orders_are_summed_up_in_a_table_of_their_own(tmp_path):
    made = write_orders(tmp_path)
    runs = read_runs([tmp_path])
    assert not warnings(runs) and len(runs.runs) == 2, "other tables have one order alone"
    over, each = SECTIONS["orders"](runs).tables
    for key in ("old", "new", "all"):
        first, second, *others = [100 * results["steps"][-1]["miou"][key] for results in made]
        figures = [(first + second) / 2, *others]
        shown = f"{statistics.fmean(figures):.1f} ± {statistics.stdev(figures):.1f}"
        assert row(over, "MiB") | {"orders": "3", key: shown} == row(over, "MiB")
    assert [line[:3] for line in each.rows] == [
        ["MiB", "as numbered", "2"],
        ["MiB", "0", "1"],
        ["MiB", "1", "1"],
    ]


def test_one_order_makes_no_table_of_orders(runs):
    assert not section(runs[0], "orders").tables


def test_a_run_of_another_order_and_another_recipe_is_left_out(tmp_path):
    write_orders(tmp_path)
    write_orders(tmp_path / "other", orders=(2,), train__epochs=7)
    found = read_runs([tmp_path])
    assert list(found.orders) == ["0", "1"]
    assert "train.epochs: 30 -> 7" in warnings(found)[0] and "data.order: null -> 2" in warnings(found)[0]


def test_the_papers_metrics_do_not_stand_beside_another_order(tmp_path):
    write_orders(tmp_path, orders=(3,))
    assert "paper" not in str(section(tmp_path, "table1").tables[0].groups)
