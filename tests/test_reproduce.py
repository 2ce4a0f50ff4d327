"""scripts.reproduce: the plan is the paper's, and bad arguments are explained."""

import json
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

import train
from configs.schema import ConfigError, load_config
from engine.arguments import read_config
from engine.run_folder import RunFolder, read_results
from scripts import reproduce
from study import experiments, identity, paper
from study.experiments import OBSERVERS, TABLES, experiments_of, mib
from study.plan import PRESETS, SHAPES_SIZES, count_images, list_jobs, seconds_per_pass

ROOT = Path(train.__file__).parent
ROWS = {"table1": 10, "table3": 8, "table4": 16, "figure-p": 6} | {
    "ablations": 8,
    "alternation": 16,
    "related": 13,
    "ladder": 27,
    "core": 8,
}
# By epoch p depends on how many epochs a step has: 6 have fewer that end on a descent, 30 share controls
# with the iteration.
READINGS = {"shapes": 67, "voc-cpu": 57, "voc": 66}
# what an earlier table has already comes once; all of core does, and of the readings these
SHARED_READINGS = {"shapes": 17, "voc-cpu": 18, "voc": 17}
IN_ALL = 10 + (8 - 2) + (16 - 4) + (6 - 2) + (8 - 1) + (16 - 7) + (13 - 3) + (23 - 7)
STEP_0, OWN_STEP_0 = 1, 3  # DKD, SSUL, STAR

pytestmark = pytest.mark.usefixtures("at_the_root")


def voc_jobs(*tables: str, seeds=(1,), overrides=()) -> dict:
    return list_jobs(tables, PRESETS["voc"], seeds, Path("runs/voc"), {"data.root": "/data"}, overrides)


# ---- the plan ----------------------------------------------------------------------------------------------


def test_neighbours_still_names_the_table_of_related_methods(tmp_path, capsys):
    plans = []
    for table in ("related", "neighbours"):
        arguments = [table, "--preset", "voc", "--seeds", "1", "--runs", str(tmp_path / "runs"), "--dry-run"]
        assert reproduce.main(arguments) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] and "mib-sam_seed1" in plans[0]


def test_a_step_0_alone_has_a_plan(tmp_path, capsys):
    arguments = ["related", "--preset", "voc", "--seeds", "1", "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert reproduce.main([*arguments, "--only", "step0_seed1"]) == 0
    shown = capsys.readouterr().out
    assert "1 runs: 1 not needed" in shown and "sharing step 0" not in shown


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("table", [*ROWS, "readings", "all"])
@pytest.mark.slow
def test_every_table_has_the_papers_runs_for_every_seed(table, preset, tmp_path, capsys):
    runs = tmp_path / "runs"
    arguments = [table, "--preset", preset, "--seeds", "1", "2", "3", "--runs", str(runs), "--dry-run"]
    assert reproduce.main(arguments) == 0
    shown = capsys.readouterr().out
    counts = ROWS | {"readings": READINGS[preset], "all": IN_ALL + READINGS[preset] - SHARED_READINGS[preset]}
    expected = 3 * (STEP_0 + (OWN_STEP_0 if table in ("ladder", "all") else 0) + counts[table])
    assert f"\n{expected} runs: {expected} missing\n" in shown
    rows = [line.split() for line in shown.splitlines() if "_seed" in line]
    assert len({row[0] for row in rows}) == len(rows) == expected
    assert "estimate" in shown and "sharing step 0" in shown and "those on record" in shown
    assert ("an assumption" in shown) == (preset != "shapes")
    assert not runs.exists()


def test_image_passes_of_the_published_recipe_without_the_data(tmp_path, capsys):
    assert (
        reproduce.main(["table1", "--preset", "voc", "--seeds", "1", "--dry-run", f"--runs={tmp_path}"]) == 0
    )
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if "_seed" in line}
    first, later = 30 * 8437, 30 * (378 + 299 + 420 + 500 + 548)
    for name, passes in {
        "step0_seed1": first,
        "mib_seed1": later,
        "lwf_mc_seed1": first + later,
        "joint_seed1": first + later,
    }.items():
        assert rows[name] == ["missing", f"{passes:,}", f"{passes / 25 / 3600:.2f}"]
    shared, alone = first + 8 * later + 2 * (first + later), 10 * (first + later)
    assert f"{shared:,} image passes in all instead of {alone:,}, {1 - shared / alone:.0%} saved" in shown
    assert f"estimate {shared / 25 / 3600:.1f} hours" in shown


@pytest.mark.parametrize("table", ["table1", "ladder", "all"])
def test_the_document_says_what_sharing_step_0_saves(table, tmp_path, capsys):
    seeds = ["--seeds", "1", "2", "3"]
    assert reproduce.main([table, "--preset", "voc", *seeds, "--dry-run", f"--runs={tmp_path}"]) == 0
    counted = re.search(
        r"sharing step 0: (\S+) image passes in all instead of (\S+), (\d+)% saved", capsys.readouterr().out
    )
    assert counted is not None
    document = (ROOT / "docs/reproduce.md").read_text(encoding="utf-8")
    assert f"| `{table}` | {counted[1]} | {counted[2]} | {counted[3]} % |" in document


def test_the_runs_are_what_the_paper_reports():
    def settings(table: str) -> list:
        configs = [config for job, config in voc_jobs(table).items() if not job.name.startswith("step0")]
        return [identity.setting_of(config.model_dump()) for config in configs]

    configs = [config.model_dump() for job, config in voc_jobs("table1").items() if "step0" not in job.name]
    assert [identity.row_of(config) for config in configs] == list(paper.PER_CLASS)
    third, fourth = settings("table3"), settings("table4")
    assert {(s.phase, s.lambda_a) for s in third} == set(product(("descent", "altersgd"), paper.TABLE_3))
    assert {(s.lambda_a, s.lambda_b) for s in fourth} == set(product(paper.LAMBDAS, paper.TABLE_4["all"]))
    assert [s.p for s in settings("figure-p")] == list(paper.FIGURE_P)
    assert {s.phase for s in settings("figure-p")} == {"altersgd", "descent"}
    choices = {(k, v) for k, (_, *others) in paper.OPEN.items() if k != "from_step" for v in others}
    assert {change for s in settings("ablations") for change in s.changes} == choices


def test_alternation_pairs_every_setting_with_its_own_control():
    configs = [config for job, config in voc_jobs("alternation").items() if not job.name.startswith("step0")]
    settings = [identity.setting_of(config.model_dump()) for config in configs]
    alternating = [s for s in settings if s.phase == "altersgd"]
    assert [s for s in settings if s.phase == "consolidate"] == [
        replace(s, phase="consolidate") for s in alternating
    ]
    assert len(set(alternating)) == len(alternating) == len(settings) / 2
    theorem = (("momentum", "off"), ("batch", "same"), ("lr", "hold"))
    assert {(), theorem} <= {s.changes for s in alternating}


def test_what_is_published_of_voc_is_done_where_it_is_put(tmp_path, capsys):
    published = {folder.name for folder in (ROOT / "results/voc-cpu").glob("*_seed*")}
    assert published
    for name in published:
        shutil.copytree(ROOT / "results/voc-cpu" / name, tmp_path / name)
    seeds = sorted({name.rpartition("_seed")[2] for name in published})
    states = {}
    for table in TABLES:
        given = ["--root", "/data/VOC2012_192", "--pretrained", "mobilenet_v2-b0353104.pth", "--dry-run"]
        plan = ["--preset", "voc-cpu", "--runs", str(tmp_path), "--seeds", *seeds]
        assert reproduce.main([table, *plan, *given]) == 0
        states |= dict(re.findall(r"^(\S+_seed\d+) +(\w+)", capsys.readouterr().out, flags=re.MULTILINE))
    assert {name for name, state in states.items() if state == "done"} == published


def test_no_two_runs_of_all_tables_compute_the_same():
    jobs = voc_jobs(*TABLES)
    assert len(jobs) == STEP_0 + OWN_STEP_0 + IN_ALL + READINGS["voc"] - SHARED_READINGS["voc"]
    contents = []
    for config in jobs.values():
        tree = config.model_dump(exclude={"run"})
        for key in ("lambda_a", "lambda_b"):  # null means the strength
            tree["phase"][key] = tree["phase"][key] or tree["method"]["strength"]
        contents.append(json.dumps(tree, sort_keys=True))
    assert len(set(contents)) == len(jobs)


def test_tables_share_runs_by_name():
    config = load_config(["configs/voc/15-1.yaml"])
    names = {table: {e.name for e in experiments_of([table], config)} for table in TABLES}
    diagonal = {f"mib-altersgd{lam}" for lam in ("_lambda=1", "_lambda=10", "", "_lambda=1000")}
    assert names["table3"] & names["table4"] == diagonal
    assert names["figure-p"] & names["table1"] == {"mib", "mib-altersgd"}
    assert names["ablations"] & names["table1"] == {"mib-altersgd"}
    assert "mib-altersgd_lambda_a=10_lambda_b=1" in names["table4"] and "mib_lambda=10" in names["table3"]
    assert "mib-altersgd_p=5-30" in names["figure-p"]
    assert "mib-altersgd_momentum=off_batch=same_lr=hold" in names["ablations"]
    assert names["related"] & (names["table1"] | names["ablations"]) == {
        "mib",
        "mib-altersgd",
        "mib-consolidate",
    }
    # whose names stand for what these overlays say
    altersgd = load_config([*mib(plus="altersgd").overlays]).phase
    assert Fraction(altersgd.p).limit_denominator(100) == Fraction(experiments.DEFAULT_THIRTIETHS, 30)
    assert load_config([*mib(plus="consolidate").overlays]).phase.name == "consolidate"


def test_the_published_lambda_follows_the_protocol():
    names = [job.name for job in voc_jobs("table3", overrides=["data.protocol=15-5"])]
    assert "mib_lambda=100_seed1" in names and "mib_lambda=10_seed1" not in names


def test_runs_start_from_the_step_0_of_their_seed():
    jobs = voc_jobs("table1", "table3", seeds=(1, 7))
    for job, config in jobs.items():
        name, _, seed = job.name.rpartition("_seed")
        assert config.train.seed == int(seed) and config.run.name == job.name
        alone = name in ("step0", "lwf_mc", "joint")
        assert job.needs == (None if alone else f"step0_seed{seed}")
        assert config.train.start_from == (None if alone else f"runs/voc/step0_seed{seed}/step_0.pt")
        assert config.train.last_step == (0 if name == "step0" else None)
        assert config.method.also_observe == (OBSERVERS if name == "step0" else ())
        assert config.data.protocol == ("offline" if name == "joint" else "15-1")
    assert [job.name for job in jobs][:2] == ["step0_seed1", "step0_seed7"]


def test_joint_follows_own_steps(tmp_path):
    jobs = list_jobs(["table1"], PRESETS["shapes"], [1], tmp_path, {}, ["data.steps=[[1, 2], [3]]"])
    joint = next(config for job, config in jobs.items() if job.name == "joint_seed1")
    assert joint.data.steps == ((1, 2, 3),) and joint.data.protocol is None


def test_images_are_counted_in_the_data_set(toy_voc, tmp_path):
    own = ["data.steps=[[1, 2], [3]]", f"data.cache={tmp_path}", f"data.root={toy_voc}"]
    config = read_config(["configs/quickstart.yaml", *own])
    assert count_images(config.data) == (8, 4)


def test_what_is_known_of_the_generated_data_is_what_runs_on_it_counted():
    steps = read_results(ROOT / "results/quickstart/ft/results.json")["steps"]
    sizes = tuple(step["images"] for step in steps)
    assert SHAPES_SIZES["15-1", "disjoint"] == sizes and SHAPES_SIZES["offline", "disjoint"] == (sum(sizes),)


def test_a_shared_step_0_is_timed_once(tmp_path):
    folders = [RunFolder(tmp_path / name) for name in ("a", "b", "none")]
    for seconds, folder in zip((8.0, 5.0), folders, strict=False):
        folder.path.mkdir()
        steps = [{"seconds": 30.0, "iterations": 10}, {"seconds": seconds, "iterations": 3}, {}]
        folder.write_results({"config": {"train": {"batch_size": 2}}, "steps": steps})
    assert seconds_per_pass(folders) == pytest.approx((30 + 8 + 5) / (20 + 6 + 6))
    assert seconds_per_pass([folders[-1]]) is None


# ---- bad arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table1", "--preset", "voc", "--dry-run", "optim.lrr=1"], "optim.lrr: unknown key"),
        (
            ["table3", "--preset", "voc", "--dry-run", "method.strength=5"],
            "method.strength: is set by the plan",
        ),
        (["table1", "--preset", "voc", "--dry-run", "train.seed=5"], "train.seed: is set by the plan"),
        (["table1", "--preset", "voc", "--dry-run", "data.root=/d"], "data.root: is set by the plan"),
        (["table1", "--preset", "voc"], "set --root"),
        (["table1", "--preset", "voc", "--root", "/not/there"], "/not/there does not exist"),
        (["table1", "--preset", "nothing"], "invalid choice"),
        (["table5", "--preset", "voc"], "invalid choice"),
        (["table1", "--preset", "voc", "lr=1"], "lr=1"),
        (["table1", "--preset", "voc", "--jobs", "0"], "--jobs"),
        (["table1", "--preset", "voc", "--jobs", "2", "--launcher", "torchrun"], "--jobs"),
        (["table1", "--preset", "voc", "--slurm", "partition"], "--slurm"),
    ],
)
def test_bad_arguments_are_explained_and_give_code_2(arguments, message, tmp_path, capsys):
    try:
        code = reproduce.main([*arguments, f"--runs={tmp_path}/runs"])
    except SystemExit as left:  # argparse
        code = left.code
    assert code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_overrides_may_stand_anywhere_and_win_over_the_preset():
    options = reproduce.parse(
        ["a.b=1", "table1", "c.d=[1, 2]", "--preset", "voc", "--seeds", "3", "3", "1", "e.f=x=y"]
    )
    assert options.overrides == ["a.b=1", "c.d=[1, 2]", "e.f=x=y"] and options.seeds == [3, 1]
    assert options.runs == Path("runs/voc")
    assert all(c.train.epochs == 3 for c in voc_jobs("table1", overrides=["train.epochs=3"]).values())
    with pytest.raises(ConfigError, match="no such option"):
        voc_jobs("table1", overrides=["method.options.nonsense=1"])


def test_parameters_of_submitit():
    slurm = ["--slurm", "slurm_partition=gpu", "--slurm", "timeout_min=600"]
    options = reproduce.parse(["all", "--preset", "voc", *slurm])
    assert dict(options.slurm) == {"slurm_partition": "gpu", "timeout_min": 600}
