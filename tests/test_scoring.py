"""train.evaluate_only: scores in another setting stand beside what training recorded, and never among it."""

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from configs.schema import load_config
from data.protocols import steps_from_lists
from engine.results import summarise
from engine.scores import evaluation_name, put

FLIP = ("data.evaluate_flip=true", "data.evaluate_scales=[0.75, 1.0, 1.25]")
NAME = "flip_scales=0.75-1-1.25"


@pytest.fixture
def score(toy_run, toy_arguments):
    """A finished run, and a function that scores it: `score("data.evaluate_flip=true")`
    returns its results.json.
    """
    folder = toy_run("method.name=mib")

    def call(*overrides: str, code: int = 0) -> dict:
        assert train.main(toy_arguments("method.name=mib", "train.evaluate_only=true", *overrides)) == code
        return read(folder)

    call.folder = folder
    return call


def read(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_scores_in_another_setting_leave_those_of_training_as_they_are(score, toy_arguments, capsys):
    before, config = read(score.folder), (score.folder / "config.yaml").read_bytes()
    after = score("train.first_step=1", *FLIP)
    other = after.pop("evaluations")
    assert after == before and (score.folder / "config.yaml").read_bytes() == config
    assert list(other) == [NAME] and [entry["step"] for entry in other[NAME]["steps"]] == [1]
    assert other[NAME]["settings"] == {
        "data.evaluate": "full",
        "data.evaluate_size": 512,
        "data.evaluate_scales": [0.75, 1.0, 1.25],
        "data.evaluate_flip": True,
        "data.unseen": "ignore",
    }
    assert other[NAME]["steps"][0]["iou"] != before["steps"][1]["iou"]
    assert f"scored as {NAME}" in capsys.readouterr().out
    assert train.main(toy_arguments("method.name=mib")) == 0  # the training command continues as before
    assert "nothing was trained" in capsys.readouterr().out
    assert read(score.folder) == before | {"evaluations": other}


def test_forgetting_is_never_measured_across_two_settings(score):
    (alone,) = score("train.first_step=1", *FLIP)["evaluations"][NAME]["steps"]
    assert alone["forgetting"] == {} and alone["mean_forgetting"] is None
    assert alone["backward_transfer"] is None and alone["average"]["miou"] is None
    first, last = score("train.last_step=0", *FLIP)["evaluations"][NAME]["steps"]
    assert (first["step"], last["step"]) == (0, 1) and last["iou"] == alone["iou"]
    lost = {name: first["iou"][name] - last["iou"][name] for name in first["iou"]}
    assert last["forgetting"] == pytest.approx(lost)
    assert last["average"]["miou"] == pytest.approx((first["miou"]["all"] + last["miou"]["all"]) / 2)


def test_scoring_again_in_the_runs_own_setting_says_that_nothing_changed(score, capsys):
    before = (score.folder / "results.json").read_bytes()
    score()
    out = capsys.readouterr().out
    assert all(f"step {step}: scored again, the same metrics as recorded" in out for step in (0, 1))
    assert (score.folder / "results.json").read_bytes() == before


def test_other_metrics_in_the_same_setting_are_said_and_replace_nothing(score, capsys):
    shutil.copy(score.folder / "results.json", score.folder / "kept.json")
    changed = read(score.folder)
    true = changed["steps"][1]["iou"]["bird"]
    changed["steps"][1]["iou"]["bird"] = 0.5
    (score.folder / "results.json").write_text(json.dumps(changed))
    assert score() == changed
    said = capsys.readouterr().out
    assert "warning: step 1: scored again, other metrics than recorded" in said and "recorded stay" in said
    replaced = score("run.force=true")
    assert replaced["steps"][1]["iou"]["bird"] == true
    assert "they are replaced (run.force)" in capsys.readouterr().out
    assert replaced == json.loads((score.folder / "kept.json").read_text())


def test_scores_that_are_missing_are_made_in_the_runs_own_setting(score):
    before = read(score.folder)
    (score.folder / "results.json").unlink()
    other = score("train.first_step=1", *FLIP)
    assert other["steps"] == [] and other["config"]["data"]["evaluate_flip"] is False
    assert [entry["step"] for entry in other["evaluations"][NAME]["steps"]] == [1]
    again = score("train.first_step=1")  # step 0 has none either
    assert again["steps"] == before["steps"]


@pytest.mark.slow
def test_a_step_that_is_trained_anew_loses_its_scores_in_other_settings(score, toy_arguments, capsys):
    score(*FLIP)
    (score.folder / "step_1.pt").unlink()
    assert train.main(toy_arguments("method.name=mib")) == 0
    assert f"its scores as {NAME} are dropped" in capsys.readouterr().out
    assert [entry["step"] for entry in read(score.folder)["evaluations"][NAME]["steps"]] == [0]


@pytest.mark.slow
def test_tensorboard_shows_another_setting_as_a_run_of_its_own(score):
    own = curve(score.folder, "by_step/miou/all")
    results = score(*FLIP)
    other = curve(score.folder / "evaluations" / NAME, "by_step/miou/all")
    assert [value for _, value in own] == pytest.approx([r["miou"]["all"] for r in results["steps"]])
    scores = results["evaluations"][NAME]["steps"]
    assert other == [(r["step"], pytest.approx(r["miou"]["all"])) for r in scores]
    assert curve(score.folder, "by_step/miou/all") == own


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(entry.step, entry.value) for entry in events.Scalars(tag)]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ((), None),
        (("data.evaluate_flip=true", "data.evaluate=full"), "full_flip"),
        (("data.evaluate=slide", "data.evaluate_size=256"), "slide_size=256"),
        (("data.unseen=background",), "unseen=background"),
        (("train.evaluate_batch=2", "train.evaluate_only=true"), None),
    ],
)
def test_a_settings_name_says_what_differs(overrides, name):
    own, asked = (
        load_config([], ["data.root=x", "data.protocol=15-1", *more]).model_dump(mode="json")
        for more in ((), overrides)
    )
    del own["data"]["evaluate_flip"]  # recorded before the key existed
    assert evaluation_name({"config": own}, asked) == name


def test_two_settings_never_share_a_name():
    own = load_config([], ["data.root=x", "data.protocol=15-1", "data.evaluate=full"]).model_dump(mode="json")
    asked = load_config([], ["data.root=x", "data.protocol=15-1", "data.evaluate=full", FLIP[0]])
    kept = {"flip": {"settings": {"data.evaluate": "slide"}, "steps": []}}
    results = {"config": own, "evaluations": kept}
    assert (
        evaluation_name(results, asked.model_dump(mode="json")) == "full_flip_scales=1_size=512_unseen=ignore"
    )


def test_scores_are_kept_in_the_order_of_steps():
    steps, names = steps_from_lists([[1], [2], [3]]), ["background", "a", "b", "c"]
    scores: list[dict] = []
    for index in (2, 0, 1):
        iou = dict.fromkeys(names[: index + 2], 0.5 - 0.1 * index)
        put(scores, {"step": index, "iou": iou}, steps, names)
    assert [score["step"] for score in scores] == [0, 1, 2]
    assert scores[2]["forgetting"]["a"] == pytest.approx(0.2)
    assert summarise(scores[2], scores[:1], steps, names)["mean_forgetting"] is None
