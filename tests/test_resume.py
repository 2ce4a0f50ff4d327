"""A run stopped anywhere and started again ends with the same bits as one never stopped."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from models import checkpoint
from models.parallel import start_ranks


class StopAfter:
    """Asks the run to stop once it was asked `count` times."""

    def __init__(self, count: int):
        self.left = count

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0


NEVER = 10**9


def run_until(arguments: list[str], count: int) -> None:
    train.walk(train.read_config(arguments), start_ranks("cpu"), StopAfter(count))


def stop_and_go(arguments: list[str], count: int) -> int:
    """Start the run again and again, each time for a few iterations only; returns the number of starts."""
    for start in range(1, 100):
        try:
            run_until(arguments, count)
            return start
        except train.StoppedBySignal:
            continue
    raise AssertionError("the run never ended")


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
    "rw": ("method.name=rw", "method.options.every=2", "train.accumulate=2"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.slow
def test_stopping_every_few_iterations_changes_no_bit(options, toy_arguments, tmp_path):
    run_until(toy_arguments(*options, name="whole"), NEVER)
    assert stop_and_go(toy_arguments(*options, name="pieces"), 4) > 2
    for step in (0, 1):
        whole, pieces = (checkpoint.load(tmp_path / f"runs/{n}/step_{step}.pt") for n in ("whole", "pieces"))
        for name, tensor in whole["model"].items():
            assert torch.equal(tensor, pieces["model"][name]), name
        for method, statistics in whole["methods"].items():
            for statistic, tensors in statistics.items():
                for name, value in tensors.items():
                    other = pieces["methods"][method][statistic][name]
                    assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    results = [
        json.loads((tmp_path / f"runs/{n}/results.json").read_text())["steps"] for n in ("whole", "pieces")
    ]
    assert [s["confusion"] for s in results[0]] == [s["confusion"] for s in results[1]]
    assert not list((tmp_path / "runs/pieces").glob("resume*"))


@pytest.mark.slow
def test_logs_of_a_resumed_run_have_no_doubled_points(toy_arguments, tmp_path):
    # Saved every third iteration, killed (not stopped) after the fourth: iterations 4 and 5 are run twice.
    arguments = toy_arguments("method.name=mib", "run.checkpoint_every=3", "train.epochs=4")

    class Killed(Exception):
        pass

    class KillAfter(StopAfter):
        @property
        def requested(self) -> bool:
            if StopAfter.requested.fget(self):
                raise Killed
            return False

    with pytest.raises(Killed):
        train.walk(train.read_config(arguments), start_ranks("cpu"), KillAfter(8))
    run_until(arguments, NEVER)
    events = EventAccumulator(str(tmp_path / "runs/run")).Reload()
    for tag in ("loss/seg", "lr", "phase/sign"):
        points = [event.step for event in events.Scalars(tag)]
        assert points == list(range(1, 8 + 4 + 1)), tag


@pytest.mark.slow
def test_a_damaged_resume_file_falls_back_to_the_one_before(toy_arguments, tmp_path, capsys):
    options = ("method.name=mib", "run.checkpoint_every=1", "train.epochs=4")
    run_until(toy_arguments(*options, name="whole"), NEVER)
    arguments = toy_arguments(*options, name="hurt")
    with pytest.raises(train.StoppedBySignal):
        run_until(arguments, 9)
    newest = tmp_path / "runs/hurt/resume.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 0x40
    newest.write_bytes(content)
    run_until(arguments, NEVER)
    assert "does not match its checksum" in capsys.readouterr().out
    whole, hurt = (checkpoint.load(tmp_path / f"runs/{n}/step_1.pt")["model"] for n in ("whole", "hurt"))
    assert all(torch.equal(whole[name], hurt[name]) for name in whole)


def test_a_non_finite_loss_stops_with_its_terms_and_pictures(toy_arguments, tmp_path, monkeypatch, capsys):
    original = train.Method.segmentation_loss
    calls = []

    def poisoned(self, logits, labels):
        calls.append(1)
        return original(self, logits, labels) * (float("nan") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(train.Method, "segmentation_loss", poisoned)
    assert train.main(toy_arguments("run.checkpoint_every=2", "train.epochs=4", "run.log_every=4")) == 2
    message = capsys.readouterr().err
    assert "not finite at iteration 6" in message and "seg = nan" in message and "train_aug_00" in message
    state = checkpoint.load(tmp_path / "runs/run/resume.pt")
    assert state["position"]["iteration"] == 4
    assert all(t.isfinite().all() for t in state["parts"]["model"].values())
