"""The shell scripts, in a copy of the project where Python only writes down how it was called; the list of
commands; scripts.compare."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from configs.schema import Config, load_config
from data.protocols import PROTOCOLS, protocol_steps
from engine.arguments import read_config
from scripts import compare, reproduce
from scripts.__main__ import COMMANDS, FOR_MAINTAINERS
from scripts.__main__ import main as list_commands
from study.beside import unique_names
from study.collection import RecordedRun
from study.experiments import experiments_of
from study.plan import PRESETS
from tracking import plotting
from tracking.examples import Examples

ROOT = Path(train.__file__).parent
SHELL_SCRIPTS = sorted(path.name for path in ROOT.glob("scripts/*.sh"))
PROTOCOL_SCRIPTS = [f"{dataset}_{protocol}.sh" for dataset in PROTOCOLS for protocol in PROTOCOLS[dataset]]
FAKE_PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  *device_count*) echo 2 ;;
  *inplace_abn*) exit 1 ;;
  *refused*) exit 2 ;;
esac
"""


class Project:
    """A copy of the scripts with a recording python3 in the PATH."""

    def __init__(self, folder: Path):
        self.root, self.calls_file = folder / "project", folder / "calls"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for path in ROOT.glob("requirements*.txt"):
            shutil.copy(path, self.root)
        self.python = folder / "bin" / "python3"
        self.python.parent.mkdir()
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def run(self, script: str, *arguments: str, cwd: Path | None = None, **variables: str):
        inherited = {
            k: v
            for k, v in os.environ.items()
            if k not in ("PYTHON", "GPUS", "TORCHRUN_ARGS", "RUNS", "ROWS", "SEEDS", "JOBS", "DRY")
        }
        path = f"{self.python.parent}:{os.environ['PATH']}"
        environment = inherited | {"PATH": path, "CALLS": str(self.calls_file)} | variables
        command = ["bash", script, *arguments]
        return subprocess.run(
            command, cwd=cwd or self.root, env=environment, capture_output=True, text=True, timeout=60
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


# ---- every script ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_shell_scripts_parse(name):
    checked = subprocess.run(["bash", "-n", f"scripts/{name}"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", [*PROTOCOL_SCRIPTS, "quickstart.sh", "study_voc_cpu.sh", "test.sh"])
def test_help_prints_the_usage_and_does_nothing_else(name, flag, project):
    for place, script in ((project.root, f"scripts/{name}"), (project.root / "scripts", name)):
        shown = project.run(script, flag, cwd=place)
        assert shown.returncode == 0 and shown.stderr == ""
        assert f"bash scripts/{name} " in shown.stdout and not shown.stdout.startswith("#")
    assert project.calls == [] and not (project.root / ".venv").exists()


@pytest.mark.parametrize("name", PROTOCOL_SCRIPTS)
def test_protocol_scripts_want_a_data_folder(name, project):
    refused = project.run(f"scripts/{name}")
    assert refused.returncode == 2 and f"bash scripts/{name} <" in refused.stdout
    assert project.calls == [] and not (project.root / ".venv").exists()


@pytest.mark.parametrize("name", PROTOCOL_SCRIPTS)
def test_each_protocol_script_launches_its_own_protocol(name, project):
    done = project.run(f"scripts/{name}", "/data/here", "a.yaml", "b.c=[1, 2]", PYTHON=str(project.python))
    assert done.returncode == 0, done.stderr
    dataset, protocol = name.removesuffix(".sh").split("_")
    overlay = f"configs/{dataset}/{protocol}.yaml"
    assert project.calls[1:] == [
        f"-m torch.distributed.run --standalone --nproc_per_node=2 train.py {overlay} data.root=/data/here "
        f"data.dataset={dataset} data.protocol={protocol} a.yaml b.c=[1, 2]"
    ]
    config = load_config([ROOT / overlay])
    assert (config.data.dataset, config.data.protocol) == (dataset, protocol)


def test_every_protocol_script_has_the_same_body():
    texts = [(ROOT / "scripts" / name).read_text().splitlines() for name in PROTOCOL_SCRIPTS]
    bodies = {tuple(line for line in text if not line.startswith("#")) for text in texts}
    assert len(bodies) == 1


def launched(project: Project, script: str, *typed: str) -> Config:
    """The config that a protocol script hands to train.py."""
    done = project.run(f"scripts/{script}", "/data", *typed, PYTHON=str(project.python), GPUS="1")
    assert done.returncode == 0, done.stderr
    arguments = project.calls[-1].removeprefix("train.py ").split(" ")
    return read_config([str(ROOT / a) if a.endswith(".yaml") else a for a in arguments])


@pytest.mark.parametrize("recipe", ["configs/voc/15-1_cpu.yaml", "configs/recipes/cpu.yaml"])
def test_a_protocol_script_runs_its_protocol_whatever_a_recipe_names(recipe, project):
    config = launched(project, "voc_10-1.sh", recipe, "configs/methods/mib.yaml")
    assert (config.data.protocol, config.model.body) == ("10-1", "mobilenet_v2")
    assert config.method.strength == 10, "MiB's 100 is for 15-1 alone"
    assert launched(project, "ade_100-10.sh", "configs/recipes/cpu.yaml").train.epochs == 4


def test_what_is_typed_wins_over_a_protocol_script(project):
    assert launched(project, "voc_10-1.sh", "data.protocol=19-1").data.protocol == "19-1"
    own = launched(project, "voc_10-1.sh", "configs/voc/15-1_cpu.yaml", "data.steps=[[1,2],[3]]").data
    assert (own.protocol, own.steps) == (None, ((1, 2), (3,)))


def test_data_folder_is_relative_to_the_caller_and_torchrun_can_be_told(project, tmp_path):
    variables = {"PYTHON": str(project.python), "GPUS": "4"}
    project.run("project/scripts/voc_15-1.sh", "my data", cwd=tmp_path, **variables)
    assert (
        f"--nproc_per_node=4 train.py configs/voc/15-1.yaml data.root={tmp_path}/my data "
        in project.calls[-1]
    )
    project.run("scripts/voc_15-1.sh", "/d", TORCHRUN_ARGS="--nnodes=2 --nproc_per_node=8", **variables)
    assert project.calls[-1].startswith("-m torch.distributed.run --nnodes=2 --nproc_per_node=8 train.py")


def test_one_process_needs_no_torchrun_and_keeps_its_exit_code(project):
    variables = {"PYTHON": str(project.python), "GPUS": "1"}
    assert project.run("scripts/voc_15-1.sh", "/my data", "a.b=1 2", **variables).returncode == 0
    assert project.calls == [
        "train.py configs/voc/15-1.yaml data.root=/my data data.dataset=voc data.protocol=15-1 a.b=1 2"
    ]
    assert project.run("scripts/voc_15-1.sh", "/d", "refused=1", **variables).returncode == 2
    project.run(
        "scripts/voc_15-1.sh", "/d", TORCHRUN_ARGS="--nnodes=2", **variables
    )  # one of several machines
    assert project.calls[-1].startswith("-m torch.distributed.run --nnodes=2 train.py")


def test_an_environment_is_made_once_and_again_when_the_requirements_change(project):
    for times in (1, 1, 2):
        if times == 2:
            with open(project.root / "requirements.txt", "a") as file:
                file.write("another\n")
        assert project.run("scripts/voc_15-1.sh", "/d").returncode == 0
        assert project.calls.count("-m venv .venv") == 1
        assert sum("pip install" in call for call in project.calls) == times


def test_nothing_is_installed_into_a_python_of_the_users_own(project):
    assert project.run("scripts/test.sh", "--fast", "-x", PYTHON=str(project.python)).returncode == 0
    assert not [call for call in project.calls if "pip" in call]
    assert project.calls[-4:] == [
        "-m ruff check .",
        "-m ruff format --check .",
        "-m mypy",
        "-m pytest -n auto -m not slow -x",
    ]


def quickstart(project: Project, folder: Path, then: str = "") -> subprocess.CompletedProcess[str]:
    """The quickstart with a recording Python that goes on with the shell commands `then`."""
    project.python.write_text(f"{FAKE_PYTHON}\n{then}")
    return project.run("scripts/quickstart.sh", "train.seed=2", PYTHON=str(project.python), RUNS=str(folder))


def test_quickstart_trains_four_runs_from_one_step_0_and_compares_them(project, tmp_path):
    done = quickstart(project, tmp_path)
    assert done.returncode == 0, done.stderr
    first, *trained, last = project.calls
    assert first == f"-m data.shapes {tmp_path}/shapes"
    names = [re.search(r"run\.name=(\S+)", call)[1] for call in trained]
    assert names[0] == "step0" and sorted(names) == ["ft", "lwf", "mib", "mib-altersgd", "step0"]
    assert names.index("ft") < names.index("mib")  # in the foreground; the others begin beside them
    assert all(call.endswith("train.seed=2") for call in trained)
    assert all(f"train.start_from={tmp_path}/step0/step_0.pt" in call for call in trained[1:])
    compared = " ".join(f"{tmp_path}/{name}" for name in ("ft", "lwf", "mib", "mib-altersgd"))
    assert last == f"-m scripts.compare {compared} --picture {tmp_path}/quickstart.png"


def test_quickstart_notices_that_the_run_in_the_background_failed(project, tmp_path):
    fails = 'case "$*" in *run.name=lwf*) echo what went wrong; exit 3 ;; esac'
    failed = quickstart(project, tmp_path, fails)
    assert failed.returncode == 3 and "what went wrong" in failed.stderr
    assert "scripts.compare" not in "".join(project.calls)


def test_quickstart_stops_the_run_in_the_background_with_the_other(project, tmp_path):
    stopped = quickstart(
        project,
        tmp_path,
        """case "$*" in
          *run.name=lwf*) trap 'echo saved; exit 75' TERM; echo ready; while :; do sleep 0.1; done ;;
          *run.name=ft*) until grep -q ready "$RUNS/lwf.log"; do sleep 0.1; done; exit 75 ;;
        esac""",
    )
    assert stopped.returncode == 75
    assert (tmp_path / "lwf.log").read_text() == "ready\nsaved\n"


def test_every_row_of_the_study_on_voc_names_planned_runs(project):
    done = project.run("scripts/study_voc_cpu.sh", "/voc", "/m.pth", "/r.pth", PYTHON=str(project.python))
    assert done.returncode == 0, done.stderr
    assert len(project.calls) == 3 + 3 + 2 + 3 + 3 + 1 + 4 + 1
    planned = {
        table: {e.name for e in experiments_of([table], load_config(PRESETS["voc-cpu"].overlays))}
        for table in ("core", "ladder", "readings", "related")
    }
    for call in project.calls:
        options = reproduce.parse(call.removeprefix("-m scripts.reproduce ").split(" "))
        assert options.preset == "voc-cpu" and options.root == Path("/voc") and len(options.seeds) == 1
        for pattern in options.only or ():
            assert any(fnmatchcase(name, pattern) for name in planned[options.table]), pattern


def test_the_study_on_voc_goes_on_after_a_failed_run_and_stops_when_stopped(project):
    script = project.python.read_text()
    for code, calls in ((1, 3), (75, 1)):
        project.python.write_text(f"{script}\nexit {code}\n")
        project.calls_file.unlink(missing_ok=True)
        done = project.run("scripts/study_voc_cpu.sh", "/voc", "/m.pth", PYTHON=str(project.python), ROWS="1")
        assert (done.returncode, len(project.calls)) == (code, calls)
    assert project.run("scripts/study_voc_cpu.sh", "/voc").returncode == 2


@pytest.mark.parametrize("command", ["train.py --help", "-m scripts.check_data {data}"])
@pytest.mark.slow
def test_output_that_nobody_reads_is_no_error(command, toy_voc):
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, *command.format(data=toy_voc).split()],
        cwd=ROOT,
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writes)
    assert ended.returncode == 128 + signal.SIGPIPE and "Error" not in ended.stderr, ended.stderr


# ---- python -m scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*COMMANDS, *FOR_MAINTAINERS])
def test_a_listed_command_can_be_called(name):
    assert callable(importlib.import_module(f"scripts.{name}").main)


def test_every_command_is_listed_once():
    files = [*ROOT.glob("scripts/*.py"), *ROOT.glob("scripts/dev/*.py")]
    commands = [
        ".".join(path.relative_to(ROOT / "scripts").with_suffix("").parts)
        for path in files
        if path.name != "__main__.py" and re.search(r"^def main\(", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert sorted([*COMMANDS, *FOR_MAINTAINERS]) == sorted(commands)
    assert all(name.startswith("dev.") for name in FOR_MAINTAINERS)


@pytest.mark.parametrize("name", FOR_MAINTAINERS)
def test_a_tool_is_also_found_under_the_name_it_had_before(name):
    assert callable(importlib.import_module(f"scripts.{name.removeprefix('dev.')}").main)


def test_the_list_has_a_short_line_for_every_command(capsys):
    assert list_commands([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, what in (COMMANDS | FOR_MAINTAINERS).items():
        assert [line.split(maxsplit=1) for line in lines if line.split()[:1] == [name]] == [[name, what]]
    users, _, maintainers = "\n".join(lines).partition("for maintainers:")
    assert all(f"  {name} " in users and f"  {name} " not in maintainers for name in COMMANDS)
    assert max(map(len, lines)) <= 100


# ---- what texts refer to -----------------------------------------------------------------------------------

TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("scripts/*.*"),
    *ROOT.glob("configs/**/*.yaml"),
]


@pytest.mark.parametrize("path", [ROOT / "train.py", *TEXTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_overlays_and_scripts_named_in_a_text_exist(path):
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"\b(?:configs/[\w/.-]+\.yaml|scripts/[\w/.-]+\.(?:sh|py))", text)
    tools = re.findall(r"-m scripts\.(\w+(?:\.\w+)?)", text)
    named += [f"scripts/{tool.replace('.', '/')}.py" for tool in tools]
    made = re.findall(r"^\+\+\+ b/(.+)$", text, flags=re.MULTILINE)  # by a patch in the text itself
    missing = sorted({name for name in named if not (ROOT / name).is_file()} - set(made))
    assert not missing


def test_every_protocol_has_a_script_and_an_overlay():
    assert set(PROTOCOL_SCRIPTS) <= set(SHELL_SCRIPTS)
    scripts = {
        name for name in SHELL_SCRIPTS if name.startswith(tuple(f"{dataset}_" for dataset in PROTOCOLS))
    }
    assert scripts == set(PROTOCOL_SCRIPTS)


# ---- scripts.compare ---------------------------------------------------------------------------------------


@pytest.fixture
def two_runs(toy_run) -> list[str]:
    return [str(toy_run(f"method.name={method}", name=method)) for method in ("ft", "mib")]


@pytest.mark.parametrize("examples", [1, 3, 100])
@pytest.mark.slow
def test_compare_prints_a_row_per_run_and_draws(examples, two_runs, tmp_path, capsys):
    drawing = tmp_path / "new" / "comparison.png"
    capsys.readouterr()
    assert compare.main([*two_runs, "--picture", str(drawing), "--examples", str(examples)]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "1-2" in header and "with bg" in header and "hiou" in header
    for name, row in zip(("ft", "mib"), rows, strict=True):
        last = json.loads((tmp_path / f"runs/{name}/results.json").read_text())["steps"][1]
        cells = row.split()
        assert cells[0] == name and cells[-1] == "2/2"
        assert cells[2:5] == [f"{100 * last['miou'][group]:.1f}" for group in ("old", "new", "all")]
        assert cells[5] == f"{100 * last['iou']['background']:.1f}"
    with Image.open(drawing) as image:
        assert image.format == "PNG" and min(image.size) > 100
        assert len(image.convert("RGB").getcolors(2**24)) > 10


def test_compare_passes_over_the_logs_beside_the_runs(two_runs, capsys):
    """A pattern such as runs/mib_seed* names the logs of scripts.reproduce, too."""
    capsys.readouterr()
    assert compare.main(two_runs) == 0
    alone = capsys.readouterr().out
    log = Path(f"{two_runs[0]}.log")
    log.write_text("step 0/1\n")
    assert compare.main([*two_runs, str(log)]) == 0
    assert capsys.readouterr().out == alone
    with pytest.raises(SystemExit):
        compare.main([str(log)])
    assert "only logs of runs are named" in capsys.readouterr().err


def test_compare_says_when_runs_are_not_equally_far(two_runs, capsys):
    capsys.readouterr()
    assert compare.main(two_runs) == 0
    assert "note:" not in capsys.readouterr().out
    file = Path(two_runs[0], "results.json")
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results | {"steps": results["steps"][:1]}))
    assert compare.main(two_runs) == 0
    assert "note: the runs stand after different numbers of steps" in capsys.readouterr().out.splitlines()[-1]
    protocol = results["protocol"][:1]  # one step, and it is done
    file.write_text(json.dumps(results | {"steps": results["steps"][:1], "protocol": protocol}))
    assert compare.main(two_runs) == 0
    assert "note: the runs have different numbers of steps" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("num_steps", [1, 2, 11])
def test_compare_draws_steps_as_whole_numbers(num_steps, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plotting, "save", lambda figure, *_, **__: drawn.append(figure))
    nothing, colours = np.zeros((2, 2), np.uint8), np.zeros((256, 3), np.uint8)
    shown = Examples([np.zeros((2, 2, 3), np.uint8)], [[nothing, nothing]], ["background"], colours)
    monkeypatch.setattr(compare, "examples", lambda *_: shown)
    steps = protocol_steps("voc", "10-1")
    results = {"protocol": [step.new for step in steps]}
    results["steps"] = [{"step": step, "miou": {"old": 0.5}} for step in range(num_steps)]
    compare.draw(tmp_path / "x.png", {"run": RecordedRun(tmp_path, results, "run")}, 1)
    axis = drawn[0].axes[0]
    low, high = axis.get_xlim()
    ticks = [tick for tick in axis.get_xticks() if low <= tick <= high]
    assert ticks and all(tick == round(tick) for tick in ticks)


def test_compare_explains_what_is_missing(two_runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for run in ("empty", "nowhere"):
        assert compare.main([two_runs[0], str(tmp_path / run)]) == 2
        assert f"{run}: no results yet" in capsys.readouterr().err
    broken = Path(two_runs[0])
    (broken / "step_1.pt").unlink()
    assert compare.main([*two_runs, "--picture", str(tmp_path / "x.png")]) == 2
    assert "step_1.pt: no such checkpoint" in capsys.readouterr().err
    (broken / "config.yaml").unlink()
    assert compare.main([*two_runs, "--picture", str(tmp_path / "x.png")]) == 2
    assert "config.yaml" in capsys.readouterr().err
    (broken / "results.json").write_text("{")
    assert compare.main(two_runs) == 2
    assert "results.json: not readable" in capsys.readouterr().err


def change(folder: str, **sections) -> None:
    """Changes keys of the config in a results.json: `optim={"lr": 1.0}`."""
    file = Path(folder, "results.json")
    results = json.loads(file.read_text())
    for section, keys in sections.items():
        results["config"][section] |= keys
    file.write_text(json.dumps(results))


def test_compare_says_above_the_table_what_differs_between_which_rows(two_runs, toy_run, tmp_path, capsys):
    three = [*two_runs, str(toy_run("method.name=mib", name="other"))]
    change(three[1], model={"body": "resnet18"})
    change(three[2], data={"evaluate_flip": True})
    capsys.readouterr()
    assert compare.main(three) == 0
    note, of_mib, of_other, _, header, *_ = capsys.readouterr().out.splitlines()
    assert note.startswith("note: not only method, phase, lambda and seed differ") and "From ft" in note
    assert of_mib == "- mib: backbone (model.body: 'resnet_tiny' -> 'resnet18')"
    assert of_other == "- other: evaluation (data.evaluate_flip: false -> true)" and header.startswith("run ")
    change(three[1], model={"body": "resnet_tiny"}, train={"seed": 7}, phase={"name": "altersgd"})
    assert compare.main(three[:2]) == 0
    assert capsys.readouterr().out.startswith("run ")


def test_compare_says_that_the_data_differ(two_runs, capsys):
    file = Path(two_runs[1], "results.json")
    results = json.loads(file.read_text())
    results["data"]["test"] = "of other images"
    file.write_text(json.dumps(results))
    capsys.readouterr()
    assert compare.main(two_runs) == 0
    assert "pictures.test" in capsys.readouterr().out.splitlines()[1]


def test_compare_says_that_class_names_and_weights_differ(two_runs, capsys):
    file = Path(two_runs[1], "results.json")
    file.write_text(file.read_text().replace('"bird"', '"plane"'))
    for folder, digest in zip(two_runs, ("aa", "bb"), strict=True):
        results = json.loads(Path(folder, "results.json").read_text())
        results["weights"] = {"file": f"{digest}.pth", "sha256": digest}
        Path(folder, "results.json").write_text(json.dumps(results))
    capsys.readouterr()
    assert compare.main(two_runs) == 0
    expected = "- mib: data (class 3: 'bird' -> 'plane'), backbone (weights.sha256: 'aa' -> 'bb')"
    assert capsys.readouterr().out.splitlines()[1] == expected


def test_compare_has_no_two_rows_of_one_name(two_runs, tmp_path, capsys):
    twin = shutil.copytree(two_runs[1], tmp_path / "elsewhere/mib")
    capsys.readouterr()
    assert compare.main([*two_runs, str(twin), f"{two_runs[0]}/."]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["ft", "runs/mib", "elsewhere/mib"]
    assert unique_names([Path("/a/b/c"), Path("/a/c"), Path("/b/c"), Path("/c")]) == [
        "a/b/c",
        "a/c",
        "/b/c",
        "/c",
    ]


def test_compare_shows_scores_in_another_setting_as_a_row_of_their_own(two_runs, toy_arguments, capsys):
    again = ("train.evaluate_only=true", "train.first_step=1", "data.evaluate_flip=true")
    assert train.main(toy_arguments("method.name=mib", *again, name="mib")) == 0
    capsys.readouterr()
    assert compare.main(two_runs) == 0
    _, line, _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert line == "- mib [flip]: evaluation (data.evaluate_flip: false -> true)"
    scores = json.loads(Path(two_runs[1], "results.json").read_text())["evaluations"]["flip"]["steps"]
    assert [row[: row.index("  ")] for row in rows] == ["ft", "mib", "mib [flip]"]
    cells = rows[2].split()[2:]  # step 0 was not scored so, and nothing is known of forgetting
    assert cells[0] == "-" and cells[3] == f"{100 * scores[0]['miou']['all']:.1f}"
    assert cells[-3] == "-" and cells[-1] == "2/2"  # between them is a further metric


def seeds_of(folder: str, tmp_path: Path, *seeds: int) -> list[str]:
    """Copies of a run that say they had other seeds, each a tenth better than the one before."""
    copies = []
    for number, seed in enumerate(seeds, start=1):
        copies.append(str(shutil.copytree(folder, tmp_path / f"mib_seed{seed}-{number}")))
        file = Path(copies[-1], "results.json")
        results = json.loads(file.read_text())
        results["config"]["train"]["seed"] = seed
        results["steps"][-1]["miou"]["all"] = number / 10
        file.write_text(json.dumps(results))
    return copies


def test_compare_takes_means_over_seeds(two_runs, tmp_path, capsys):
    copies = seeds_of(two_runs[1], tmp_path, 1, 2, 3)
    capsys.readouterr()
    assert compare.main([two_runs[0], *copies]) == 0
    shown = capsys.readouterr().out
    header, _, of_ft, of_mib = shown.split("over seeds\n\n")[1].splitlines()
    assert header.split()[0] == "method" and header.split()[-1] == "seeds"
    assert of_ft.startswith("FT ") and of_ft.split()[-1] == "1"
    assert of_mib.startswith("MiB") and "20.0 ± 10.0" in of_mib and of_mib.split()[-1] == "3"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"optim": {"lr": 9.0}}, "differ mib_seed2-2: recipe (optim.lr: "),
        ({"model": {"body": "resnet18"}}, "differ mib_seed2-2: backbone (model.body: "),
        ({"data": {"crop": 16}}, "differ mib_seed2-2: data (data.crop: "),
        ({"train": {"seed": 1}}, "seed 1 is there more than once: mib_seed1-1, mib_seed2-2, mib_seed3-3"),
    ],
)
def test_compare_refuses_a_mean_of_runs_that_differ(changed, why, two_runs, tmp_path, capsys):
    copies = seeds_of(two_runs[1], tmp_path, 1, 2, 3)
    change(copies[1], **changed)
    capsys.readouterr()
    assert compare.main(copies) == 0
    shown = capsys.readouterr().out
    assert "over seeds" not in shown and "note: no mean of MiB" in shown and why in shown


def test_compare_says_that_a_run_was_cut(two_runs, capsys):
    change(two_runs[1], train={"last_step": 0})
    file = Path(two_runs[1], "results.json")
    results = json.loads(file.read_text())
    results["steps"] = results["steps"][:1]
    file.write_text(json.dumps(results))
    capsys.readouterr()
    assert compare.main(two_runs) == 0
    assert "note: mib was cut by train.last_step=0: these are not final metrics" in capsys.readouterr().out


def test_compare_names_groups_by_class_ids_only_where_all_rows_share_them(two_runs, toy_run, capsys):
    other = toy_run("method.name=mib", "data.steps=[[1], [2], [3]]", "train.batch_size=2", name="other")
    capsys.readouterr()
    assert compare.main([*two_runs, str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("run "))
    assert "1-2" not in header and header.split()[1:5] == ["step", "0:", "old", "old"]
    assert [line.split()[-1] for line in lines[-5:-2]] == ["2/2", "2/2", "3/3"]


# ---- for real ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_protocol_script_trains_under_torchrun(toy_arguments, toy_voc, tmp_path):
    overrides = [argument for argument in toy_arguments() if not argument.startswith("data.root=")]
    command = [
        "bash",
        "scripts/voc_15-1.sh",
        str(toy_voc),
        "configs/methods/mib.yaml",
        "configs/altersgd.yaml",
    ]
    environment = os.environ | {"PYTHON": sys.executable, "GPUS": "2", "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHRUN_ARGS", None)
    done = subprocess.run(
        [*command, *overrides, "phase.p=0.5", "run.tracker=none"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert [step["step"] for step in results["steps"]] == [0, 1]
    assert results["environment"]["world_size"] == 2
    assert results["config"]["method"]["name"] == "mib" and results["config"]["phase"]["name"] == "altersgd"
    assert done.stdout.count("results: ") == 1  # one rank speaks
