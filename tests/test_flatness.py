"""metrics.flatness and metrics.landscape against closed forms and dense Hessians, and scripts.flatness on a
toy run."""

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call

from configs.schema import load_config
from data import load_dataset
from engine import checkpoint, curvature
from engine.curvature_data import Batches, CurvatureBatch, Options, Subject, read_subject
from engine.run_folder import RunFolder
from methods import Weights
from metrics import flatness, landscape
from models.norm import ABN
from scripts import flatness as script

# Closed forms -----------------------------------------------------------------------------------------------


def quadratic(matrix: Tensor, seed: int = 0):
    """0.5 x^T A x, with x cut into two tensors; a batch b multiplies the loss."""
    generator = torch.Generator().manual_seed(seed)
    size = len(matrix)
    x = torch.randn(size, generator=generator, dtype=matrix.dtype)
    parameters = [x[:2].clone().view(2, 1).requires_grad_(), x[2:].clone().requires_grad_()]

    def loss(batch: float) -> Tensor:
        point = torch.cat([p.flatten() for p in parameters])
        return batch * 0.5 * point @ matrix @ point

    return loss, parameters, x


def symmetric(size: int, seed: int = 0) -> Tensor:
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a + a.T


BATCHES = [0.5, 1.5]  # of mean one


def test_a_quadratic():
    matrix = symmetric(30)
    loss, parameters, x = quadratic(matrix)
    gradient = matrix @ x
    whole, single = flatness.gradient_norms(loss, BATCHES, parameters)
    assert flatness.mean_loss(loss, BATCHES).item() == pytest.approx((0.5 * x @ matrix @ x).item())
    assert whole == pytest.approx(gradient.square().sum().item())
    assert single == pytest.approx(gradient.square().sum().item() * (0.5**2 + 1.5**2) / 2)
    vector = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(flatness.hessian_product(loss, BATCHES, parameters, vector), matrix @ vector)
    expected = torch.linalg.eigvalsh(matrix).flip(0)[:4].tolist()
    assert flatness.top_eigenvalues(loss, BATCHES, parameters, 4) == pytest.approx(expected, rel=1e-5)
    mean, error = flatness.hessian_trace(loss, BATCHES, parameters, 60)
    assert error > 0 and abs(mean - matrix.trace().item()) < 3 * error


def test_random_signs_see_the_trace_of_a_diagonal_exactly():
    diagonal = torch.linspace(-1, 7, 12, dtype=torch.float64)
    loss, parameters, _ = quadratic(diagonal.diag())
    mean, error = flatness.hessian_trace(loss, BATCHES, parameters, 3)
    assert mean == pytest.approx(diagonal.sum().item(), abs=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


def test_products_on_one_batch_share_its_gradient():
    matrix, seen = symmetric(30), []
    loss, parameters, _ = quadratic(matrix)

    def watched(batch):
        seen.append(batch)
        return loss(batch)

    flatness.hessian_trace(watched, BATCHES, parameters, 7)
    assert seen == BATCHES
    seen.clear()
    alone = flatness.top_eigenvalues(watched, [1.0], parameters, 2)
    assert seen == [1.0] and alone == pytest.approx(flatness.top_eigenvalues(loss, BATCHES, parameters, 2))


def test_all_eigenvalues_but_the_last_may_be_asked_for():
    matrix = symmetric(6)
    loss, parameters, _ = quadratic(matrix)
    found = flatness.top_eigenvalues(loss, BATCHES, parameters, 99)
    assert found == pytest.approx(torch.linalg.eigvalsh(matrix).flip(0)[:5].tolist(), rel=1e-5)


def test_a_linear_loss_has_no_curvature():
    parameters = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    product = flatness.hessian_product(lambda b: b * parameters[0].sum(), BATCHES, parameters, torch.ones(5))
    assert torch.equal(product, torch.zeros(5))


def test_sharpness_of_a_diagonal_quadratic():
    # The worst corner of the box is the one away from the origin.
    diagonal = torch.linspace(0.5, 7, 12, dtype=torch.float64)
    loss, parameters, x = quadratic(diagonal.diag())
    epsilon = 0.01
    corner = x + epsilon * (x.abs() + 1) * x.sign()
    low, high = (0.5 * (diagonal * point**2).sum().item() for point in (x, corner))
    before = [p.detach().clone() for p in parameters]
    assert flatness.sharpness(loss, BATCHES, parameters, epsilon) == pytest.approx(
        100 * (high - low) / (1 + low)
    )
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


def test_sharpness_at_a_maximum_is_zero():
    parameters = [torch.tensor([1e-4, -1e-4], dtype=torch.float64, requires_grad=True)]
    assert (
        flatness.sharpness(lambda b: -b * parameters[0].square().sum(), BATCHES, parameters, 1.0, steps=1)
        == 0
    )


def logistic(num: int = 64, size: int = 12):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num, size, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (num,), generator=generator).double()
    w = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    def loss(rows: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(x[rows] @ w, y[rows])

    p = (x @ w.detach()).sigmoid()
    hessian = x.T @ torch.diag(p * (1 - p)) @ x / num
    gradient = x.T @ (p - y) / num
    return loss, w, hessian, gradient, torch.arange(num)


def test_logistic_regression():
    loss, w, hessian, gradient, rows = logistic()
    batches = rows.split(16)
    eigenvalues = torch.linalg.eigvalsh(hessian).flip(0)
    assert flatness.top_eigenvalues(loss, batches, [w], 3) == pytest.approx(
        eigenvalues[:3].tolist(), rel=1e-4
    )
    mean, error = flatness.hessian_trace(loss, batches, [w], 40)
    assert abs(mean - hessian.trace().item()) < 3 * error
    assert flatness.gradient_norms(loss, batches, [w])[0] == pytest.approx(gradient.square().sum().item())


def test_the_size_of_the_batches_is_no_matter():
    loss, w, _, _, rows = logistic()
    metrics = []
    for size in (64, 16, 4):
        batches = rows.split(size)
        metrics.append(
            [
                flatness.mean_loss(loss, batches).item(),
                flatness.gradient_norms(loss, batches, [w])[0],
                *flatness.top_eigenvalues(loss, batches, [w], 2),
                *flatness.hessian_trace(loss, batches, [w], 4),
                flatness.sharpness(loss, batches, [w]),
            ]
        )
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-9)
    assert metrics[2] == pytest.approx(metrics[0], rel=1e-9)


# A network with ABN -----------------------------------------------------------------------------------------


class TinyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = ABN(3)
        self.classifier = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.conv(x)))


@pytest.fixture
def tiny():
    """The net, its loss and two batches of images and labels, in double precision."""
    torch.manual_seed(2)
    net = TinyNet().double()
    with torch.no_grad():
        net.norm.weight.copy_(torch.tensor([-0.7, 1.1, 0.4]))
        net.norm.running_mean.normal_(0, 0.3)
        net.norm.running_var.uniform_(0.5, 2)
    batches = [(torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.randint(2, (3, 4, 4))) for _ in range(2)]

    def loss(batch) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    return net, loss, batches


def dense_hessian(net: TinyNet, batches) -> Tensor:
    names, parameters = zip(*net.named_parameters(), strict=True)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}

    def mean(vector: Tensor) -> Tensor:
        values = dict(zip(names, flatness.split_like(vector, parameters), strict=True))
        state = values | {name: buffer.clone() for name, buffer in buffers.items()}
        losses = [nn.functional.cross_entropy(functional_call(net, state, (x,)), y) for x, y in batches]
        return sum(losses) / len(losses)

    return torch.autograd.functional.hessian(mean, flatness.flatten(parameters))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_curvature_equals_that_of_a_dense_hessian(mode, tiny):
    net, loss, batches = tiny
    parameters = list(net.parameters())
    with flatness.norm_mode(net, mode):
        dense = dense_hessian(net, batches)
        vector = torch.randn(len(dense), dtype=torch.float64)
        product = flatness.hessian_product(loss, batches, parameters, vector)
        top = flatness.top_eigenvalues(loss, batches, parameters, 3)
        mean, error = flatness.hessian_trace(loss, batches, parameters, 60)
    assert torch.allclose(product, dense @ vector, rtol=1e-9, atol=1e-12)
    assert top == pytest.approx(torch.linalg.eigvalsh(dense).flip(0)[:3].tolist(), rel=1e-4)
    assert abs(mean - dense.trace().item()) < 3 * error


def test_the_norm_modes_differ(tiny):
    net, loss, batches = tiny
    losses = {}
    for mode in ("eval", "train"):
        with flatness.norm_mode(net, mode):
            assert net.training == (mode == "train")
            losses[mode] = flatness.mean_loss(loss, batches).item()
    assert losses["eval"] != losses["train"]
    with pytest.raises(ValueError, match="'eval' or 'train'"), flatness.norm_mode(net, "batch"):
        pass


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_measuring_leaves_the_model_as_it_was(mode, tiny):
    net, loss, batches = tiny
    net.train()
    parameters = list(net.parameters())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with flatness.norm_mode(net, mode):
        flatness.gradient_norms(loss, batches, parameters)
        flatness.top_eigenvalues(loss, batches, parameters, 1)
        flatness.hessian_trace(loss, batches, parameters, 2)
        flatness.sharpness(loss, batches, parameters)
        direction = landscape.filter_normalised_direction(parameters)
        landscape.loss_around(loss, batches, parameters, [direction], [(0.3,), (-0.2,)])
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in parameters)


def test_an_interrupted_measurement_leaves_the_model_as_it_was(tiny):
    net, loss, batches = tiny
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def fails_once_moved(batch) -> Tensor:
        if not torch.equal(net.conv.weight, before["conv.weight"]):
            raise KeyboardInterrupt
        return loss(batch)

    with pytest.raises(KeyboardInterrupt), flatness.norm_mode(net, "train"):
        flatness.sharpness(fails_once_moved, batches, list(net.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


# Landscape --------------------------------------------------------------------------------------------------


def test_filters_of_a_direction_are_as_long_as_those_of_the_weights(tiny):
    parameters = dict(tiny[0].named_parameters())
    direction = dict(
        zip(parameters, landscape.filter_normalised_direction(list(parameters.values()), 3), strict=True)
    )
    for name in ("conv.weight", "classifier.weight"):
        lengths = [t.detach().flatten(1).norm(dim=1) for t in (direction[name], parameters[name])]
        assert torch.allclose(*lengths) and not torch.allclose(direction[name], parameters[name])
    for name in ("norm.weight", "norm.bias", "classifier.bias"):
        assert not direction[name].any()
    again = landscape.filter_normalised_direction(list(parameters.values()), 3)
    other = landscape.filter_normalised_direction(list(parameters.values()), 4)
    assert torch.equal(again[0], direction["conv.weight"])
    assert not torch.equal(other[0], direction["conv.weight"])


def test_a_filter_of_zeros_does_not_move():
    direction = landscape.filter_normalised_direction([torch.zeros(2, 3)])
    assert torch.equal(direction[0], torch.zeros(2, 3))


def test_the_loss_around_a_quadratic():
    matrix = symmetric(8)
    loss, parameters, x = quadratic(matrix)
    first, second = (flatness.split_like(symmetric(8, s)[0], parameters) for s in (1, 2))
    places = [(0.0, 0.0), (0.5, 0.0), (-1.0, 2.0)]
    values = landscape.loss_around(loss, BATCHES, parameters, [first, second], places)
    for (a, b), value in zip(places, values.tolist(), strict=True):
        point = x + a * flatness.flatten(first) + b * flatness.flatten(second)
        assert value == pytest.approx((0.5 * point @ matrix @ point).item())


def test_the_line_of_a_concave_loss():
    x = torch.zeros(1, dtype=torch.float64)
    places = [i / 10 for i in range(11)]
    ends = [torch.tensor([v], dtype=torch.float64) for v in (0.0, 2.0)]
    values = landscape.loss_between(
        lambda b: b * (-x * x + 3 * x).sum(), BATCHES, [x], ends[:1], ends[1:], places
    ).tolist()
    assert values == pytest.approx([-4 * t * t + 6 * t for t in places])
    assert landscape.barrier(values, places) == pytest.approx(1.0)  # 4 t (1 - t) at a half
    assert x.item() == 0


def test_a_line_that_sags_has_no_barrier():
    assert landscape.barrier([2.0, 0.5, 1.0], [0.0, 0.5, 1.0]) == 0


# The script -------------------------------------------------------------------------------------------------

QUICK = ("--pictures", "2", "--batch", "2", "--top", "0", "--probes", "2")


TRAIN = ("--norm-mode", "train", "--of", "seg")


def metrics(run: Path, *options: str) -> dict:
    path = run / "flatness.json"
    assert script.main([str(run), *QUICK, "--json", str(path), *options]) == 0
    return json.loads(path.read_text())


def set_norm(run: Path, norm: str) -> None:
    """Make a run's files say that it was trained with another norm."""
    for path in run.glob("step_*.pt"):
        state = checkpoint.load(path)
        state["network"]["arguments"]["norm"] = norm
        checkpoint.save(state, path)


@pytest.mark.slow
def test_the_script_reports_every_measure(toy_run, capsys):
    run = toy_run()
    drawing = run / "new" / "flatness.png"
    result = metrics(run, "--norm-mode", "both", "--top", "1", "--picture", str(drawing))
    shown = capsys.readouterr().out
    for text in ("eval: l_seg", "train: l_seg + lambda R", "eigenvalue 1", "trace", "sharpness", "barrier"):
        assert text in shown
    assert result["step"] == 1 and result["pictures"] == 2 and result["lambda"] == 10
    for mode in ("eval", "train"):
        parts = result["modes"][mode]
        assert set(parts) == {"seg", "objective", "around", "plane", "line"}
        for term in ("seg", "objective"):
            values = parts[term]
            assert values["gradient_norm2"] == pytest.approx(values["gradient_norm2_of_a_batch"])
            assert len(values["eigenvalues"]) == 1 and values["sharpness"] >= 0
            assert math.isfinite(values["trace"]["mean"]) and values["trace"]["standard_error"] >= 0
        assert parts["around"]["seg"][10] == pytest.approx(parts["seg"]["loss"], rel=1e-6)
        assert parts["plane"]["seg"][6][6] == pytest.approx(parts["seg"]["loss"], rel=1e-6)
        assert parts["line"]["seg"]["barrier"] >= 0
        # R is positive: a cross-entropy against the teacher.
        assert parts["objective"]["loss"] > parts["seg"]["loss"]
    with Image.open(drawing) as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(2**24)) > 10


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(toy_run):
    run = toy_run()
    first = metrics(run, "--seed", "3", *TRAIN)
    assert metrics(run, "--seed", "3", *TRAIN) == first
    other = metrics(run, "--seed", "4", *TRAIN)["modes"]["train"]["seg"]
    assert other != first["modes"]["train"]["seg"]


@pytest.mark.slow
def test_every_norm_gives_the_metrics_of_abn(toy_run, capsys):
    run = toy_run("method.name=mib", "model.norm=abn_lean")
    results = {}
    for norm in ("abn_lean", "abn", "iabn"):
        set_norm(run, norm)
        results[norm] = metrics(run)
        assert results[norm].pop("norm") == {"trained": norm, "measured": "abn"}
        assert (f"trained with {norm}" in capsys.readouterr().out) == (norm != "abn")
    assert results["abn_lean"] == results["abn"] == results["iabn"]


def options_for(run: Path, *more: str) -> Options:
    return script.chosen(script.make_parser().parse_args([str(run), *QUICK, *more]))


def read(run: Path, *more: str) -> tuple[Subject, Batches]:
    options = options_for(run, *more)
    config = load_config([run / "config.yaml"])
    dataset = load_dataset(config.data.dataset, config.data.root, config.data.train_list)
    subject = read_subject(RunFolder(run), options.step, dataset, config)
    return subject, Batches(subject, dataset, options)


@pytest.mark.slow
def test_the_ends_of_the_line_are_the_models(toy_run):
    subject, batches = read(toy_run())
    old = batches.of("old")
    before, after = subject.before, subject.model
    with flatness.norm_mode(after, "eval"):
        line = curvature.line(subject, old)
        first, last = (flatness.mean_loss(loss_of(model, subject), old).item() for model in (before, after))
        assert line["seg"]["losses"][-1] == flatness.mean_loss(subject.segmentation, old).item()
    assert line["among_old"]["losses"][0] == pytest.approx(first, rel=1e-6)
    assert line["among_old"]["losses"][-1] == pytest.approx(last, rel=1e-6)


def loss_of(model: nn.Module, subject: Subject):
    def loss(batch: CurvatureBatch) -> Tensor:
        logits = model(subject.inputs(batch.images)).logits[:, : subject.step.num_old]
        return batch.method.segmentation_loss(logits, batch.labels)

    return loss


def test_the_line_leaves_running_statistics_alone(toy_run):
    subject, batches = read(toy_run(), "--norm-mode", "train")
    state = {name: value.clone() for name, value in subject.model.state_dict().items()}
    with flatness.norm_mode(subject.model, "train"):
        curvature.line(subject, batches.of("old"))
    assert all(torch.equal(value, state[name]) for name, value in subject.model.state_dict().items())


def test_which_labels_and_images_are_measured(toy_run):
    _, batches = read(toy_run(), "--pictures", "12")
    labels = {
        kind: torch.cat([b.labels for b in batches.of(kind)]).unique() for kind in ("train", "old", "test")
    }
    assert set(labels["train"].tolist()) == {0, 3}
    assert set(labels["old"].tolist()) == {0, 1, 2}
    assert set(labels["test"].tolist()) == {0, 1, 2, 3, 255}
    # The l_seg of the step that made the labels: in step 1 the background may be any old class, in step 0 it
    # is itself.
    logits, background = torch.randn(1, 4, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long)
    losses = {kind: batches.of(kind)[0].method.segmentation_loss(logits, background) for kind in labels}
    plain = nn.functional.cross_entropy(logits, background)
    assert losses["train"] < plain
    assert losses["old"].item() == losses["test"].item() == pytest.approx(plain.item())


@pytest.mark.slow
@pytest.mark.parametrize("on", ["old", "test"])
def test_other_images_give_other_metrics(on, toy_run):
    run = toy_run()
    both = [metrics(run, "--of", "seg", "--on", kind)["modes"]["eval"]["seg"] for kind in (on, "train")]
    assert both[0] != both[1]


@pytest.mark.slow
def test_the_whole_objective_is_the_one_that_is_trained(toy_run):
    run = toy_run("method.name=ewc")
    subject, batches = read(run)
    (batch, *_) = batches.of("train")
    gradient = [
        flatness.flatten(torch.autograd.grad(loss(batch), subject.parameters))
        for loss in (subject.segmentation, subject.objective)
    ]
    subject.model.zero_grad()
    subject.segmentation(batch).backward()
    subject.method.after_backward(subject.model, Weights(learn=0.0, keep=10.0), learning_rate=0.001)
    trained = flatness.flatten([p.grad for p in subject.parameters])
    assert torch.allclose(gradient[1], trained, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(gradient[0], trained, rtol=1e-3)
    penalty = subject.objective(batch) - subject.segmentation(batch)
    assert penalty.item() == pytest.approx(10 * subject.method.penalty(subject.model).item(), rel=1e-3)


@pytest.mark.slow
def test_several_runs_leave_their_metrics_beside_them(toy_run, tmp_path, capsys):
    run = toy_run()
    arguments = [str(run), str(tmp_path / "nowhere"), *QUICK, "--of", "seg", "--beside"]
    assert script.main(arguments) == 2 and f"error: {tmp_path / 'nowhere'}: " in capsys.readouterr().err
    left = json.loads((run / "flatness.json").read_text())
    assert left == metrics(run, "--of", "seg") and left["run"] == str(run)
    with pytest.raises(SystemExit):
        script.main([*arguments, "--json", str(tmp_path / "x.json")])
    assert "--beside" in capsys.readouterr().err


@pytest.mark.slow
def test_labels_that_a_method_rewrites_are_measured_rewritten(toy_run):
    subject, batches = read(toy_run("method.name=plop", "method.strength=null"), "--pictures", "12")
    labels = torch.cat([batch.labels for batch in batches.of("train")])
    assert {-1, 3} <= set(labels.unique().tolist()) <= {-1, 0, 1, 2, 3}  # -1: the teacher is not sure
    (batch, *_) = batches.of("train")
    assert subject.objective(batch) > subject.segmentation(batch)


def test_step_0_has_no_line(toy_run, capsys):
    run = toy_run()
    result = metrics(run, "--step", "0")
    assert set(result["modes"]["eval"]) == {"seg", "around"}
    assert "no line" in capsys.readouterr().out
    assert script.main([str(run), "--step", "0", "--on", "old"]) == 2
    assert "no old images and no line" in capsys.readouterr().err
    assert script.main([str(run), "--step", "0", "--of", "objective"]) == 2
    assert "mib has no retention term in step 0" in capsys.readouterr().err


def test_what_is_missing_is_named(toy_run, tmp_path, capsys):
    run = toy_run()
    assert script.main([str(run), "--step", "7"]) == 2
    assert "--step 7" in capsys.readouterr().err
    assert script.main([str(run), "--batch", "1", "--norm-mode", "train"]) == 2
    assert "raise --batch" in capsys.readouterr().err
    (run / "step_0.pt").unlink()
    assert script.main([str(run), "--step", "1"]) == 2
    assert "step_0.pt: no such checkpoint" in capsys.readouterr().err
    (run / "step_1.pt").unlink()
    assert script.main([str(run)]) == 2
    assert "no step checkpoint" in capsys.readouterr().err
    assert script.main([str(tmp_path / "nowhere")]) == 2
    assert "config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run", "--pictures", "0"],
        ["run", "--probes", "1"],
        ["run", "--top", "-1"],
        ["run", "--epsilon", "0"],
    ],
)
def test_impossible_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        script.main(arguments)
    assert refused.value.code == 2
    assert "error: " in capsys.readouterr().err
