"""A run stopped anywhere and started again ends with the same bits as one never stopped."""

import json
import zipfile

import pytest
import torch
from conftest import Killed, walk_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from engine import checkpoint
from engine.ranks import StoppedBySignal
from methods import Method


def stop_and_go(arguments: list[str], iterations: int) -> int:
    """Start the run again and again, each time for a few iterations only; returns the number of starts."""
    for start in range(1, 100):
        try:
            walk_until(arguments, iterations)
            return start
        except StoppedBySignal:
            continue
    raise AssertionError("the run never ended")


def assert_same_statistics(one: dict, other: dict) -> None:
    """What two step checkpoints hold of importance methods."""
    assert one.keys() == other.keys()
    for method, statistics in one.items():
        for statistic, value in statistics.items():
            found = other[method][statistic]
            if not isinstance(value, dict):
                value, found = {statistic: value}, {statistic: found}
            for name, one in value.items():
                assert torch.equal(one, found[name]) if isinstance(one, torch.Tensor) else one == found[name]


OPTIONS = {
    "mib-momentum-reset": ("method.name=mib", "phase.name=altersgd", "phase.p=0.5", "phase.momentum=reset"),
    "mib-momentum-off": (
        "method.name=mib",
        "phase.name=altersgd",
        "phase.p=0.25",
        "phase.momentum=off",
        "phase.batch=same",
    ),
    "lwf-mc": ("method.name=lwf_mc", "phase.name=consolidate", "phase.p=0.5", "phase.lr=hold"),
    "ewc-signed-decay": (
        "method.name=ewc",
        "phase.name=altersgd",
        "phase.p=0.5",
        "phase.weight_decay=signed",
    ),
    "pi": ("method.name=pi", "phase.name=altersgd", "phase.p=0.5", "phase.from_step=0"),
    "plop": ("method.name=plop", "method.strength=0.01", "phase.name=altersgd", "phase.p=0.5"),
    "star": ("method.name=star", "phase.name=altersgd", "phase.p=0.5"),
    "ssul-memory": ("method.name=ssul", "method.memory=4"),
    "dft": ("method.name=dft", "phase.name=altersgd", "phase.p=0.5"),
    "dkd-memory": ("method.name=dkd", "method.memory=4", "phase.name=altersgd", "phase.p=0.5"),
    "rw": ("method.name=rw", "method.options.every=2", "train.accumulate=2"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.slow
def test_stopping_every_few_iterations_changes_no_bit(options, toy_arguments, tmp_path):
    walk_until(toy_arguments(*options, name="whole"))
    assert stop_and_go(toy_arguments(*options, name="pieces"), 2) > 2
    for step in (0, 1):
        whole, pieces = (checkpoint.load(tmp_path / f"runs/{n}/step_{step}.pt") for n in ("whole", "pieces"))
        for name, tensor in whole["model"].items():
            assert torch.equal(tensor, pieces["model"][name]), name
        assert_same_statistics(whole["methods"], pieces["methods"])
    results = [
        json.loads((tmp_path / f"runs/{n}/results.json").read_text())["steps"] for n in ("whole", "pieces")
    ]
    assert [s["confusion"] for s in results[0]] == [s["confusion"] for s in results[1]]
    assert not list((tmp_path / "runs/pieces").glob("resume*"))


BY_EPOCH = ("phase.name=altersgd", "phase.flip=all", "phase.every=epoch", "phase.p=0.25")
PAUSE = ("phase.name=pause", "phase.p=0.25")
INSIDE = {
    "ascent-mib": ("method.name=mib", *BY_EPOCH),
    "ascent-ewc": ("method.name=ewc", *BY_EPOCH, "phase.batch=same", "phase.weight_decay=signed"),
    "pause-mib": ("method.name=mib", *PAUSE),
    "pause-ewc": ("method.name=ewc", *PAUSE),
}


@pytest.mark.parametrize("options", INSIDE.values(), ids=INSIDE)
@pytest.mark.slow
def test_a_run_stopped_inside_an_ascent_or_a_pause_goes_on_there(options, toy_arguments, toy_run, tmp_path):
    # Step 1 has epochs of two iterations: two descend, then two descend, two ascend and two descend, or six
    # are a pause.
    start = toy_run(options[0], "train.batch_size=2", "train.last_step=0", name="first") / "step_0.pt"
    options = (*options, "train.batch_size=2", f"train.start_from={start}")
    walk_until(toy_arguments(*options, name="whole"))
    with pytest.raises(StoppedBySignal, match="step 1, iteration 5 of 8"):
        walk_until(toy_arguments(*options, name="pieces"), 4)
    saved = checkpoint.load(tmp_path / "runs/pieces/resume.pt")
    assert saved["position"]["iteration"] == 5
    walk_until(toy_arguments(*options, name="pieces"))
    whole, pieces = (checkpoint.load(tmp_path / f"runs/{name}/step_1.pt") for name in ("whole", "pieces"))
    assert all(torch.equal(tensor, pieces["model"][name]) for name, tensor in whole["model"].items())
    assert_same_statistics(whole["methods"], pieces["methods"])
    # the rest of the half does something
    assert any(not torch.equal(t, saved["parts"]["model"][name]) for name, t in whole["model"].items())
    costs = [
        {key: w["costs"][key] for key in ("iterations", "gradient_evaluations")} for w in (whole, pieces)
    ]
    assert costs[0] == costs[1]


@pytest.mark.slow
def test_logs_of_a_resumed_run_have_no_doubled_points(toy_arguments, tmp_path):
    # Saved every third iteration, killed (not stopped) after the fourth: iterations 4 and 5 are run twice.
    arguments = toy_arguments("method.name=mib", "run.checkpoint_every=3", "train.epochs=4")
    with pytest.raises(Killed):
        walk_until(arguments, 4, kill=True)
    walk_until(arguments)
    events = EventAccumulator(str(tmp_path / "runs/run")).Reload()
    for tag in ("loss/seg", "lr", "phase/sign"):
        points = [event.step for event in events.Scalars(tag)]
        assert points == list(range(1, 8 + 4 + 1)), tag


@pytest.mark.slow
def test_a_damaged_resume_file_falls_back_to_the_one_before(toy_arguments, tmp_path, capsys):
    options = ("method.name=mib", "run.checkpoint_every=1", "train.epochs=4")
    walk_until(toy_arguments(*options, name="whole"))
    arguments = toy_arguments(*options, name="hurt")
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 4)
    newest = tmp_path / "runs/hurt/resume.pt"
    content = bytearray(newest.read_bytes())
    with zipfile.ZipFile(newest) as archive:  # between the records there is padding, which nothing reads
        largest = max(archive.infolist(), key=lambda record: record.file_size)
    content[largest.header_offset + largest.file_size] ^= 0x40  # in its last bytes: a header comes first
    newest.write_bytes(content)
    walk_until(arguments)
    assert "does not match its checksum" in capsys.readouterr().out
    whole, hurt = (checkpoint.load(tmp_path / f"runs/{n}/step_1.pt")["model"] for n in ("whole", "hurt"))
    assert all(torch.equal(whole[name], hurt[name]) for name in whole)


def test_a_non_finite_loss_stops_with_its_terms_and_images(toy_arguments, tmp_path, monkeypatch, capsys):
    original = Method.segmentation_loss
    calls = []

    def poisoned(self, logits, labels):
        calls.append(1)
        return original(self, logits, labels) * (float("nan") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(Method, "segmentation_loss", poisoned)
    assert train.main(toy_arguments("run.checkpoint_every=2", "train.epochs=4", "run.log_every=4")) == 2
    message = capsys.readouterr().err
    assert "not finite at iteration 6" in message and "seg = nan" in message and "train_aug_00" in message
    state = checkpoint.load(tmp_path / "runs/run/resume.pt")
    assert state["position"]["iteration"] == 4
    assert all(t.isfinite().all() for t in state["parts"]["model"].values())
