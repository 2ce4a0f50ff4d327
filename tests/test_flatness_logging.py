"""run.flatness: gradient norm and curvature inside a training, which must not notice."""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resume import NEVER, run_until, stop_and_go

import train
from data import load_dataset
from data.incremental import StepDataset, train_table
from data.protocols import Step
from data.transforms import normalise, test_transform
from methods import make_method
from metrics import flatness
from models import checkpoint

PICTURES, FIGURES = 3, ("squared_gradient_norm", "top_eigenvalue")
OPTIONS = ("method.name=mib", "phase.name=altersgd", "phase.p=0.5", f"run.flatness={PICTURES}")
ITERATIONS = {0: 4, 1: 4}  # of the toy's steps


def steps_of(run: Path) -> list[dict]:
    return json.loads((run / "results.json").read_text())["steps"]


def weights_of(run: Path, step: int = 1) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / f"step_{step}.pt")["model"]


def measured_by_hand(run: Path, root: Path, cross_entropy: str = "all") -> dict[str, float]:
    """From the saved model, on the pictures of step 1 that come first: those with class 3 and no later one."""
    model, _ = checkpoint.load_segmenter(run / "step_1.pt", norm="abn")
    model.eval()
    method, step = make_method("mib", cross_entropy), Step(1, (1, 2), (3,))
    method.begin_step(model, step)
    pictures = load_dataset("voc", root).train[8 : 8 + PICTURES]  # as the fixture toy_voc made them
    data = StepDataset(pictures, train_table(step, "disjoint", "background"), test_transform(32))
    images, labels = zip(*(data[0, i] for i in range(PICTURES)), strict=True)
    batch = normalise(torch.stack(images), torch.get_default_dtype()), torch.stack(labels).long()

    def loss(batch) -> torch.Tensor:
        return method.segmentation_loss(model(batch[0]).logits, batch[1])

    parameters = list(model.parameters())
    return {
        "squared_gradient_norm": flatness.gradient_norms(loss, [batch], parameters)[0],
        "top_eigenvalue": flatness.top_eigenvalues(loss, [batch], parameters, 1)[0],
    }


def test_figures_at_the_boundary_and_the_end(toy_arguments, toy_voc, tmp_path):
    assert train.main(toy_arguments(*OPTIONS)) == 0
    run = tmp_path / "runs/run"
    first, last = steps_of(run)
    assert "flatness" not in first  # step 0 has no phase to look for
    found = last["flatness"]
    assert list(found) == ["boundary", "end"] and found["boundary"] != found["end"]
    by_hand = measured_by_hand(run, toy_voc)
    assert found["end"]["squared_gradient_norm"] == pytest.approx(by_hand["squared_gradient_norm"], rel=1e-3)
    assert found["end"]["top_eigenvalue"] == pytest.approx(by_hand["top_eigenvalue"], rel=0.02)
    assert checkpoint.load(run / "step_1.pt")["costs"]["flatness"] == found
    events = EventAccumulator(str(run)).Reload()
    for name in FIGURES:
        points = {event.step: event.value for event in events.Scalars(f"flatness/{name}")}
        boundary, end = ITERATIONS[0] + 2, ITERATIONS[0] + 4
        assert points == {
            boundary: pytest.approx(found["boundary"][name]),
            end: pytest.approx(found["end"][name]),
        }


@pytest.mark.parametrize(("p", "places"), [("1", ["end"]), ("0", ["end"]), ("0.75", ["boundary", "end"])])
@pytest.mark.slow
def test_plain_training_is_measured_at_the_same_places(p, places, toy_arguments, tmp_path):
    options = ("method.name=mib", "phase.name=descent", f"phase.p={p}", "run.flatness=1")
    assert train.main(toy_arguments(*options)) == 0
    assert list(steps_of(tmp_path / "runs/run")[1]["flatness"]) == places


CASES = {
    "fused": ("method.name=mib",),
    "plain": ("method.name=mib", "train.losses=plain", "train.channels_last=false"),
    "lean norm, dropout, sam": (
        "method.name=mib",
        "model.norm=abn_lean",
        "model.dropout=0.3",
        "update.name=sam",
    ),
    "ewc": ("method.name=ewc",),
    "plop": ("method.name=plop",),
    "cpr": ("method.name=ft", "method.entropy=0.1"),
    "iabn": ("method.name=mib", "model.norm=iabn"),
    "compiled": ("method.name=mib", "train.losses=compiled"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_training_does_not_notice(case, toy_arguments, tmp_path):
    if case == "iabn":
        pytest.importorskip("inplace_abn")
    options = ("phase.name=altersgd", "phase.p=0.5", *CASES[case])
    for name, pictures in {"without": 0, "with": PICTURES}.items():
        assert train.main(toy_arguments(*options, f"run.flatness={pictures}", name=name)) == 0
    without, found = (weights_of(tmp_path / "runs" / name) for name in ("without", "with"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in without.items())
    figures = steps_of(tmp_path / "runs/with")[1]["flatness"]
    assert all(figures[place][name] > 0 for place in ("boundary", "end") for name in FIGURES)


@pytest.mark.slow
def test_a_resumed_step_keeps_what_was_measured_before(toy_arguments, tmp_path):
    run_until(toy_arguments(*OPTIONS, name="whole"), NEVER)
    assert stop_and_go(toy_arguments(*OPTIONS, name="pieces"), 1) > 4
    whole, pieces = (steps_of(tmp_path / "runs" / name)[1]["flatness"] for name in ("whole", "pieces"))
    assert whole == pieces
