"""Trackers beside TensorBoard: lines of JSON, rows of a table, Weights & Biases."""

import csv
import importlib.util
import json
import re
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Killed, walk_until

import train
from configs.schema import ConfigError
from data.protocols import Step
from engine import checkpoint
from engine.arguments import read_config
from engine.ranks import StoppedBySignal
from tracking.lines import Lines
from tracking.tracker import TRACKERS, Tracker, Trackers, make_trackers, recorded_in

SHORT = ("train.epochs=1", "train.epochs_later=2", "method.name=mib", "run.pictures=0")
RESULT = {
    "step": 0,
    "miou": {"old": 0.5, "new": None, "all": 0.5},
    "miou_with_background": {"old": 0.5, "new": None, "all": 0.5},
    "iou": {"a, b": 0.5},
    "forgetting": {},
    "mean_forgetting": None,
    "backward_transfer": None,
}
BLOCK = 32768  # bytes, of the format that W&B keeps its rows in
has_wandb = importlib.util.find_spec("wandb") is not None


def points(folder: Path, tracker: str) -> list[tuple[int, str, float | None]]:
    """Every point of a file of lines: iteration, name, value."""
    if tracker == "csv":
        with open(folder / "scalars.csv", newline="") as file:
            return [(int(row["iteration"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    lines = map(json.loads, (folder / "scalars.jsonl").read_text().splitlines())
    return [
        (line["iteration"], name, value)
        for line in lines
        for name, value in line.items()
        if name != "iteration"
    ]


# ---- files of lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["csv", "jsonl"])
@pytest.mark.parametrize("torn", ['{"iteration": 4, "a"', "4,a,0.3", "4,", '"', "[]\n", "x\n"])
def test_lines_of_an_interrupted_run_are_dropped(name, torn, tmp_path):
    tracker = TRACKERS[name](tmp_path / "new")
    assert tracker.is_new
    tracker.open(at=1)
    for iteration in (1, 2, 3):
        tracker.scalars({"a": float(iteration), "unknown": None}, iteration)
    with open(tracker.path, "a") as file:
        file.write(torn)  # killed here
    assert not tracker.is_new
    tracker.open()  # to score again
    tracker.open(at=3)
    tracker.scalars({"a": 30.0}, 3)
    assert points(tmp_path / "new", name) == [(1, "a", 1.0), (2, "a", 2.0), (3, "a", 30.0)]
    assert [path.name for path in (tmp_path / "new").iterdir()] == [tracker.path.name]


@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_step_that_is_scored_again_has_its_metrics_once(name, tmp_path):
    tracker = TRACKERS[name](tmp_path)
    tracker.open(at=1)
    tracker.scalars({"loss/seg": 2.0}, 4)
    tracker.results(RESULT, at=4)
    tracker.open()
    tracker.results(RESULT | {"miou": {"old": 0.25, "new": None, "all": 0.25}}, at=4)
    found = points(tmp_path, name)
    assert len({name for _, name, _ in found}) == len(found)
    assert {(4, "loss/seg", 2.0), (4, "step", 0.0), (4, "miou/old", 0.25), (4, "iou/a, b", 0.5)} <= set(found)


def test_a_value_that_is_not_finite_is_null_in_json_and_nan_in_a_table(tmp_path):
    trackers = make_trackers(["csv", "jsonl"], True, tmp_path)
    trackers.open(at=1)
    trackers.scalars({"a": float("nan")}, 1)
    assert points(tmp_path, "jsonl") == [(1, "a", None)]
    assert (tmp_path / "scalars.csv").read_text() == "iteration,name,value\n1,a,nan\n"


def test_a_killed_run_has_every_point_once(toy_arguments, tmp_path):
    options = (*SHORT, "run.tracker=[csv, jsonl]", "run.checkpoint_every=1", "train.epochs_later=4")
    walk_until(toy_arguments(*options, name="whole"))
    pieces = toy_arguments(*options, name="pieces")
    with pytest.raises(Killed):
        walk_until(pieces, 4, kill=True)
    walk_until(pieces)
    for name in ("csv", "jsonl"):
        whole, both = (points(tmp_path / "runs" / run, name) for run in ("whole", "pieces"))
        assert len({point[:2] for point in both}) == len(both)
        slower = "speed/images_per_second"  # the one that may differ
        assert [p for p in both if p[1] != slower] == [p for p in whole if p[1] != slower]


@pytest.mark.parametrize("tracker", ["jsonl", "tensorboard"])
def test_the_losses_of_a_step_are_drawn_whole_after_an_interruption(tracker, toy_arguments, monkeypatch):
    drawn = []
    monkeypatch.setattr("tracking.drawing.losses", lambda curves: drawn.append(curves))
    arguments = toy_arguments(*SHORT, f"run.tracker=[{tracker}]", "train.epochs_later=4")
    monkeypatch.setattr(Lines, "losses", lambda self, curves, at: drawn.append(curves))
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 3)  # in the second iteration of step 1
    walk_until(arguments)
    assert [entry.iteration for entry in drawn[-1].entries] == [1, 2, 3, 4]


# ---- none can end a run ------------------------------------------------------------------------------------


def test_a_run_outlives_lines_that_cannot_be_written(tmp_path, capsys):
    trackers = make_trackers(["jsonl"], True, tmp_path)
    (tmp_path / "scalars.jsonl").mkdir()  # as good as a full disk
    trackers.open(at=1)
    for iteration in (1, 2):
        trackers.scalars({"a": 1.0}, iteration)
    assert capsys.readouterr().err.count("scalars.jsonl cannot be written") == 1
    (tmp_path / "scalars.jsonl").rmdir()
    trackers.open(at=3)
    trackers.scalars({"a": 3.0}, 3)
    assert points(tmp_path, "jsonl") == [(3, "a", 3.0)]


class Broken(Tracker):
    """Fails in every way, at a method of choice."""

    fails = ""

    def __getattribute__(self, name):
        if name == type(self).fails:
            raise RuntimeError("no \x1b network")
        return super().__getattribute__(name)


@pytest.mark.parametrize("fails", ["open", "scalars", "results", "image", "confusion", "losses", "finish"])
def test_a_tracker_that_fails_harms_neither_the_run_nor_the_others(fails, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Broken, "fails", fails)
    trackers = Trackers([Broken(tmp_path / "broken"), TRACKERS["jsonl"](tmp_path)])
    trackers.open(at=1)
    trackers.scalars({"a": 1.0}, 1)
    trackers.results(RESULT, 1)
    trackers.image(*[None] * 6)
    trackers.confusion(np.eye(2), ["a", "b"], 1)
    trackers.losses(SimpleNamespace(), 1)
    trackers.finish({})
    trackers.flush()
    trackers.close()
    error = capsys.readouterr().err
    assert error.count("cannot be written (RuntimeError: no \\x1b network)") == 1 and "\x1b" not in error
    assert (1, "a", 1.0) in points(tmp_path, "jsonl") and (1, "miou/old", 0.5) in points(tmp_path, "jsonl")


def test_nothing_else_knows_which_trackers_there_are():
    """Each is imported by its registry alone, and its library by nobody but itself."""
    root = Path(train.__file__).parent
    rooms = ("configs", "data", "engine", "methods", "metrics", "models", "scripts", "study", "tracking")
    names = r"(tracking\.|torch\.utils\.)?(tensorboard|wandb|jsonl)|tracking\.csv"
    imports = re.compile(rf"^\s*(from|import) ({names})\b", re.MULTILINE)
    files = [root / "train.py", *(file for room in rooms for file in (root / room).rglob("*.py"))]
    found = {str(file.relative_to(root)) for file in files if imports.search(file.read_text("utf-8"))}
    assert found == {"tracking/tensorboard.py", "tracking/wandb.py"}


# ---- Weights & Biases, by a stand-in -----------------------------------------------------------------------


class FakeRun:
    def __init__(self, mode, **options):
        self.mode, self.options, self.rows, self.metrics, self.is_open = mode, options, [], {}, True
        self.offline, self.url = mode == "offline", "https://example.org/run"

    def define_metric(self, name, step_metric):
        self.metrics[name] = step_metric

    def log(self, values, step, commit):
        assert self.is_open and commit and (not self.rows or step > self.rows[-1][0])
        self.rows.append((step, values))

    def finish(self):
        self.is_open = False


@pytest.fixture
def fake_wandb(monkeypatch) -> list[FakeRun]:
    """The runs that a stand-in of the package was asked to begin, all online unless it has no network."""
    runs: list[FakeRun] = []
    module = ModuleType("wandb")

    def init(mode=None, **options):
        if mode != "offline" and module.is_cut_off:
            raise ConnectionError("no such host\nmore")
        runs.append(FakeRun(mode or "online", **options))
        return runs[-1]

    module.__spec__ = SimpleNamespace(origin="wandb.py")
    module.init, module.Image, module.Settings, module.is_cut_off = init, np.shape, SimpleNamespace, False
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return runs


def told(run: FakeRun) -> list[tuple[str, int]]:
    """Names with the iteration or step that they were told for."""
    return [
        (name, values.get("iteration", values.get("step")))
        for _, values in run.rows
        for name in values
        if name not in ("iteration", "step")
    ]


def test_wandb_resumes_its_run_and_repeats_no_point(fake_wandb, tmp_path):
    for start in (1, 3):  # the second one resumes from before what was said
        tracker = TRACKERS["wandb"](tmp_path, about="train:\n  seed: 42\n")
        assert tracker.is_new == (start == 1)
        tracker.open(at=start)
        for iteration in range(start, start + 4):
            tracker.scalars({"loss/seg": 0.5, "unknown": None}, iteration)
        if start == 3:
            tracker.results(RESULT, 6)
            tracker.results(RESULT, 6)
        tracker.close()
    first, second = fake_wandb
    assert first.options["id"] == second.options["id"] and second.options["resume"] == "allow"
    assert first.options["config"] == {"train": {"seed": 42}} and first.options["name"] == tmp_path.name
    both = told(first) + told(second)
    assert len(set(both)) == len(both)
    assert [at for name, at in both if name == "loss/seg"] == [1, 2, 3, 4, 5, 6]
    steps = [step for run in fake_wandb for step, _ in run.rows]
    assert steps == list(range(len(steps)))  # W&B drops what is not above the last one
    assert ("miou/old", 6) in both and ("by_step/miou/old", 0) in both
    assert ("1 mIoU after each step/1 old", 0) in both
    assert second.metrics["*"] == "iteration" and second.metrics["by_step/*"] == "step"


def test_wandb_is_given_the_drawings(fake_wandb, tmp_path):
    tracker = TRACKERS["wandb"](tmp_path, old=["background", "a"])
    tracker.open(at=1)
    label = np.zeros((2, 2), np.uint8)
    tracker.image(0, np.zeros((2, 2, 3), np.uint8), label, label, Step(0, (), (1,)), 4)
    tracker.confusion(np.eye(2), ["background", "a"], 4)
    tracker.close()
    shown = {name: value for _, values in fake_wandb[0].rows for name, value in values.items()}
    assert shown["2 losses and images/3 image 0"][2] == shown["confusion"][2] == 3


@pytest.mark.parametrize("content", ["", "[]", '{"id": "x", "rows": 1}', '{"id": "x", "rows": 1, "said": 3}'])
def test_a_damaged_memory_of_wandb_begins_a_new_run(content, fake_wandb, tmp_path):
    (tmp_path / "wandb.json").write_text(content)
    tracker = TRACKERS["wandb"](tmp_path)
    assert tracker.is_new
    tracker.open(at=1)
    assert len(fake_wandb[0].options["id"]) == 12 != json.loads((tmp_path / "wandb.json").read_text())


def test_without_a_network_wandb_is_kept_offline(fake_wandb, tmp_path, capsys):
    sys.modules["wandb"].is_cut_off = True
    tracker = TRACKERS["wandb"](tmp_path)
    tracker.open(at=1)
    tracker.scalars({"a": 1.0}, 1)
    assert fake_wandb[0].mode == "offline" and told(fake_wandb[0]) == [("a", 1)]
    assert (
        "W&B is not reached (ConnectionError: no such host); its run is kept offline"
        in capsys.readouterr().err
    )
    assert "wandb sync" in tracker.watch("runs")


@pytest.mark.parametrize("found", [None, SimpleNamespace(origin=None)])
def test_wandb_asks_for_its_package_before_anything_else(found, monkeypatch, toy_arguments):
    monkeypatch.setattr("tracking.wandb.importlib.util.find_spec", lambda name: found)
    with pytest.raises(ConfigError, match="'wandb' needs a package that is not installed: pip install"):
        read_config(toy_arguments("run.tracker=[tensorboard, wandb]"))


# ---- Weights & Biases itself -------------------------------------------------------------------------------


@pytest.fixture
def offline_wandb(monkeypatch, tmp_path):
    if not has_wandb:
        pytest.skip("the package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_home"))


def records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run's file: LevelDB's log format behind a header of 7 bytes."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:  # no room for a header: the rest of a block is empty
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def history(file: Path) -> list[dict]:
    """The rows that an offline run of W&B keeps."""
    record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    rows = []
    for content in records(file.read_bytes()):
        record = record_type.FromString(content)
        if record.WhichOneof("record_type") == "history":
            named = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in named.items()})
    return rows


@pytest.mark.slow
def test_a_run_is_written_offline_and_goes_on_under_its_id(offline_wandb, toy_arguments, tmp_path):
    arguments = toy_arguments(*SHORT, "run.tracker=wandb", "run.pictures=1")
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 2)
    teardown = importlib.import_module("wandb").teardown  # what the end of a process calls: all is written
    teardown()
    time.sleep(1.1)  # W&B names its folders by the second, in which no process starts anew
    assert train.main(arguments) == 0
    teardown()
    folder = tmp_path / "runs/run"
    run_id = json.loads((folder / "wandb.json").read_text())["id"]
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [file.name for file in files] == [f"run-{run_id}.wandb"] * len(files) and len(files) == 2
    rows = [row for file in files for row in history(file)]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert [row["iteration"] for row in rows if "loss/seg" in row] == [1, 2, 3, 4]
    steps = json.loads((folder / "results.json").read_text())["steps"]
    shown = [row["1 mIoU after each step/3 all"] for row in rows if "1 mIoU after each step/3 all" in row]
    assert shown == [step["miou"]["all"] for step in steps]
    assert list(folder.glob("wandb/offline-run-*/files/media/images/**/*.png"))


@pytest.mark.slow
def test_no_tracker_changes_a_bit_of_the_model(offline_wandb, toy_arguments, tmp_path):
    for name, trackers in {"all": "[tensorboard, jsonl, csv, wandb]", "none": "none"}.items():
        assert train.main(toy_arguments(*SHORT, f"run.tracker={trackers}", name=name)) == 0
    ours, other = (checkpoint.load(tmp_path / f"runs/{name}/step_1.pt")["model"] for name in ("all", "none"))
    assert ours.keys() == other.keys() and all(torch.equal(ours[key], other[key]) for key in ours)
    assert list((tmp_path / "runs/all").glob("wandb/offline-run-*"))


# ---- steps that were trained elsewhere ---------------------------------------------------------------------


def test_a_tracker_that_comes_later_is_told_of_the_steps_before(toy_arguments, tmp_path):
    arguments = toy_arguments(*SHORT, "run.tracker=none")
    assert train.main([*arguments, "train.last_step=0"]) == 0
    assert train.main([*arguments, "run.tracker=csv"]) == 0
    found = [(at, value) for at, name, value in points(tmp_path / "runs/run", "csv") if name == "miou/all"]
    steps = json.loads((tmp_path / "runs/run/results.json").read_text())["steps"]
    assert found == [(2, steps[0]["miou"]["all"]), (4, steps[1]["miou"]["all"])]


@pytest.mark.parametrize("before", ["csv", "jsonl", "tensorboard"])
def test_a_run_from_a_shared_step_has_the_curves_of_that_step(before, toy_arguments, tmp_path):
    assert train.main(toy_arguments(*SHORT, f"run.tracker={before}", name="first")) == 0
    start = f"train.start_from={tmp_path / 'runs/first/step_0.pt'}"
    assert train.main(toy_arguments(*SHORT, start, "run.tracker=[tensorboard, jsonl]", name="second")) == 0
    found = points(tmp_path / "runs/second", "jsonl")
    assert [at for at, name, _ in found if name == "loss/seg"] == [1, 2, 3, 4]
    assert [at for at, name, _ in found if name == "miou/all"] == [2, 4]
    shown = recorded_in(tmp_path / "runs/first")
    same = {(at, name): value for at, values in shown for name, value in values.items() if at <= 2}
    assert {(at, name): value for at, name, value in found if (at, name) in same} == same
    second = dict(TRACKERS["tensorboard"](tmp_path / "runs/second").recorded())
    assert sorted(second) == [1, 2, 3, 4] and all("loss/seg" in values for values in second.values())


def test_curves_of_steps_of_another_length_are_left_where_they_are(toy_arguments, tmp_path):
    assert train.main(toy_arguments(*SHORT, "run.tracker=csv", name="first")) == 0
    start = ("train.epochs=2", f"train.start_from={tmp_path / 'runs/first/step_0.pt'}", "run.tracker=csv")
    assert train.main(toy_arguments(*SHORT, *start, name="second")) == 0
    found = points(tmp_path / "runs/second", "csv")
    assert [at for at, name, _ in found if name == "loss/seg"] == [5, 6]
