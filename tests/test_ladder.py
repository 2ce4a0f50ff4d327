"""The ladder: its runs, the steps 0 that they share, and its table."""

import json
from pathlib import Path

import pytest
from test_report import DASH, row, section, write_run

import train
from engine.arguments import read_config
from engine.identity import start_notes, trained_with
from methods import METHODS, published_strength
from study import identity, paper
from study.collection import Collection, RecordedRun
from study.ladder import row_of, settings_of_rungs, short_name, table_in_brief
from study.plan import PRESETS, list_jobs, look_at
from study.report import read_runs
from study.rungs import IN_BRIEF, LADDER, OWN_RECIPES

pytestmark = pytest.mark.usefixtures("at_the_root")
OWN_STEP_0 = ("dkd", "ssul", "star")  # and several runs that start from it


def jobs_of_ladder(preset: str, *overrides: str, pretrained: str | None = None, runs: Path = Path("r")):
    given = {"data.root": "/d", "model.pretrained": pretrained}
    return list_jobs(["ladder"], PRESETS[preset], (1, 2), runs, given, overrides)


def results_of(config, **more) -> dict:
    """What a report asks of a run, without its metrics."""
    return {"config": config.model_dump(mode="json"), "protocol": [[1], [2]], "steps": [], **more}


# ---- the runs ----------------------------------------------------------------------------------------------


def test_a_step_0_is_trained_once_for_all_that_share_it():
    jobs = jobs_of_ladder("shapes")
    names = [job.name for job in jobs]
    first = [name for name in names if name.startswith("step0")]
    assert first == [f"step0{own}_seed{seed}" for own in ("", "-dkd", "-ssul", "-star") for seed in (1, 2)]
    assert len(names) == len(set(names)) == len(first) + 2 * len(LADDER)
    for job, config in jobs.items():
        method, seed = config.method.name, config.train.seed
        if job.name in first:
            assert job.needs is None and config.train.last_step == 0
            assert bool(config.method.also_observe) == (method == "ft")
            continue
        own = f"-{method}" if method in OWN_STEP_0 else ""
        alone = method in ("dft", "lwf_mc")  # nobody else starts from theirs
        needs = None if alone else f"step0{own}_seed{seed}"
        assert job.needs == needs
        assert config.train.start_from == (None if needs is None else f"r/{needs}/step_0.pt")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_run_may_start_from_its_step_0_without_a_note(preset):
    """What train.start_from compares, of the resolved configs."""
    jobs = jobs_of_ladder(preset, pretrained="imagenet" if preset == "voc" else None)
    facts = {
        job.name: trained_with(config.model_dump(mode="json"), 0, {}, [], None)
        for job, config in jobs.items()
    }
    for job in jobs:
        if job.needs is not None:
            told = {"step": 0, "trained": facts[job.needs]}
            assert start_notes(Path("step_0.pt"), told, facts[job.name]) == []


def test_another_objective_of_step_0_is_noticed():
    jobs = {job.name: config.model_dump(mode="json") for job, config in jobs_of_ladder("shapes").items()}
    theirs = trained_with(jobs["step0-dkd_seed1"], 0, {}, [], None)
    other = jobs["dkd_memory=100_seed1"]
    other["method"]["options"] = {}
    ours = trained_with(other, 0, {}, [], None)
    (note,) = start_notes(Path("step_0.pt"), {"step": 0, "trained": theirs}, ours)
    assert "method.options.body_lr: 1.0 -> 0.1" in note


def test_methods_have_their_own_recipe_where_it_says_why():
    shapes = {job.name: config for job, config in jobs_of_ladder("shapes").items()}
    for name, config in shapes.items():
        random = config.method.name in ("dkd", "ssul", "star")
        assert config.method.options.get("body_lr") == (1.0 if random else None), name
        lr = config.optim.lr if config.method.name == "ssul" else 0.005
        assert config.optim.lr_later == lr, name
    voc = jobs_of_ladder("voc", pretrained="imagenet").values()
    assert all("body_lr" not in config.method.options for config in voc)
    assert {config.optim.lr_later for config in voc if config.method.name == "ssul"} == {0.01}
    assert all(own.why for own in OWN_RECIPES)
    # an override reaches all that have no value of their own
    other = jobs_of_ladder("shapes", "optim.lr_later=0.001").values()
    assert {config.optim.lr_later for config in other if config.method.name != "ssul"} == {0.001}


def test_images_of_a_memory_lengthen_epochs_where_they_are_concatenated():
    jobs = jobs_of_ladder("shapes")
    passes = {run.name: run.passes() for run in look_at(jobs, PRESETS["shapes"], count=False)}
    assert passes["dkd_memory=100_seed1"] == passes["dkd_seed1"] + 5 * 12 * 100
    assert passes["ssul_memory=100_seed1"] == passes["ssul_seed1"]


def test_one_own_step_0_serves_the_variants(toy_arguments, tmp_path, capsys):
    own = ("method.name=dkd", "method.options.body_lr=1.0", "train.epochs=1", "train.epochs_later=1")
    assert train.main(toy_arguments(*own, "train.last_step=0", name="step0-dkd")) == 0
    start = f"train.start_from={tmp_path}/runs/step0-dkd/step_0.pt"
    for name, *variant in (("memory", "method.memory=4"), ("ewf", "average.name=ewf")):
        assert train.main(toy_arguments(*own, *variant, start, name=name)) == 0
    assert "otherwise than this run" not in capsys.readouterr().out
    said = json.loads((tmp_path / "runs/memory/results.json").read_text())["remarks"]
    assert said == ["memory of 4 images", "own step 0"]


# ---- the table ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_wants_the_settings_that_the_runs_have(preset):
    jobs = jobs_of_ladder(preset, "data.mode=overlapped")
    configs = [config for job, config in jobs.items() if "step0" not in job.name and "_seed1" in job.name]
    settings = [identity.setting_of(config.model_dump()) for config in configs]
    plain = next(config for config in configs if config.method.name == "mib")
    reference = RecordedRun(Path("mib"), results_of(plain), "mib")
    wanted = settings_of_rungs(Collection(reference))
    assert list(wanted) == list(LADDER) and list(wanted.values()) == settings
    assert len(set(settings)) == len(settings)


def test_names_of_the_fields_methods():
    for row_name, (method, strength) in identity.OTHERS.items():
        assert published_strength(method, "15-1") == strength
        assert identity.label(identity.Setting(method, strength), "15-1") == row_name
    rows = [row_of(rung) for rung in LADDER]
    assert {"DKD-M", "SSUL-M", "MiB-AugM", "AlterSGD", "STAR + Consolidate"} <= set(rows)
    for mode in paper.PUBLISHED.values():
        assert set(mode) <= set(rows)


@pytest.fixture(scope="module")
def ladder_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ladder")
    own = {"method__options": {"body_lr": 1.0}}
    kinds = {
        "ft": {"method": "ft"},
        "mib": {},
        "dkd": {"method": "dkd", "method__strength": 5.0, "level": 0.6, **own},
        "dkd-m": {"method": "dkd", "method__strength": 5.0, "method__memory": 100, "level": 0.65, **own},
        "ssul": {"method": "ssul", "method__strength": 0.0, "optim__lr_later": 0.01, "level": 0.5, **own},
        "slow": {"method": "ssul", "method__strength": 0.0, "level": 0.55, **own},
        "altered": {"method": "dkd", "phase": "altersgd", "method__strength": 5.0, "level": 0.7, **own},
    }
    for kind, keys in kinds.items():
        for seed in (1, 2):
            write_run(folder, f"{kind}{seed}", seed=seed, **keys)
    for seed, kind in ((1, "dkd-m"), (2, "dkd-m"), (1, "ssul")):  # the others are of an older version
        file = folder / f"{kind}{seed}" / "results.json"
        results = json.loads(file.read_text())
        results["remarks"] = ["memory of 100 images", "own step 0"] if kind == "dkd-m" else ["own step 0"]
        file.write_text(json.dumps(results))
    return folder


def test_the_table_shows_both_conventions_and_what_a_row_uses(ladder_runs):
    made = section(ladder_runs, "ladder")
    (table,) = made.tables
    runs = read_runs([ladder_runs])
    assert not runs.foreign and not runs.repeated  # SSUL's learning rate is its own recipe
    cells = row(table, "DKD, body_lr 1.0 + memory 100")
    assert cells["uses"] == "memory of 100 images; own step 0" and cells["seeds"] == "2"
    setting = next(s for s in runs.cells if s.method == "dkd" and s.beside)
    ious = [run.history[-1] for run in runs.cells[setting].values()]
    old = [100 * sum(iou[c] for c in range(16)) / 16 for iou in ious]
    every = [100 * sum(iou.values()) / 21 for iou in ious]
    background = [100 * iou[0] for iou in ious]
    for key, values in (
        ("with background: old", old),
        ("with background: all", every),
        ("background", background),
    ):
        mean = sum(values) / 2
        deviation = abs(values[0] - values[1]) / 2**0.5
        assert cells[key] == f"{mean:.1f} ± {deviation:.1f}"
    assert row(table, "MiB")["uses"] == row(table, "DKD, body_lr 1.0")["uses"] == DASH
    assert row(table, "SSUL, body_lr 1.0")["seeds"] == "2"
    assert "STAR, body_lr 1.0" not in [cells[0] for cells in table.rows]
    assert row(table, "SSUL, body_lr 1.0, lr_later 0.001")["seeds"] == "2"  # and not mixed with the published
    notes = " ".join(made.notes)
    assert "DKD, SSUL with method.options.body_lr=1: the published tenth" in notes
    assert "SSUL with optim.lr_later=0.01: published with one learning rate" in notes
    assert "STAR, body_lr 1.0: seeds 1, 2" in made.missing


def test_the_brief_table_has_what_has_run_with_the_numbers_of_the_whole_one(ladder_runs):
    runs = read_runs([ladder_runs])
    (brief,), (whole,) = table_in_brief(runs).tables, section(ladder_runs, "ladder").tables
    names = {"FT": "FT", "MiB": "MiB", "SSUL": "SSUL, body_lr 1.0", "DKD": "DKD, body_lr 1.0"}
    names["DKD-M"] = (
        "DKD, body_lr 1.0 + memory 100"  # DKD + AlterSGD has run too, and is not for a first screen
    )
    assert {cells[0] for cells in brief.rows} == set(names)
    for short, long in names.items():
        cells, full = row(brief, short), row(whole, long)
        for key in ("seeds", "background", "uses"):
            assert cells[key] == full[key]
        assert cells["all"] == full["mIoU in percent: all"]
        assert cells["all with background"] == full["with background: all"]
        (title,) = (title for title in brief.header if title.startswith("published"))
        means = full[f"published ({paper.SETTING_IN_WORDS}): old / new / all"].split(", ")
        assert cells[title] == ", ".join(mean.rpartition(" / ")[2] for mean in means), "all of each"
    assert 10 <= len(IN_BRIEF) <= 15 and {short_name(rung) for rung in IN_BRIEF} > {"MiB + EWF", "STAR"}


def test_published_figures_stand_beside_their_rows_on_their_data_alone(ladder_runs, tmp_path):
    (table,) = section(ladder_runs, "ladder").tables
    key = "published (VOC, ResNet-101): old / new / all"
    assert row(table, "MiB")[key] == f"46.2 / 12.9 / 37.9 (20), {DASH} / {DASH} / 40.7 (21)"
    assert row(table, "DKD, body_lr 1.0 + memory 100")[key] == f"{DASH} / {DASH} / 70.8 (21)"
    assert row(table, "SSUL, body_lr 1.0")[key] == DASH  # of the mode disjoint there is none
    assert row(table, "SSUL, body_lr 1.0, lr_later 0.001")[key] == DASH
    write_run(tmp_path, "a", method="star", level=0.5, data__protocol="15-5", method__strength=5.0)
    (table,) = section(tmp_path, "ladder").tables
    assert key not in row(table, "STAR")


def test_without_its_methods_there_is_no_ladder(tmp_path):
    write_run(tmp_path, "a")
    made = section(tmp_path, "ladder")
    assert not made.tables and not made.notes and not made.missing


@pytest.mark.parametrize("first", ["ssul", "mib"])
def test_a_run_with_a_recipe_of_its_own_joins_no_two_recipes(first, tmp_path):
    """SSUL fits to both learning rates of later steps, MiB's runs do not fit to each other."""
    kinds = {
        "ssul": {"method": "ssul", "method__strength": 0.0, "optim__lr_later": 0.01, "level": 0.5},
        "mib": {"optim__lr_later": 0.001},
        "other": {"optim__lr_later": 0.002, "seed": 2},
        "second": {"optim__lr_later": 0.002, "seed": 3},
        "third": {"optim__lr_later": 0.002, "seed": 4},
    }
    for place, kind in enumerate(sorted(kinds, key=lambda kind: kind != first)):
        write_run(tmp_path, f"{place}", **kinds[kind])
    runs = read_runs([tmp_path])
    assert runs.reference.config["optim"]["lr_later"] == 0.002
    assert len(runs.runs) == 4 and len(runs.foreign) == 1


def test_rungs_can_run():
    for rung in LADDER:
        assert rung.method in METHODS and (not rung.memory or METHODS[rung.method].memory)
        overlays = [f"configs/methods/{rung.method}.yaml"]
        overlays += [f"configs/{rung.plus}.yaml"] if rung.plus else []
        config = read_config([*overlays, *(["method.memory=100"] if rung.memory else [])])
        alone = rung.plus is None
        assert alone or rung.plus in (config.phase.name, config.average.name)
        # what has no R is not alternated: an ascent would only unlearn
        assert alone or METHODS[rung.method].needs_teacher
