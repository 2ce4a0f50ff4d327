"""The sessions of examples/ from end to end: in a copy of the project, with a tiny network and few images."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_mask_meanings import write_camvid
from test_slurm import HERE, ask

import train
from engine.run_folder import read_results

ROOT = Path(train.__file__).parent
SESSIONS = sorted(path.name for path in ROOT.glob("examples/*.sh"))
TINY = (
    *("data.workers=0", "data.crop=32", "data.evaluate=full", "train.device=cpu", "train.batch_size=4"),
    *(
        "model.body=resnet_tiny",
        "model.output_stride=8",
        "model.head_channels=8",
        "model.dilations=[1, 2, 3]",
    ),
    *("model.pretrained=null", "train.epochs=1", "train.epochs_later=1", "run.tracker=none"),
)


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project as a clone would have it, without what no session reads."""
    left_out = shutil.ignore_patterns(
        ".*", "__pycache__", "docs", "tests", "runs", "ladder", "readings", "voc-*"
    )
    return Path(shutil.copytree(ROOT, tmp_path / "project", ignore=left_out))


def run(project: Path, session: str, *arguments: str, **variables: str) -> str:
    """Return what a session prints; it must end well."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("RUNS", "SEEDS", "DATA")}
    environment = inherited | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    command = ["bash", f"examples/{session}", *arguments]
    ended = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=1700
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def steps(folder: Path) -> list[dict]:
    results = read_results(folder / "results.json")
    assert results is not None
    return results["steps"]


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_explains_itself_and_is_listed(project, session):
    assert f"bash examples/{session} " in run(project, session, "--help")
    assert f"]({session})" in (ROOT / "examples/README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_my_method_against_mib_with_three_seeds(project, toy_voc):
    small = (*TINY, "data.steps=[[1, 2], [3]]")
    shown = run(project, "my_method.sh", *small, DATA=str(toy_voc))
    runs = project / "runs/my-method"
    for seed in (1, 2, 3):
        mib, mine = (steps(runs / f"runs/{name}_seed{seed}") for name in ("mib", "my_method"))
        assert mib[0]["iou"] == mine[0]["iou"] and len(mib) == len(mine) == 2  # one step 0 for both
        assert f"\nmy_method_seed{seed} " in shown
    assert (runs / "compared.png").is_file() and (runs / "report/report.html").is_file()
    report = (runs / "report/report.md").read_text(encoding="utf-8")
    differences = report.partition("## Differences, seed by seed")[2].partition("\n## ")[0]
    assert "Difference to MiB" in differences
    (row,) = [line for line in differences.splitlines() if "my_method" in line]
    assert row.split("|")[2].strip() == "3" and " ± " in row  # the seeds that both have


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_my_data_with_two_protocols(project, tmp_path):
    root = write_camvid(tmp_path / "CamVid")
    shown = run(project, "my_data.sh", str(root), "configs/methods/mib.yaml", *TINY)
    runs = project / "runs/my-data"
    for protocol, sizes in {"two_steps": (8, 11), "one_by_one": (8, 9, 10, 11)}.items():
        done = steps(runs / protocol)
        assert tuple(len(step["iou"]) - 1 for step in done) == sizes
        assert done[-1]["iou"]["background"] is None and None not in list(done[-1]["iou"].values())[1:]
        assert len(list((runs / "seen" / protocol).glob("*_steps.png"))) == 2
    assert shown.count(" 11  (void) ") == 2 and "own     overlapped      8      8      8      8\n" in shown
    table = shown.rpartition("may be compared. From two_steps differ\n- one_by_one: data.steps: ")[2]
    assert "\ntwo_steps " in table and "\none_by_one " in table


SMALL_TABLE = ("--only", "ft", "mib", "--gpus", "0", "--threads", "1", "--seeds", "1")


def check_table(runs: Path, shown: str) -> None:
    assert "3 runs: 3 done" in shown and {path.name for path in runs.glob("*_seed1")} >= {
        "ft_seed1",
        "mib_seed1",
    }
    assert len(steps(runs / "mib_seed1")) == 2
    report = (runs / "report/report.md").read_text(encoding="utf-8")
    assert [line for line in report.splitlines() if line.startswith("| MiB | 1 |")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_table_by_the_way_of_slurm_without_one(project, toy_voc, tmp_path):
    pytest.importorskip("submitit")
    arguments = (*SMALL_TABLE, "--launcher", "submitit-local", *TINY, "data.steps=[[1, 2], [3]]")
    shown = run(project, "slurm_table.sh", str(toy_voc), str(tmp_path / "shared"), *arguments)
    check_table(tmp_path / "shared", shown)


@pytest.fixture
def slurm(tmp_path_factory) -> Iterator[Path]:
    """The slurm.conf of a real Slurm of two nodes, whose partition is called as in the session."""
    missing = ask("bash", str(HERE), "missing").strip()
    if missing:
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("slurm")
    ask(
        "bash",
        str(HERE),
        "start",
        "--folder",
        str(folder),
        "--conf",
        "PartitionName=gpu Nodes=ALL Default=YES",
    )
    yield folder / "slurm.conf"
    ask("bash", str(HERE), "stop", str(folder))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_table_on_a_real_slurm(project, toy_voc, tmp_path, slurm):
    pytest.importorskip("submitit")
    arguments = (*SMALL_TABLE, *TINY, "data.steps=[[1, 2], [3]]")
    shown = run(
        project, "slurm_table.sh", str(toy_voc), str(tmp_path / "shared"), *arguments, SLURM_CONF=str(slurm)
    )
    check_table(tmp_path / "shared", shown)
