"""run.flatness: loss, gradient norm and curvature inside a training, which must not notice."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import walk_until
from processes import free_port, run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_distributed import train_rank
from test_resume import stop_and_go
from torch import Tensor

import train
from data import load_dataset
from data.dataset import Sample
from data.incremental import train_table
from data.loaders import StepDataset
from data.protocols import Step
from data.transforms import normalise, test_transform
from engine import checkpoint
from engine.arguments import read_config
from engine.probe import flatness_of, places_of
from methods import METHODS, make_phase
from methods.losses import plain as losses
from metrics import flatness
from models.segmenter import Segmenter
from scripts import flatness as script
from study.collection import RecordedRun
from tracking.shown import layout

IMAGES = 3
NAMES = ("loss", "squared_gradient_norm", "top_eigenvalue")
METRICS = {prefix + name for prefix in ("", "objective_", "old_") for name in NAMES}
OPTIONS = (
    *("method.name=mib", "phase.name=altersgd", "phase.p=0.5", "phase.flip=all", f"run.flatness={IMAGES}"),
    *(
        "phase.lambda_a=7",
        "phase.lambda_b=3",
        "data.unseen=background",
    ),  # of which only lambda_a matters here
)
ITERATIONS = {0: 4, 1: 4}  # of the toy's steps
OLD_TEST = (0, 3, 4)  # spread over the test images with class 1 or 2, which are 0, 2, 3 and 4


@pytest.fixture
def rough(monkeypatch):
    """Eigenvalues of a few products with the Hessian instead of 21, for tests of when they are measured."""
    eigsh = flatness.eigsh
    monkeypatch.setattr(
        flatness, "eigsh", lambda *a, **options: eigsh(*a, **options | {"ncv": 4, "tol": 0.5})
    )


def steps_of(run: Path) -> list[dict]:
    return json.loads((run / "results.json").read_text())["steps"]


def weights_of(run: Path, step: int = 1) -> dict[str, Tensor]:
    return checkpoint.load(run / f"step_{step}.pt")["model"]


def model_of(run: Path, step: int = 1) -> Segmenter:
    return checkpoint.load_segmenter(run / f"step_{step}.pt", norm="abn")[0].eval()


def read(samples: Sequence[Sample], table: np.ndarray) -> tuple[Tensor, Tensor]:
    data = StepDataset(samples, table, test_transform(32))
    images, labels = zip(*(data[0, i] for i in range(len(data))), strict=True)
    return normalise(torch.stack(images), torch.get_default_dtype()), torch.stack(labels).long()


def training_images(root: Path) -> tuple[Tensor, Tensor]:
    """Of step 1 those that come first: with class 3 and no later one."""
    samples = load_dataset("voc", root).train[8 : 8 + IMAGES]
    return read(samples, train_table(Step(1, (1, 2), (3,)), "disjoint", "background"))


def assert_measured(metrics: dict, prefix: str, model: Segmenter, loss: Callable[[], Tensor]) -> None:
    """The metrics with this prefix are those of the loss at the saved model."""
    parameters = list(model.parameters())
    norm, _ = flatness.gradient_norms(lambda _: loss(), [None], parameters)
    top = flatness.top_eigenvalues(lambda _: loss(), [None], parameters, 1)
    assert metrics[f"{prefix}loss"] == pytest.approx(loss().item(), rel=1e-4)
    assert metrics[f"{prefix}squared_gradient_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics[f"{prefix}top_eigenvalue"] == pytest.approx(top[0], rel=0.02)


def test_metrics_at_the_boundary_and_the_end(toy_run):
    run = toy_run(*OPTIONS)
    first, last = steps_of(run)
    assert "flatness" not in first  # step 0 has no phase to look for
    found = last["flatness"]
    assert list(found) == ["boundary", "end"] and all(set(metrics) == METRICS for metrics in found.values())
    assert all(found["boundary"][name] != found["end"][name] for name in METRICS)
    assert checkpoint.load(run / "step_1.pt")["costs"]["flatness"] == found
    events = EventAccumulator(str(run)).Reload()
    for name in METRICS:
        points = {event.step: event.value for event in events.Scalars(f"flatness/{name}")}
        boundary, end = ITERATIONS[0] + 2, ITERATIONS[0] + 4
        assert points == {
            boundary: pytest.approx(found["boundary"][name]),
            end: pytest.approx(found["end"][name]),
        }
    tags = [tag for charts in layout([], []).values() for _, tags in charts.values() for tag in tags]
    assert {f"flatness/{name}$" for name in METRICS} == {tag for tag in tags if tag.startswith("flatness/")}
    summary = RecordedRun(run, json.loads((run / "results.json").read_text()), "run")
    change = found["end"]["top_eigenvalue"] / found["boundary"]["top_eigenvalue"]
    assert summary.change_at_the_end("top_eigenvalue") == pytest.approx(change)


@pytest.mark.parametrize("prefix", ["", "objective_"])
def test_metrics_of_training_images(prefix, toy_run, toy_voc):
    run = toy_run(*OPTIONS)
    model, teacher = model_of(run), model_of(run, step=0)
    images, labels = training_images(toy_voc)
    keep = 7 if prefix else 0  # phase.lambda_a, whatever ascents and method.strength say

    def loss() -> Tensor:
        logits = model(images).logits
        with torch.no_grad():
            old_logits = teacher(images).logits
        segmentation = losses.unbiased_cross_entropy(logits, labels, num_old=3)
        return segmentation + keep * losses.unbiased_distillation(logits, old_logits)

    assert_measured(steps_of(run)[1]["flatness"]["end"], prefix, model, loss)


def test_metrics_of_old_test_images(toy_run, toy_voc):
    run = toy_run(*OPTIONS)
    model, test = model_of(run), load_dataset("voc", toy_voc).test
    images, masks = read([test[i] for i in OLD_TEST], np.arange(256, dtype=np.uint8))
    counted = masks <= 2  # background and the classes 1 and 2; not 3, which is new, and not void
    assert (masks == 3).any() and (masks == 255).any()

    def loss() -> Tensor:
        log_p = model(images).logits.log_softmax(dim=1)
        assert log_p.shape[1] == 4  # the new class competes
        return -log_p.gather(1, masks.clamp(max=2).unsqueeze(1)).squeeze(1)[counted].mean()

    assert_measured(steps_of(run)[1]["flatness"]["end"], "old_", model, loss)


@pytest.mark.slow
def test_objective_of_ewc_has_its_penalty(toy_run, toy_voc):
    run = toy_run(*OPTIONS, "method.name=ewc")
    model, before = model_of(run), checkpoint.load(run / "step_0.pt")
    omega = before["methods"]["ewc"]["omega"]
    images, labels = training_images(toy_voc)

    def loss() -> Tensor:
        now = dict(model.named_parameters())
        penalty = sum((omega[name] * (now[name] - before["model"][name]).square()).sum() for name in omega)
        return losses.cross_entropy(model(images).logits, labels) + 7 * penalty

    metrics = steps_of(run)[1]["flatness"]["end"]
    assert_measured(metrics, "objective_", model, loss)
    assert metrics["objective_loss"] > metrics["loss"]  # the penalty is not always zero


@pytest.mark.slow
def test_without_a_retention_term_there_is_no_objective(rough, toy_arguments, tmp_path):
    assert train.main(toy_arguments(*OPTIONS, "method.name=ft")) == 0
    for metrics in steps_of(tmp_path / "runs/run")[1]["flatness"].values():
        assert set(metrics) == {*NAMES, *(f"old_{name}" for name in NAMES)}


@pytest.mark.parametrize(
    ("options", "places"),
    {
        "p=0.5": {6: "boundary", 12: "end"},
        "p=1": {12: "end"},
        "p=0 name=descent": {0: "boundary", 12: "end"},  # there is no iteration 0
        "p=0.25 every=epoch": {3: "boundary", 6: "half 1", 9: "half 2", 12: "end"},
        "p=0.25 every=5": {3: "boundary", 8: "half 1", 12: "end"},
        "p=0.25 every=9": {3: "boundary", 12: "end"},
        "p=0.25 every=4 name=consolidate": {3: "boundary", 7: "half 1", 11: "half 2", 12: "end"},
        "p=0.25 every=5 name=pause": {3: "boundary", 8: "half 1", 12: "end"},
        "p=0.25 every=5 name=descent": {3: "boundary", 8: "half 1", 12: "end"},
        "p=0.25 every=2 name=stop": {3: "end"},
    }.items(),
)
def test_places(options, places, toy_arguments):
    options = ("phase.name=altersgd", *(f"phase.{option}" for option in options.split()))
    config = read_config(toy_arguments(*options, "run.flatness=1"))
    phase = make_phase(step=1, strength=1.0, epoch=3, **config.phase.model_dump())
    length = {"epoch": 3, "total": 12, "last": phase.last_iteration(12)}
    assert places_of(config, Step(1, (1,), (2,)), **length) == places
    assert places_of(config, Step(0, (), (1,)), **length) == {}
    config = read_config(toy_arguments(*options, "run.flatness=0"))
    assert places_of(config, Step(1, (1,), (2,)), **length) == {}


@pytest.mark.slow
def test_every_place_sees_the_model_as_it_stands_there(rough, toy_arguments, tmp_path):
    """The first half descends, so up to iteration 4 of 8 all of these are one training."""
    found = {}
    for name, phase in {
        "halves": ("phase.name=altersgd", "phase.p=0.25", "phase.every=epoch"),
        "pause": ("phase.name=pause", "phase.p=0.5", "phase.every=3"),
        "stop": ("phase.name=stop", "phase.p=0.5", "phase.every=2"),
    }.items():
        options = (
            "method.name=ft",
            "phase.flip=seg",
            "train.batch_size=2",
            *phase,
        )  # epochs of two iterations
        assert train.main(toy_arguments(*OPTIONS, *options, name=name)) == 0
        found[name] = steps_of(tmp_path / "runs" / name)[1]["flatness"]
    halves, pause, stop = found.values()
    assert list(halves) == ["boundary", "half 1", "half 2", "end"]
    assert list(pause) == ["boundary", "half 1", "end"] and list(stop) == ["end"]
    assert halves["half 1"] == pause["boundary"] == stop["end"]
    assert len({metrics["loss"] for metrics in halves.values()}) == 4
    assert pause["half 1"]["loss"] != pause["end"]["loss"]  # the statistics of the norms move


def freezing(method: str, parts: tuple[str, ...], monkeypatch) -> None:
    """Let a method train all but these parts of the network after step 0."""
    cls = METHODS[method]
    begin = cls.begin_step

    def begin_step(self, model: Segmenter, step: Step) -> None:
        begin(self, model, step)
        for part in parts if step.index else ():
            model.get_submodule(part).requires_grad_(False)

    monkeypatch.setattr(cls, "begin_step", begin_step)


@pytest.mark.slow
def test_a_method_that_freezes_the_backbone_is_measured_by_the_rest(
    toy_arguments, toy_run, toy_voc, tmp_path, monkeypatch, capsys
):
    start = toy_run("method.name=ft", name="first") / "step_0.pt"
    freezing("ft", ("body", "classifiers.0"), monkeypatch)
    options = (f"run.flatness={IMAGES}", "phase.p=1", f"train.start_from={start}")
    assert train.main(toy_arguments("method.name=ft", *options, name="rest")) == 0
    run = tmp_path / "runs/rest"
    model = model_of(run)
    images, labels = training_images(toy_voc)
    parameters = [*model.head.parameters(), *model.classifiers[1].parameters()]
    found = steps_of(run)[1]["flatness"]["end"]
    norm, _ = flatness.gradient_norms(
        lambda _: losses.cross_entropy(model(images).logits, labels), [None], parameters
    )
    assert found["squared_gradient_norm"] == pytest.approx(norm, rel=1e-3)
    assert all(value > 0 for value in found.values())

    # The same at the finished model, whose step began with classes that the checkpoint before it does not
    # have.
    quick = ("--pictures", "2", "--batch", "2", "--top", "0", "--probes", "0", "--on", "old")
    assert script.main([str(run), *quick]) == 0
    assert f"{sum(p.numel() for p in parameters):,} parameters" in capsys.readouterr().out


def test_a_method_that_freezes_everything_is_refused_in_words(toy_arguments, toy_run, monkeypatch, capsys):
    first = toy_run("method.name=ft", name="first")
    freezing("ft", ("",), monkeypatch)
    start = f"train.start_from={first / 'step_0.pt'}"
    assert train.main(toy_arguments("method.name=ft", start, name="rest")) == 2
    assert (
        "error: method 'ft': its begin_step leaves no parameter to train in step 1" in capsys.readouterr().err
    )
    assert script.main([str(first)]) == 2
    assert "ft trains no parameter in step 1 (none requires a gradient)" in capsys.readouterr().err


def test_a_single_parameter_has_a_curvature():
    weight = torch.tensor([2.0], requires_grad=True)
    assert flatness_of(lambda: weight.square().sum(), [weight])["top_eigenvalue"] == pytest.approx(2.0)


def test_what_cannot_be_measured_ends_no_run():
    weights = torch.ones(30, requires_grad=True)
    assert flatness_of(lambda: (weights * math.inf).sum(), [weights]) == dict.fromkeys(NAMES)
    flat = flatness_of(lambda: weights.sum(), [weights])
    assert flat == {"loss": 30.0, "squared_gradient_norm": pytest.approx(30.0), "top_eigenvalue": None}


CASES = {
    "fused": ("method.name=mib",),
    "plain": ("method.name=mib", "train.losses=plain", "train.channels_last=false"),
    "lean norm, dropout, sam": (
        "method.name=mib",
        "model.norm=abn_lean",
        "model.dropout=0.3",
        "update.name=sam",
    ),
    "flip all, halves of two": (
        "method.name=mib",
        "model.dropout=0.3",
        "phase.flip=all",
        "phase.every=2",
        "phase.p=0.25",
    ),
    "ewc": ("method.name=ewc",),
    "plop": ("method.name=plop",),
    "cpr": ("method.name=ft", "method.entropy=0.1"),
    "iabn": ("method.name=mib", "model.norm=iabn"),
    "compiled": ("method.name=mib", "train.losses=compiled"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_training_does_not_notice(case, rough, toy_arguments, tmp_path):
    if case == "iabn":
        pytest.importorskip("inplace_abn")
    options = ("phase.name=altersgd", "phase.p=0.5", *CASES[case])
    for name, images in {"without": 0, "with": IMAGES}.items():
        assert train.main(toy_arguments(*options, f"run.flatness={images}", name=name)) == 0
    without, found = (weights_of(tmp_path / "runs" / name) for name in ("without", "with"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in without.items())
    metrics = steps_of(tmp_path / "runs/with")[1]["flatness"]
    assert list(metrics) == ["boundary", *(["half 1"] if "halves" in case else []), "end"]
    assert all(value > 0 for place in metrics.values() for value in place.values())


@pytest.mark.slow
def test_a_resumed_step_keeps_what_was_measured_before(rough, toy_arguments, tmp_path):
    walk_until(toy_arguments(*OPTIONS, name="whole"))
    assert stop_and_go(toy_arguments(*OPTIONS, name="pieces"), 0) > 4
    whole, pieces = (steps_of(tmp_path / "runs" / name)[1]["flatness"] for name in ("whole", "pieces"))
    assert whole == pieces


@pytest.mark.slow
def test_two_ranks_measure_what_one_process_does(toy_arguments, tmp_path):
    """With `valid` the ranks count pixels together: if one measured alone, the others would not answer."""
    options = ("method.name=ft", "phase.p=1", "method.cross_entropy=valid", "data.void=ignore")
    for world, name in ((1, "one"), (2, "two")):
        arguments = toy_arguments(*OPTIONS, *options, name=name)
        run_ranks(train_rank, (world, free_port(), arguments), world)
    one, two = (steps_of(tmp_path / "runs" / name)[1]["flatness"] for name in ("one", "two"))
    assert one == {place: pytest.approx(metrics, rel=1e-6) for place, metrics in two.items()}
