"""PLOP against slow loops over windows and pixels, its thresholds against sorted values, and its runs."""

import json
import math
import os
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import TINY_NETWORK, walk_until
from processes import become_rank, free_port, run_ranks
from test_resume import stop_and_go
from torch.nn import functional as F

import train
from data.protocols import IGNORE_INDEX, Step
from engine import checkpoint
from engine.ranks import start_ranks
from methods import make_method
from methods.losses import fused
from methods.losses import plain as losses
from methods.plop import (
    CODE_BINS,
    PLOP,
    UNSURE,
    code_median,
    paper_bin,
    paper_median,
    share_of_sure,
    uncertainty,
)
from models import Output, build_segmenter
from models.norm import NORMS

EXACT = {"rtol": 1e-10, "atol": 1e-10}
STEP = Step(1, (1, 2), (3,))  # background, two old classes, a new one
VOID = IGNORE_INDEX


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plop(**options) -> PLOP:
    method = make_method("plop", options=options)
    method.begin_step(None, STEP)
    return method


def outputs(logits: torch.Tensor) -> Output:
    return Output(logits, logits)


# -------------------------------------------------------------------------------------------------- Local POD


def slow_embedding(image: torch.Tensor, scales) -> list[float]:
    """All means over the width and over the height of every window of a C x H x W map of squares."""
    numbers = []
    channels, height, width = image.shape
    for s in scales:
        rows, columns = height // s, width // s
        for i in range(s if rows and columns else 0):
            for j in range(s):
                for c in range(channels):
                    window = [
                        [float(image[c, i * rows + y, j * columns + x]) ** 2 for x in range(columns)]
                        for y in range(rows)
                    ]
                    numbers += [sum(line) / columns for line in window]
                    numbers += [sum(line[x] for line in window) / rows for x in range(columns)]
    return numbers


def slow_pod(student: torch.Tensor, teacher: torch.Tensor, scales=(1, 2, 4)) -> float:
    distances = [
        math.dist(slow_embedding(a, scales), slow_embedding(b, scales))
        for a, b in zip(student, teacher, strict=True)
    ]
    return sum(distances) / len(distances)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (3, 2, 7, 5), (1, 2, 3, 9), (2, 1, 1, 1)])
@pytest.mark.parametrize("scales", [(1, 2, 4), (1,), (1, 3)])
def test_local_pod(shape, scales):
    student, teacher = random(*shape), random(*shape, seed=1)
    expected = torch.tensor(slow_pod(student, teacher, scales), dtype=torch.float64)
    torch.testing.assert_close(losses.local_pod(student, teacher, scales), expected, **EXACT)


def test_the_gradient_of_local_pod():
    student, teacher = random(2, 2, 5, 4).requires_grad_(), random(2, 2, 5, 4, seed=1)
    assert torch.autograd.gradcheck(lambda z: losses.local_pod(z, teacher), student)
    same = losses.local_pod(student, student.detach())
    (gradient,) = torch.autograd.grad(same, student)
    assert same == 0 and not gradient.any()  # a norm has no derivative there; it must not be NaN


def test_local_pod_in_half_precision_squares_in_single():
    large = torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16)  # its square is infinite
    assert losses.local_pod(large, torch.zeros_like(large)).isfinite()


def slow_windows(image: torch.Tensor, size: int, channels: int) -> list[float]:
    """Means of squares over size x size windows and so many channels around every place; zero outside."""
    num, height, width = image.shape
    reach, near = size // 2, channels // 2

    def square(c: int, y: int, x: int) -> float:
        inside = 0 <= c < num and 0 <= y < height and 0 <= x < width
        return float(image[c, y, x]) ** 2 if inside else 0.0

    places = product(
        range(num), range(-reach, height + reach - size + 1), range(-reach, width + reach - size + 1)
    )
    return [
        sum(
            square(c + k, top + dy, left + dx)
            for k in range(-near, near + 1)
            for dy, dx in product(range(size), repeat=2)
        )
        / (size * size * channels)
        for c, top, left in places
    ]


def slow_pooled(student: torch.Tensor, teacher: torch.Tensor, size: int, channels: int = 1) -> float:
    pairs = zip(student, teacher, strict=True)
    distances = [math.dist(*(slow_windows(image, size, channels) for image in pair)) for pair in pairs]
    return sum(distances) / len(distances)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 2, 1, 3)])
def test_what_rcil_holds(shape):
    student, teacher = random(*shape), random(*shape, seed=1)
    windows = sum(slow_pooled(student, teacher, size) for size in (2, 4, 6)) / 3
    found = losses.pooled_pod(student, teacher, (2, 4, 6))
    torch.testing.assert_close(found, torch.tensor(windows, dtype=torch.float64), **EXACT)
    channels = torch.tensor(slow_pooled(student, teacher, 1, channels=3), dtype=torch.float64)
    torch.testing.assert_close(losses.pooled_channels(student, teacher), channels, **EXACT)
    half = torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16)
    assert losses.pooled_pod(half, 0 * half).isfinite() and losses.pooled_channels(half, 0 * half).isfinite()


def test_pooled_maps_weigh_as_in_rcil():
    num_old, num_new, maps = 4, 2, [(2, 3, 8, 8), (2, 5, 4, 4), (2, 6, 4, 4)]
    scores, old_scores = random(2, num_old + num_new, 4, 4), random(2, num_old, 4, 4, seed=1)
    ours, theirs = ([random(*shape, seed=seed) for shape in maps] for seed in (2, 3))
    merged = scores[:, :num_old].clone()
    merged[:, 0] += scores[:, num_old:].sum(dim=1)
    method = make_method("plop", options={"pod": "pooled"})
    found = method.retention_losses(
        SimpleNamespace(stages=(*ours, scores)), SimpleNamespace(stages=(*theirs, old_scores))
    )
    root = math.sqrt((num_old + num_new) / num_new)
    pod = [losses.pooled_pod(*pair) for pair in zip(ours, theirs, strict=True)]
    channels = [losses.pooled_channels(*pair) for pair in zip(ours, theirs, strict=True)]
    expected = {
        "features": root / 4 * sum(pod),
        "logits": root / 4 * 0.05 * losses.pooled_pod(merged, old_scores),
        "channels": root / 3 * (channels[0] + channels[1] + 0.05 * channels[2]),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **EXACT)


@pytest.mark.parametrize("num_new", [1, 3])
def test_what_is_held(num_new):
    num_old, maps = 4, [(2, 3, 8, 8), (2, 5, 4, 4), (2, 6, 4, 4)]
    scores, old_scores = random(2, num_old + num_new, 4, 4), random(2, num_old, 4, 4, seed=1)
    ours, theirs = ([random(*shape, seed=seed) for shape in maps] for seed in (2, 3))
    merged = scores[:, :num_old].clone()
    merged[:, 0] += scores[:, num_old:].sum(dim=1)
    factor = math.sqrt((num_old + num_new) / num_new) / 4
    method = make_method("plop", options={"logits_ratio": 0.3})
    terms = method.retention_losses(
        Output(scores, ours[-1], (*ours, scores)), Output(old_scores, theirs[-1], (*theirs, old_scores))
    )
    features = factor * sum(slow_pod(a, b) for a, b in zip(ours, theirs, strict=True))
    assert terms["features"].item() == pytest.approx(features, rel=1e-10)
    assert terms["logits"].item() == pytest.approx(factor * 0.3 * slow_pod(merged, old_scores), rel=1e-10)
    published = make_method("plop")
    assert published.strength * published.options.logits_ratio == pytest.approx(0.0005)


# ---------------------------------------------------------------------------------------------- pseudo-labels


def test_uncertainty_is_the_entropy_over_its_largest_value():
    logits = random(2, 3, 2, 2, scale=4.0)
    u, guess = uncertainty(logits)
    for b, i, j in np.ndindex(2, 2, 2):
        q = np.exp(logits[b, :, i, j].numpy())
        q /= q.sum()
        assert u[b, i, j].item() == pytest.approx(-(q * np.log(q)).sum() / math.log(3), rel=1e-10)
        assert guess[b, i, j] == q.argmax()
    assert uncertainty(torch.zeros(1, 3, 1, 1))[0] == 1  # nothing known
    assert uncertainty(torch.tensor([1e4, 0.0, 0.0]).view(1, 3, 1, 1))[0] == 0  # nothing unknown, and no NaN


def surveyed_values(batches, scale: float = 1.0) -> list[np.ndarray]:
    """u / scale of the background-labelled pixels, by predicted class."""
    values: list[list[float]] = [[], [], []]
    for labels, teacher in batches:
        u, guess = uncertainty(teacher.logits)
        for value, c, label in zip(u.flatten(), guess.flatten(), labels.flatten(), strict=True):
            if label == 0:
                values[c].append(float(value) / scale)
    return [np.array(v) for v in values]


def survey_batches(count: int = 3, sure: float = 4.0, of=range(3)):
    """Predictions of the classes `of`, more or less sure; labels are background, new class or void."""
    for seed in range(count):
        logits = random(2, 3, 9, 9, seed=seed, scale=sure)
        logits[:, [c for c in range(3) if c not in of]] -= 100.0
        labels = torch.randint(3, (2, 9, 9), generator=torch.Generator().manual_seed(seed))
        yield torch.tensor([0, 3, VOID])[labels], outputs(logits)


@pytest.mark.parametrize("sure", [0.5, 4.0, 10.0])
def test_the_papers_thresholds_are_medians(sure):
    method = plop(median="paper", minimum=0.0)
    method.survey(survey_batches(sure=sure))
    for tau, values in zip(method.thresholds, surveyed_values(survey_batches(sure=sure)), strict=True):
        middle = np.sort(values)[[(len(values) - 1) // 2, len(values) // 2]]
        assert middle[0] * (1 - 1 / 128) <= tau <= middle[1] * (1 + 1 / 128)


def test_the_median_of_many_values_to_the_width_of_a_bin():
    values = torch.rand(100_001, generator=torch.Generator().manual_seed(0)) ** 8  # down to 1e-40
    counts = paper_bin(values).bincount(minlength=0x3F81)[None]
    assert paper_median(counts).item() == pytest.approx(np.median(values), rel=1 / 128)
    assert paper_median(paper_bin(torch.tensor([-0.0, 0.0, 1.0, 1.0, 1.0])).bincount()[None]) >= 1


def test_a_class_never_predicted_gets_the_minimum_and_no_class_less():
    for median in ("paper", "code"):
        method = plop(median=median, minimum=0.002)
        method.survey(survey_batches(sure=0.5, of=(0, 2)))
        scale = 3 * math.log(4) if median == "code" else 1.0
        assert method.thresholds[1] == pytest.approx(0.002 * scale)
        assert (method.thresholds >= 0.00199 * scale).all()
        method.survey(survey_batches(sure=300.0))  # no doubt anywhere
        if median == "paper":
            assert method.thresholds.tolist() == pytest.approx([0.002] * 3)


def row(**counts: int) -> torch.Tensor:
    """A histogram of the reference code: bin0=60, bin1=40."""
    histogram = torch.zeros(1, CODE_BINS, dtype=torch.long)
    for name, count in counts.items():
        histogram[0, int(name.removeprefix("bin"))] = count
    return histogram


@pytest.mark.parametrize(
    ("histogram", "expected"),
    [
        (row(), 0.0),  # never predicted
        (row(bin0=1000), 0.005),  # all in the first bin, as on ADE: every pixel passes
        (row(bin0=600, bin1=400), 0.01 * 500 / 600),
        (row(bin0=400, bin1=600), 0.01 + 0.01 * 500 / 600),  # what lies before is not counted
        (row(bin0=40, bin2=60), 0.02 + 0.01 * (50 - 1) / 60),  # but the number of the bin is
        (row(bin0=4000, bin1=3500, bin2=3500), math.inf),  # no bin holds half of many
        (row(bin0=40, bin1=35, bin2=35), 0.0),  # nor of few
    ],
)
def test_the_median_as_the_reference_code_has_it(histogram, expected):
    assert code_median(histogram).item() == pytest.approx(expected)


def test_the_thresholds_of_the_code_are_read_from_100_bins_of_its_entropy():
    method = plop(median="code", minimum=0.0)
    method.survey(survey_batches(count=5, sure=10.0))
    scale = 3 * math.log(4)  # C_old log C
    for tau, values in zip(
        method.thresholds.tolist(), surveyed_values(survey_batches(5, 10.0), scale), strict=True
    ):
        histogram = np.histogram(values, bins=CODE_BINS, range=(0, 1))[0]
        assert 2 * histogram[0] >= len(values)  # sure pixels: the usual case
        assert tau == pytest.approx(scale * 0.01 * len(values) / 2 / histogram[0], rel=1e-6)


def test_labels_are_rewritten_in_every_case():
    method = plop()
    method.thresholds = torch.tensor([0.5, 0.5, 0.0])
    sure = {c: [9.0 if k == c else 0.0 for k in range(3)] for c in range(3)}
    torn = [0.1, 0.0, 0.0]
    cases = [
        (0, sure[1], 1),  # background becomes an old class
        (0, sure[0], 0),  # or is confirmed
        (0, torn, UNSURE),
        (0, sure[2], UNSURE),  # not below the threshold of its class, 0
        (3, sure[1], 3),  # a new class is kept,
        (3, torn, 3),
        (2, sure[1], 2),  # and the true label of an old one,
        (VOID, sure[1], VOID),  # and void
    ]
    labels = torch.tensor([label for label, _, _ in cases]).view(1, 2, 4)
    logits = torch.tensor([scores for _, scores, _ in cases]).T.reshape(1, 3, 2, 4)
    before = labels.clone()
    assert method.targets(labels, outputs(logits)).flatten().tolist() == [wanted for _, _, wanted in cases]
    assert torch.equal(labels, before)
    u = uncertainty(logits)[0][0, 0, 2].item()
    for tau, wanted in ((u, UNSURE), (u + 1e-6, 0)):  # strictly below
        method.thresholds = torch.tensor([tau, 0.0, 0.0])
        assert method.targets(labels, outputs(logits))[0, 0, 2] == wanted


def test_an_image_all_of_a_new_class_is_left_out():
    """Where nothing says what background is, everything would drift to the new class."""
    labels = torch.full((2, 4, 5), 3)
    labels[1, 0] = 0
    logits = random(2, 4, 4, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(plop().segmentation_loss(logits, labels), logits)
    assert not gradient[0].any() and gradient[1].all()


def test_nu_is_the_share_of_sure_old_pixels_of_each_image():
    images = {
        (0, 1, UNSURE, UNSURE): 0.5,
        (0, 1, 3, VOID): 1.0,
        (UNSURE, UNSURE, 3, 3): 0.0,
        (2, UNSURE, UNSURE, VOID): 1 / 3,
        (3, 3, 3, VOID): 0.0,  # no old pixel
    }
    labels = torch.tensor(list(images)).view(-1, 2, 2)
    assert share_of_sure(labels, 3).tolist() == pytest.approx(list(images.values()))


# ------------------------------------------------------------------------------------------------------ l_seg


def rewritten_labels() -> torch.Tensor:
    choices = torch.tensor([0, 1, 2, 3, UNSURE, VOID])
    return choices[torch.randint(6, (3, 4, 5), generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_l_seg_is_the_slow_formula(mean_over, kind):
    logits, labels = random(3, 4, 4, 5, scale=3.0), rewritten_labels()
    total = 0.0
    for z, y in zip(logits, labels, strict=True):
        old = [v for v in y.flatten().tolist() if v in (0, 1, 2, UNSURE)]
        nu = sum(v != UNSURE for v in old) / len(old)
        for i, j in np.ndindex(4, 5):
            if y[i, j] not in (UNSURE, VOID):
                p = np.exp(z[:, i, j].numpy())
                total -= nu * math.log(p[y[i, j]] / p.sum())
    count = labels.numel() if mean_over == "all" else sum(v >= 0 and v != VOID for v in labels.flatten())
    method = make_method("plop", mean_over, losses=kind)
    method.begin_step(None, STEP)
    assert method.segmentation_loss(logits, labels).item() == pytest.approx(total / int(count), rel=1e-10)


def test_the_gradient_of_weighted_cross_entropy():
    logits, weights = random(3, 4, 4, 5, scale=3.0).requires_grad_(), torch.tensor([0.2, 0.0, 1.5]).double()
    labels = rewritten_labels()
    labels[labels == UNSURE] = VOID
    assert torch.autograd.gradcheck(lambda z: losses.weighted_cross_entropy(z, labels, weights), logits)
    for mean_over in ("all", "valid"):
        plain, fast = (
            torch.autograd.grad(m.weighted_cross_entropy(logits, labels, weights, mean_over), logits)[0]
            for m in (losses, fused)
        )
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    everywhere = losses.weighted_cross_entropy(logits, labels, torch.ones(3).double())
    torch.testing.assert_close(everywhere, losses.cross_entropy(logits, labels), **EXACT)


def test_step_0_is_plain_cross_entropy_to_the_last_bit():
    logits, labels = random(3, 3, 4, 5).float(), rewritten_labels()
    labels = labels.where((labels >= 0) & (labels != 3), VOID)
    first, plain = make_method("plop"), make_method("ft")
    first.begin_step(None, Step(0, (), (1, 2)))
    assert torch.equal(first.segmentation_loss(logits, labels), plain.segmentation_loss(logits, labels))


# ------------------------------------------------------------------------------------------------ the network


@pytest.mark.parametrize("body", ["resnet_tiny", "mobilenet_v2"])
@pytest.mark.parametrize("norm", NORMS)
def test_stages_are_intact_when_the_losses_read_them(norm, body, double_precision):
    """Whatever a norm overwrites: values and gradients are those of the plain one.

    In double precision: what iabn rounds when it undoes an activation depends on the processor, and grows
    through the network.
    """
    if norm == "iabn":
        pytest.importorskip("inplace_abn")
    found = {}
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for kind in ("abn", norm):
        torch.manual_seed(0)
        model = build_segmenter(**TINY_NETWORK | {"norm": kind, "body": body})
        model.add_classes(4)
        model.returns_stages = True
        output = model.train()(images)
        assert len(output.stages) == 6
        values = [stage.detach().clone() for stage in output.stages]
        kept = [0.5 * value for value in values]
        distance = sum(losses.local_pod(a, b) for a, b in zip(output.stages, kept, strict=True))
        (distance + output.logits.logsumexp(dim=1).mean()).backward()
        found[kind] = values, [p.grad for p in model.parameters()]
    for a, b in zip(found["abn"][0] + found["abn"][1], found[norm][0] + found[norm][1], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6 * max(1.0, a.abs().max().item()))


def test_stages_are_read_before_activation_and_before_upsampling():
    model = build_segmenter(**TINY_NETWORK)
    model.add_classes(4)
    sums = []
    model.body.layer2[-1].bn2.register_forward_hook(lambda module, given, result: sums.append(result))
    model.body.layer2[-1].downsample.register_forward_hook(lambda module, given, result: sums.append(result))
    images = torch.randn(2, 3, 32, 32)
    assert model.train()(images).stages == ()
    sums.clear()
    model.returns_stages = True
    *body, hidden, scores = (output := model.eval()(images)).stages
    torch.testing.assert_close(F.leaky_relu(body[-1], 0.01), output.features)
    torch.testing.assert_close(body[1], sums[0] + sums[1])
    assert (body[1] < -0.1).any()  # a leaky ReLU would have left a hundredth
    torch.testing.assert_close(scores, model.classifiers[0](hidden))
    torch.testing.assert_close(
        F.interpolate(scores, size=(32, 32), mode="bilinear", align_corners=False), output.logits
    )


# ------------------------------------------------------------------------------------------------------- runs


PUBLISHED = ("method.name=plop", "method.strength=null")


@pytest.mark.slow
def test_a_resumed_step_is_not_surveyed_again(toy_arguments, tmp_path, monkeypatch):
    seen, original = [], PLOP.survey

    def survey(self, images):
        original(self, images)
        seen.append(self.thresholds)

    monkeypatch.setattr(PLOP, "survey", survey)
    options = (*PUBLISHED, "method.options.median=paper", "train.accumulate=2")
    walk_until(toy_arguments(*options, name="whole"))
    assert len(seen) == 1
    assert stop_and_go(toy_arguments(*options, name="pieces"), 1) > 3
    assert len(seen) == 2 and torch.equal(*seen)
    whole, pieces = (checkpoint.load(tmp_path / f"runs/{n}/step_1.pt") for n in ("whole", "pieces"))
    assert all(torch.equal(tensor, pieces["model"][name]) for name, tensor in whole["model"].items())
    assert whole["methods"] == {}


@pytest.mark.slow
def test_it_starts_from_everybodys_step_0_and_cannot_observe(toy_arguments, tmp_path, capsys):
    assert train.main(toy_arguments("train.last_step=0", "method.also_observe=[ewc]", name="first")) == 0
    start = f"train.start_from={tmp_path}/runs/first/step_0.pt"
    for name, extra in (("own", ()), ("shared", (start,))):
        assert train.main(toy_arguments(*PUBLISHED, *extra, name=name)) == 0
    own, shared = (
        checkpoint.load(tmp_path / f"runs/{name}/step_1.pt")["model"] for name in ("own", "shared")
    )
    assert all(torch.equal(own[key], shared[key]) for key in own)
    assert train.main(toy_arguments("method.also_observe=[plop]", name="no")) == 2
    assert "'plop' is not one of ewc, pi, rw" in capsys.readouterr().err


def test_a_wrong_option_is_refused_before_training(toy_arguments, capsys):
    assert train.main(toy_arguments("method.name=plop", "method.options.median=mean")) == 2
    assert "method.options.median: 'mean' is not one of code, paper" in capsys.readouterr().err


@pytest.mark.slow
def test_the_survey_sees_the_precision_of_training(toy_arguments, monkeypatch):
    seen, original = {}, PLOP.survey

    def survey(method, images):
        images = list(images)
        seen["survey"] = images[0][1].stages[0].dtype
        original(method, images)

    def targets(method, labels, teacher):
        seen["training"] = teacher.stages[0].dtype
        return labels

    monkeypatch.setattr(PLOP, "survey", survey)
    monkeypatch.setattr(PLOP, "targets", targets)
    assert train.main(toy_arguments(*PUBLISHED, "train.amp=bf16")) == 0
    assert seen == {"survey": torch.bfloat16, "training": torch.bfloat16}


def test_pseudo_labels_need_a_survey():
    with pytest.raises(RuntimeError, match="survey"):
        plop().targets(torch.zeros(1, 2, 2).long(), outputs(torch.zeros(1, 3, 2, 2)))


@pytest.mark.slow
def test_altersgd_and_flatness_with_it(toy_arguments, tmp_path):
    phase = ("phase.name=altersgd", "phase.p=0.5", "run.flatness=4", "update.name=sam")
    assert train.main(toy_arguments(*PUBLISHED, *phase, "train.accumulate=2")) == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    for metrics in results["steps"][1]["flatness"].values():
        assert metrics["squared_gradient_norm"] > 0 and math.isfinite(metrics["top_eigenvalue"])


@pytest.mark.slow
def test_it_forgets_less_than_fine_tuning(toy_arguments, tmp_path):
    long = ("train.epochs=40", "train.epochs_later=20", "train.seed=1")
    assert train.main(toy_arguments(*long, "train.last_step=0", name="first")) == 0
    start = f"train.start_from={tmp_path}/runs/first/step_0.pt"
    old = {}
    # A handful of small images has too few pixels for the histograms of the code.
    for name, method in (("ft", ("method.name=ft",)), ("plop", (*PUBLISHED, "method.options.median=paper"))):
        assert train.main(toy_arguments(*long, *method, start, name=name)) == 0
        results = json.loads((tmp_path / f"runs/{name}/results.json").read_text())["steps"]
        old[name] = [sum(list(step["iou"].values())[1:3]) / 2 for step in results]
    assert old["ft"][0] == old["plop"][0] > 0.4
    assert old["plop"][1] > old["ft"][1] + 0.1


def survey_rank(rank: int, world: int, port: int, folder) -> None:
    become_rank(rank, world, port)
    os.environ["OMP_NUM_THREADS"] = "1"
    start_ranks("cpu")
    for median in ("code", "paper"):
        method = plop(median=median)
        method.survey(list(survey_batches(4))[rank::world])
        torch.save(method.thresholds, folder / f"{median}_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_the_thresholds_of_all_images(tmp_path):
    run_ranks(survey_rank, (2, free_port(), tmp_path))
    for median in ("code", "paper"):
        alone, half = plop(median=median), plop(median=median)
        alone.survey(survey_batches(4))
        half.survey(list(survey_batches(4))[::2])
        assert not torch.equal(half.thresholds, alone.thresholds)
        for rank in range(2):
            assert torch.equal(torch.load(tmp_path / f"{median}_{rank}.pt"), alone.thresholds)
