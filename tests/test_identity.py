"""A number is stored with everything it depends on: what differs between two starts or two runs is refused or
said."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY_NETWORK

import train
from configs.schema import load_config
from engine import checkpoint
from engine.identity import recorded_classes, run_differences, state_digest, weights_of
from methods import METHODS, Method
from models.segmenter import build_segmenter
from scripts import compare, status
from study.collection import RecordedRun
from study.identity import recipe_differences
from study.plan import PRESETS, State, describe, list_jobs, look_at
from study.report import read_runs

ROOT = Path(train.__file__).parent
FAST = ("train.epochs=1", "train.epochs_later=1", "run.pictures=0")
THREE = (*FAST, "data.steps=[[1], [2], [3]]", "train.batch_size=2", "method.name=mib")


@pytest.fixture
def first(toy_run):
    """The folder of a run that trained step 0 for others."""

    def make(*overrides: str, name: str = "first") -> Path:
        return toy_run("method.name=ft", *FAST, "train.last_step=0", *overrides, name=name)

    return make


@pytest.fixture
def start(toy_arguments):
    """train.py from a step of another run; returns the exit code."""

    def run(source: Path | str, *overrides: str, name: str = "rest") -> int:
        choice = ("method.name=mib", *FAST, f"train.start_from={source}")
        return train.main(toy_arguments(*choice, *overrides, name=name))

    return run


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def rewrite(folder: Path, **changes) -> None:
    """Change results.json, None removes."""
    results = {key: value for key, value in (results_of(folder) | changes).items() if value is not None}
    (folder / "results.json").write_text(json.dumps(results))


def resave(path: Path, *without: str, **changes) -> None:
    """Change a step checkpoint."""
    state = {key: value for key, value in checkpoint.load(path).items() if key not in without}
    checkpoint.save(state | changes, path)


# ---- what a run started from -------------------------------------------------------------------------------


def test_a_changed_start_from_is_refused(first, start, tmp_path, capsys):
    one, other = first() / "step_0.pt", first("train.seed=5", name="other") / "step_0.pt"
    rest = tmp_path / "runs/rest"
    assert start(one) == 0
    started = results_of(rest)["started_from"]
    assert started["file"] == str(one) and started["step"] == 0 and len(started["sha256"]) == 64
    config = (rest / "config.yaml").read_text()
    capsys.readouterr()
    assert start(other) == 2
    message = capsys.readouterr().err
    assert f"started from {one}" in message and f"train.start_from={other}" in message
    assert (rest / "config.yaml").read_text() == config  # which still names the file that was used


@pytest.mark.slow
def test_the_source_may_move_or_go_once_a_run_has_started(first, start, tmp_path, capsys):
    folder = first()
    assert start(folder / "step_0.pt") == 0
    assert start(shutil.copy(folder / "step_0.pt", tmp_path / "elsewhere.pt")) == 0
    shutil.rmtree(folder)
    assert start(folder / "step_0.pt") == 0
    assert "nothing was trained" in capsys.readouterr().out
    assert start(tmp_path / "never.pt") == 2
    assert f"started from {folder / 'step_0.pt'}" in capsys.readouterr().err


def test_a_run_with_a_step_0_of_its_own_cannot_start_elsewhere_later(first, start, toy_run, capsys):
    one = first("train.seed=5") / "step_0.pt"
    toy_run("method.name=mib", *FAST, name="rest")
    assert start(one) == 2
    assert f"did not start from {one}" in capsys.readouterr().err


def test_an_older_folder_learns_once_what_it_started_from(first, start, toy_arguments, tmp_path, capsys):
    one = first() / "step_0.pt"
    assert start(one, "train.last_step=0") == 0
    rest = tmp_path / "runs/rest"
    rewrite(rest, started_from=None, classes=None)
    one.unlink()
    capsys.readouterr()
    assert start(one, "train.last_step=0") == 0
    assert "does not tell what it started from" in capsys.readouterr().out
    assert results_of(rest)["started_from"]["sha256"] == state_digest(checkpoint.load(rest / "step_0.pt"))
    assert results_of(rest)["classes"][:2] == ["background", "aeroplane"]
    assert start(one, "train.last_step=0") == 0
    assert "does not tell" not in capsys.readouterr().out


# ---- with what objective a step was trained ----------------------------------------------------------------


@pytest.mark.parametrize("is_old", [False, True])
def test_lwf_mc_refuses_the_step_0_of_another_objective(is_old, first, start, tmp_path, capsys):
    one = first() / "step_0.pt"
    if is_old:
        resave(one, "trained")
    assert start(one, "method.name=lwf_mc") == 2
    assert "trained with the objective of 'ft'" in capsys.readouterr().err
    assert not (tmp_path / "runs/rest/step_0.pt").exists()


def test_softmax_methods_refuse_the_step_0_of_lwf_mc(first, start, capsys):
    assert start(first("method.name=lwf_mc") / "step_0.pt") == 2
    assert "trained with the objective of 'lwf_mc'" in capsys.readouterr().err


def test_a_step_0_trained_otherwise_is_said_once(first, start, capsys):
    one = first("data.void=ignore", "method.cross_entropy=valid", "optim.lr=0.04") / "step_0.pt"
    trained = checkpoint.load(one)["trained"]
    assert trained["objective"]["data"] == {"void": "ignore"} and len(trained["data"]) == 32
    assert trained["recipe"]["optim"]["lr"] == 0.04 and trained["classes"][1] == "aeroplane"
    settings = ("data.void=background", "method.cross_entropy=all", "train.last_step=0")
    assert start(one, *settings) == 0
    said = capsys.readouterr().out
    for words in (
        "data.void: 'ignore' -> 'background'",
        "method.cross_entropy: 'valid' -> 'all'",
        "optim.lr: 0.04",
    ):
        assert words in said
    assert "method.name" not in said and "epochs" not in said
    assert start(one, *settings) == 0
    assert "trained otherwise" not in capsys.readouterr().out


def test_a_step_0_trained_as_this_run_would_needs_no_word(first, start, capsys):
    assert start(first() / "step_0.pt", "train.last_step=0", "phase.name=altersgd", "method.strength=3") == 0
    assert "trained otherwise" not in capsys.readouterr().out


def test_a_checkpoint_that_tells_nothing_of_its_training_is_taken_with_a_word(first, start, capsys):
    one = first() / "step_0.pt"
    resave(one, "trained", config="")
    assert start(one, "train.last_step=0") == 0
    assert "does not tell with which objective" in capsys.readouterr().out


# ---- what a step leaves to a method ------------------------------------------------------------------------


class Counting(Method):
    """Keeps nothing until its first step has ended."""

    name = "ft"
    ended = 0

    def end_step(self, model) -> None:
        self.ended += 1

    def state_dict(self) -> dict:
        return {"steps": self.ended} if self.ended else {}

    def load_state_dict(self, state: dict) -> None:
        self.ended = state.get("steps", 0)


def test_a_method_gets_its_state_even_if_a_fresh_one_has_none(toy_arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "ft", Counting)
    assert train.main(toy_arguments("method.name=ft", *FAST)) == 0
    left = [checkpoint.load(tmp_path / f"runs/run/step_{i}.pt")["methods"]["ft"]["steps"] for i in (0, 1)]
    assert left == [1, 2]


def test_a_method_that_refuses_its_state_is_named(toy_arguments, monkeypatch, capsys):
    careless = type("Careless", (Counting,), {"load_state_dict": Method.load_state_dict})
    monkeypatch.setitem(METHODS, "ft", careless)
    assert train.main(toy_arguments("method.name=ft", *FAST)) == 2
    message = capsys.readouterr().err
    assert "method 'ft' refuses what step 0 left for it" in message and "keeps no state" in message


# ---- weights by content ------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    """A file of backbone weights under a name, as the seed says."""

    def write(name: str, seed: int = 0) -> Path:
        torch.manual_seed(seed)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        torch.save(build_segmenter(**TINY_NETWORK).body.state_dict(), path)
        return path

    return write


def test_the_same_weights_at_another_place_are_the_same(weights, toy_arguments, tmp_path, capsys):
    one = weights("a/weights.pth")
    copied = shutil.copy(one, tmp_path / "renamed.pth")
    arguments = toy_arguments(*FAST, "train.last_step=0")
    assert train.main([*arguments, f"model.pretrained={one}"]) == 0
    recorded = results_of(tmp_path / "runs/run")["weights"]
    assert recorded["file"] == str(one) and len(recorded["sha256"]) == 64
    assert train.main([*arguments, f"model.pretrained={copied}"]) == 0
    weights("a/weights.pth", seed=1)
    capsys.readouterr()
    assert train.main([*arguments, f"model.pretrained={one}"]) == 2
    assert "model.pretrained" in (message := capsys.readouterr().err) and "different content" in message


def test_an_older_folder_takes_weights_by_name_and_says_so_once(weights, toy_arguments, tmp_path, capsys):
    one, copied = weights("a/weights.pth"), weights("b/weights.pth")
    arguments = toy_arguments(*FAST, "train.last_step=0")
    assert train.main([*arguments, f"model.pretrained={one}"]) == 0
    rewrite(tmp_path / "runs/run", weights=None)
    for is_said in (True, False):
        capsys.readouterr()
        assert train.main([*arguments, f"model.pretrained={copied}"]) == 0
        assert ("by their file's name alone" in capsys.readouterr().out) == is_said
    assert train.main([*arguments, f"model.pretrained={weights('c/other.pth', seed=1)}"]) == 2


@pytest.mark.usefixtures("at_the_root")
def test_the_plan_knows_weights_by_content_and_names_the_key_that_differs(weights, tmp_path):
    def plan(place: Path, *overrides: str) -> list:
        settings = {"data.root": tmp_path, "model.pretrained": place}
        jobs = list_jobs(["table1"], PRESETS["shapes"], [1], tmp_path / "runs", settings, overrides)
        return look_at(jobs, PRESETS["shapes"], count=False)

    one = weights("a/weights.pth")
    copied = shutil.copy(one, tmp_path / "renamed.pth")
    for run in plan(one):
        run.folder.path.mkdir(parents=True)
        config = run.config.model_dump(mode="json")
        facts = {
            "config": config,
            "weights": weights_of(run.config),
            "steps": [{"step": i} for i in range(6)],
        }
        run.folder.write_results(facts)
        run.folder.step_checkpoint(0).touch()
    assert {run.state for run in plan(copied)} == {State.DONE}
    weights("renamed.pth", seed=1)
    runs = plan(copied, "optim.lr=0.5")
    assert {run.state for run in runs} == {State.OTHER}
    shown = describe(runs, PRESETS["shapes"])
    assert "other config: optim.lr: " in shown and "other config: model.pretrained: " in shown
    assert f"(step0_seed1 and {len(runs) - 1} more)" in shown


def test_the_report_knows_weights_by_content():
    results = json.loads((ROOT / "results/quickstart/mib/results.json").read_text())

    def run(file: str, sha256: str) -> RecordedRun:
        model = results["config"]["model"] | {"pretrained": file}
        facts = {"config": results["config"] | {"model": model}, "weights": {"file": file, "sha256": sha256}}
        return RecordedRun(Path(file), results | facts, file)

    assert recipe_differences(run("a/weights.pth", "1"), run("b/weights.pth", "1")) == []
    assert recipe_differences(run("weights.pth", "1"), run("weights.pth", "2")) == [
        "weights.sha256: '1' -> '2'"
    ]


def test_imagenet_stays_imagenet_without_looking_for_its_file():
    config = load_config([], ["model.pretrained=imagenet"])
    assert run_differences(config.model_dump(), {}, config, None) == ([], [])


# ---- starting after a later step ---------------------------------------------------------------------------


@pytest.fixture
def three(toy_run, toy_arguments):
    """A run of three steps, and train.py on the same protocol after one of them."""
    whole = toy_run(*THREE, name="whole")

    def after(source: Path, *overrides: str) -> int:
        return train.main(toy_arguments(*THREE, f"train.start_from={source}", *overrides, name="rest"))

    return whole, after


def same_weights(one: Path, other: Path) -> bool:
    a, b = (checkpoint.load(path)["model"] for path in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_starting_after_a_later_step_trains_only_what_follows(three, tmp_path, capsys):
    whole, after = three
    assert after(whole / "step_1.pt") == 0
    rest = tmp_path / "runs/rest"
    assert sorted(path.name for path in rest.glob("step_*")) == ["step_1.pt", "step_2.pt"]
    assert same_weights(rest / "step_2.pt", whole / "step_2.pt")
    ours, theirs = results_of(rest)["steps"], results_of(whole)["steps"]
    assert ours[:2] == theirs[:2]  # taken over
    assert [step["iou"] for step in ours] == [step["iou"] for step in theirs]
    assert ours[2]["forgetting"] == theirs[2]["forgetting"] and ours[2]["average"] == theirs[2]["average"]
    assert after(whole / "step_1.pt") == 0
    assert "nothing was trained" in capsys.readouterr().out


@pytest.mark.slow
def test_metrics_of_steps_before_the_start_are_absent_never_invented(three, tmp_path, capsys):
    whole, after = three
    alone = shutil.copy(whole / "step_1.pt", tmp_path / "step_1.pt")
    assert after(alone) == 0
    assert "stay absent" in capsys.readouterr().out
    rest = tmp_path / "runs/rest"
    steps, theirs = results_of(rest)["steps"], results_of(whole)["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    assert [step["iou"] for step in steps] == [step["iou"] for step in theirs[1:]]
    last = steps[-1]
    assert last["forgetting"] == {} and last["mean_forgetting"] is None
    assert last["backward_transfer"] is None and last["average"] == {
        "miou": None,
        "miou_with_background": None,
    }

    (rest / "step_2.pt").unlink()  # and the last step can be trained again
    assert after(alone) == 0
    assert [step["step"] for step in results_of(rest)["steps"]] == [1, 2]

    assert compare.main([str(rest), str(whole)]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("rest "))
    assert row[1] == "-" and row[-1] == "3/3"
    text, _ = status.describe([rest])
    assert " done " in text and " 3/3 " in text
    run = RecordedRun(rest, results_of(rest), "rest")
    assert (
        run.is_finished
        and run.history[0] == {}
        and run.history[2] == RecordedRun(whole, results_of(whole), "").history[2]
    )
    assert run.seconds_later is not None
    assert not read_runs([rest]).unfinished


def test_metrics_made_otherwise_are_not_taken_over(three, tmp_path):
    whole, after = three
    assert after(whole / "step_1.pt", "data.evaluate_flip=true", "train.last_step=1") == 0
    assert [step["step"] for step in results_of(tmp_path / "runs/rest")["steps"]] == [1]


def test_metrics_of_another_model_beside_the_source_are_not_taken_over(three, tmp_path):
    whole, after = three
    resave(whole / "step_1.pt", costs=checkpoint.load(whole / "step_1.pt")["costs"] | {"seconds": 1e6})
    assert after(whole / "step_1.pt", "train.last_step=1") == 0
    assert [step["step"] for step in results_of(tmp_path / "runs/rest")["steps"]] == [1]


def test_results_beside_the_source_that_lack_a_part_are_not_taken_over(three, tmp_path):
    whole, after = three
    results = results_of(whole)
    (whole / "results.json").write_text(json.dumps({"data": results["data"], "steps": results["steps"]}))
    assert after(whole / "step_1.pt", "train.last_step=1") == 0
    assert [step["step"] for step in results_of(tmp_path / "runs/rest")["steps"]] == [1]


def test_metrics_behind_a_missing_checkpoint_do_not_count(three, toy_arguments, capsys):
    whole, _ = three
    (whole / "step_0.pt").unlink()
    assert train.main(toy_arguments(*THREE, "train.last_step=0", name="whole")) == 0
    assert "the models of later steps (1, 2) were trained from it" in capsys.readouterr().out
    assert [step["step"] for step in results_of(whole)["steps"]] == [0]


# ---- the copy of what a run started from -------------------------------------------------------------------


def test_a_run_shares_no_file_with_the_one_it_started_from(first, start, tmp_path):
    one = first() / "step_0.pt"
    assert start(one, "train.last_step=0") == 0
    mine = tmp_path / "runs/rest/step_0.pt"
    assert not os.path.samefile(one, mine)
    one.write_bytes(b"overwritten in place")
    assert checkpoint.load(mine)["step"] == 0


def test_an_interrupted_copy_is_made_again(first, start, tmp_path, monkeypatch, capsys):
    one, rest = first() / "step_0.pt", tmp_path / "runs/rest"

    def full_disk(state, path, **_):
        path.with_name(f".{path.name}.1.tmp").write_bytes(b"half")
        raise checkpoint.CheckpointError(f"{path}: the checkpoint could not be written")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full_disk)
        assert start(one) == 2
    assert not (rest / "step_0.pt").exists() and results_of(rest)["started_from"]["file"] == str(one)
    assert start(one) == 0
    assert same_weights(one, rest / "step_0.pt")
    assert "copied again" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_told_to_start_from_something_never_starts_from_nothing(first, start, tmp_path, capsys):
    one, rest = first() / "step_0.pt", tmp_path / "runs/rest"
    assert start(one, "train.last_step=0") == 0
    whole = one.read_bytes()
    (rest / "step_0.pt").write_bytes(whole[: len(whole) // 2])
    one.unlink()
    assert start(one) == 2
    message = capsys.readouterr().err
    assert "does not start from nothing" in message and "not a whole checkpoint" in message
    one.write_bytes(whole)
    assert start(one) == 0
    assert "copied again" in capsys.readouterr().out and (rest / "step_0.damaged").exists()
    assert same_weights(one, rest / "step_0.pt")


def test_a_swapped_copy_of_the_start_is_refused(first, start, tmp_path, capsys):
    one, other = first() / "step_0.pt", first("train.seed=5", name="other") / "step_0.pt"
    assert start(one, "train.last_step=0") == 0
    one.unlink()
    shutil.copy(other, tmp_path / "runs/rest/step_0.pt")
    assert start(one) == 2
    assert "is another model than" in capsys.readouterr().err


# ---- class names -------------------------------------------------------------------------------------------


@pytest.fixture
def own(toy_voc, tmp_path, toy_arguments):
    """The toy images as a data set of one's own, whose classes can be renamed."""
    root = tmp_path / "own"
    root.mkdir()
    (root / "images").symlink_to(toy_voc / "JPEGImages")
    (root / "masks").symlink_to(toy_voc / "SegmentationClassAug")
    for split, listed in (("train", "train_aug"), ("val", "val")):
        shutil.copy(toy_voc / f"ImageSets/Segmentation/{listed}.txt", root / f"{split}.txt")

    def run(classes: str, *overrides: str, name: str = "run") -> int:
        (root / "classes.txt").write_text("\n".join(classes.split()) + "\n")
        settings = ("data.dataset=folder", f"data.root={root}", *FAST, *overrides)
        return train.main(toy_arguments(*settings, name=name))

    return run


def test_swapped_class_names_between_two_starts_are_refused(own, tmp_path, capsys):
    assert own("cat dog owl", "train.last_step=0") == 0
    assert results_of(tmp_path / "runs/run")["classes"] == ["background", "cat", "dog", "owl"]
    assert own("dog cat owl") == 2
    message = capsys.readouterr().err
    assert "begun with other class names: class 1: 'cat' -> 'dog', class 2: 'dog' -> 'cat'" in message
    rewrite(tmp_path / "runs/run", classes=None)  # as an older version left it
    assert own("cat hound owl") == 2
    assert "class 2: 'dog' -> 'hound'" in capsys.readouterr().err


def test_a_network_is_not_taken_for_one_of_other_classes(own, tmp_path, capsys):
    assert own("cat dog owl", "train.last_step=0", name="first") == 0
    one = tmp_path / "runs/first/step_0.pt"
    assert own("train truck owl", f"train.start_from={one}") == 2
    assert "class 1: 'cat' -> 'train'" in capsys.readouterr().err
    (tmp_path / "runs/run").mkdir(exist_ok=True)
    shutil.copy(one, tmp_path / "runs/run/step_0.pt")  # nor when it lies in the folder
    (tmp_path / "runs/run/results.json").unlink(missing_ok=True)
    assert own("train truck owl") == 2
    assert "class 1: 'cat' -> 'train'" in capsys.readouterr().err


def test_classes_of_old_results_are_known_by_their_metrics():
    results = {"protocol": [[2], [1]], "steps": [{"step": 1, "classes": ["background", "dog", "cat"]}]}
    assert recorded_classes(results) == {0: "background", 2: "dog", 1: "cat"}
    assert recorded_classes({}) == {}


def test_checkpoints_with_equal_content_are_equal(first):
    one = first() / "step_0.pt"
    state = checkpoint.load(one)
    assert state_digest(state) == state_digest(state | {"costs": {}, "config": "", "trained": {}})
    state["model"]["body.conv1.weight"] += 1e-3
    assert state_digest(state) != state_digest(checkpoint.load(one))
