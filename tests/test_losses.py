"""Every loss against a slow loop over pixels written from its formula,
and its gradient against finite differences.
"""

import math

import pytest
import torch

from data.protocols import BACKGROUND, IGNORE_INDEX
from methods import make_method, published_strength
from methods.losses import plain as losses
from models import Output, build_segmenter

B, C, H, W = 2, 5, 2, 3
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def random_logits(num_classes: int = C, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(B, num_classes, H, W, dtype=torch.float64, generator=generator)


def random_labels(num_classes: int = C, void: bool = True, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_classes, (B, H, W), generator=generator)
    if void:
        labels[torch.rand(B, H, W, generator=generator) < 0.3] = IGNORE_INDEX
        assert (labels == IGNORE_INDEX).any() and (labels != IGNORE_INDEX).any()
    return labels


def pixels(*maps: torch.Tensor):
    """Per pixel, the column of each map as a list of floats (a label map gives a plain int)."""
    for b in range(B):
        for i in range(H):
            for j in range(W):
                yield tuple(m[b, :, i, j].tolist() if m.dim() == 4 else int(m[b, i, j]) for m in maps)


def softmax(z: list[float]) -> list[float]:
    exponentials = [math.exp(v - max(z)) for v in z]
    return [e / sum(exponentials) for e in exponentials]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def binary_entropy_terms(z: list[float], targets: list[float]) -> float:
    return -sum(
        t * math.log(sigmoid(v)) + (1 - t) * math.log(sigmoid(-v)) for v, t in zip(z, targets, strict=True)
    )


def slow_cross_entropy(logits, labels, mean_over, num_old=1):
    """-log p_y; the old classes, y = 0 among them, stand together as one (num_old = 1 is the plain form)."""
    total, valid = 0.0, 0
    for z, y in pixels(logits, labels):
        if y == IGNORE_INDEX:
            continue
        p = softmax(z)
        total -= math.log(sum(p[:num_old]) if y < num_old else p[y])
        valid += 1
    return total / (valid if mean_over == "valid" else B * H * W)


def slow_distillation(student, teacher):
    num_old = teacher.shape[1]
    total = 0.0
    for z, t in pixels(student, teacher):
        p, q = softmax(z[:num_old]), softmax(t)
        total -= sum(q[c] * math.log(p[c]) for c in range(num_old)) / num_old
    return total / (B * H * W)


def slow_unbiased_distillation(student, teacher):
    num_old = teacher.shape[1]
    total = 0.0
    for z, t in pixels(student, teacher):
        p, q = softmax(z), softmax(t)
        background = q[0] * math.log(p[0] + sum(p[num_old:]))
        foreground = sum(q[c] * math.log(p[c]) for c in range(1, num_old))
        total -= (background + foreground) / num_old
    return total / (B * H * W)


def slow_binary_cross_entropy(logits, labels, mean_over):
    total, valid = 0.0, 0
    for z, y in pixels(logits, labels):
        if y == IGNORE_INDEX:
            continue
        total += binary_entropy_terms(z, [float(c == y) for c in range(len(z))])
        valid += 1
    return total / (valid if mean_over == "valid" else B * H * W)


def slow_binary_distillation(student, teacher):
    total = 0.0
    for z, t in pixels(student, teacher):
        total += binary_entropy_terms(z[: len(t)], [sigmoid(v) for v in t])
    return total / (B * H * W)


def assert_value(actual: torch.Tensor, expected: float) -> None:
    assert actual.dim() == 0
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), **EXACT)


def assert_gradient(loss, *inputs: torch.Tensor) -> None:
    assert torch.autograd.gradcheck(loss, tuple(x.clone().requires_grad_() for x in inputs))


@pytest.mark.parametrize("mean_over", ["all", "valid"])
@pytest.mark.parametrize("void", [False, True])
def test_cross_entropy(mean_over, void):
    logits, labels = random_logits(), random_labels(void=void)
    expected = slow_cross_entropy(logits, labels, mean_over)
    assert_value(losses.cross_entropy(logits, labels, mean_over), expected)
    assert_gradient(lambda z: losses.cross_entropy(z, labels, mean_over), logits)


@pytest.mark.parametrize("mean_over", ["all", "valid"])
@pytest.mark.parametrize("void", [False, True])
@pytest.mark.parametrize("num_old", [1, 2, 3, 4])
def test_unbiased_cross_entropy(num_old, void, mean_over):
    logits, labels = random_logits(), random_labels(void=void)
    labels[(labels > BACKGROUND) & (labels < num_old)] = (
        BACKGROUND  # a step's labels show background and new classes
    )
    expected = slow_cross_entropy(logits, labels, mean_over, num_old)
    assert_value(losses.unbiased_cross_entropy(logits, labels, num_old, mean_over), expected)
    assert_gradient(lambda z: losses.unbiased_cross_entropy(z, labels, num_old, mean_over), logits)


def test_unbiased_cross_entropy_takes_any_old_label_as_old():
    # Sequential mode keeps old labels: they mean "one of the old classes", as background does.
    logits, labels = random_logits(), random_labels()
    expected = slow_cross_entropy(logits, labels, "all", 3)
    assert_value(losses.unbiased_cross_entropy(logits, labels, 3), expected)


@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_unbiased_cross_entropy_with_one_old_class_is_cross_entropy(mean_over):
    logits, labels = random_logits(), random_labels()
    actual = losses.unbiased_cross_entropy(logits, labels, 1, mean_over)
    torch.testing.assert_close(actual, losses.cross_entropy(logits, labels, mean_over), **EXACT)


def test_mean_over_all_is_the_default_and_counts_void_pixels():
    logits, labels = random_logits(), random_labels()
    valid_share = (labels != IGNORE_INDEX).double().mean()
    for loss in (
        losses.cross_entropy,
        lambda z, y, *m: losses.unbiased_cross_entropy(z, y, 2, *m),
        losses.binary_cross_entropy,
    ):
        torch.testing.assert_close(loss(logits, labels), loss(logits, labels, "all"), rtol=0, atol=0)
        torch.testing.assert_close(
            loss(logits, labels, "all"), loss(logits, labels, "valid") * valid_share, **EXACT
        )


@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_only_void_pixels_give_zero_loss_and_zero_gradient(mean_over):
    labels = torch.full((B, H, W), IGNORE_INDEX)
    for loss in (
        losses.cross_entropy,
        lambda z, y, m: losses.unbiased_cross_entropy(z, y, 2, m),
        losses.binary_cross_entropy,
    ):
        logits = random_logits().requires_grad_()
        value = loss(logits, labels, mean_over)
        value.backward()
        assert value.item() == 0
        assert not logits.grad.any()


def test_void_pixels_give_no_gradient():
    labels = random_labels()
    for loss in (
        losses.cross_entropy,
        lambda z, y: losses.unbiased_cross_entropy(z, y, 3),
        losses.binary_cross_entropy,
    ):
        logits = random_logits().requires_grad_()
        loss(logits, labels).backward()
        reached = logits.grad.abs().sum(1) > 0
        assert torch.equal(reached, labels != IGNORE_INDEX)


@pytest.mark.parametrize("num_old", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (losses.distillation, slow_distillation),
        (losses.unbiased_distillation, slow_unbiased_distillation),
        (losses.binary_distillation, slow_binary_distillation),
    ],
    ids=["distillation", "unbiased", "binary"],
)
def test_distillations(fast, slow, num_old):
    student, teacher = random_logits(), random_logits(num_old, seed=2)
    assert_value(fast(student, teacher), slow(student, teacher))
    assert_gradient(lambda z: fast(z, teacher), student)


def test_distillation_leaves_new_logits_alone():
    student, teacher = random_logits().requires_grad_(), random_logits(3, seed=2)
    (losses.distillation(student, teacher) + losses.binary_distillation(student, teacher)).backward()
    assert not student.grad[:, 3:].any()
    assert student.grad[:, :3].all()


@pytest.mark.parametrize("mean_over", ["all", "valid"])
@pytest.mark.parametrize("void", [False, True])
def test_binary_cross_entropy(void, mean_over):
    logits, labels = random_logits(), random_labels(void=void)
    expected = slow_binary_cross_entropy(logits, labels, mean_over)
    assert_value(losses.binary_cross_entropy(logits, labels, mean_over), expected)
    assert_gradient(lambda z: losses.binary_cross_entropy(z, labels, mean_over), logits)


def test_feature_distillation_is_the_mean_square_over_elements():
    student, teacher = random_logits(seed=3), random_logits(seed=4)
    pairs = list(zip(student.flatten().tolist(), teacher.flatten().tolist(), strict=True))
    expected = sum((s - t) ** 2 for s, t in pairs) / len(pairs)
    assert_value(losses.feature_distillation(student, teacher), expected)
    assert_gradient(lambda s: losses.feature_distillation(s, teacher), student)


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_far_logits_stay_finite(scale):
    # exp overflows long before these: only a log-sum-exp form survives float32.
    labels = random_labels()
    labels[labels == 1] = BACKGROUND
    teacher = (scale * random_logits(2, seed=2)).float()
    for loss in (
        lambda z: losses.cross_entropy(z, labels),
        lambda z: losses.unbiased_cross_entropy(z, labels, 2),
        lambda z: losses.distillation(z, teacher),
        lambda z: losses.unbiased_distillation(z, teacher),
        lambda z: losses.binary_distillation(z, teacher),
    ):
        logits = (scale * random_logits()).float().requires_grad_()
        value = loss(logits)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("num_old", [1, 2, 4])
@pytest.mark.parametrize("num_new", [1, 3])
def test_background_initialisation_is_a_stationary_point_of_unbiased_distillation(num_old, num_new):
    # w_new = w_bkg and both biases b_bkg - log(n + 1): n + 1 equal shares of the old background.
    teacher = random_logits(num_old, seed=5)
    share = teacher[:, :1] - math.log(num_new + 1)
    student = torch.cat([share, teacher[:, 1:], share.expand(-1, num_new, -1, -1)], dim=1).requires_grad_()
    losses.unbiased_distillation(student, teacher).backward()
    torch.testing.assert_close(student.grad, torch.zeros_like(student.grad), rtol=0, atol=1e-14)
    torch.testing.assert_close(student.softmax(1)[:, 1:num_old], teacher.softmax(1)[:, 1:], **EXACT)


def test_the_segmenter_initialises_new_classes_so():
    torch.manual_seed(0)
    model = build_segmenter("resnet18", head_channels=8).double()
    for num in (3, 2):
        model.add_classes(num)
    model.double()  # classes are added in the default type
    torch.nn.init.normal_(model.classifiers[0].weight)  # a classifier that has learnt something
    torch.nn.init.normal_(model.classifiers[0].bias)
    model.eval()
    image = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    teacher = model.frozen_copy()
    with torch.no_grad():
        before = teacher(image).logits
    num_old, num_new = model.num_classes, 4
    model.add_classes(num_new)
    model.double()
    model.init_new_from_background()
    student = model(image).logits
    student.retain_grad()
    losses.unbiased_distillation(student, before).backward()
    assert student.shape[1] == num_old + num_new
    torch.testing.assert_close(student.grad, torch.zeros_like(student.grad), rtol=0, atol=1e-14)
    after = student.detach().softmax(1)
    torch.testing.assert_close(after[:, 1:num_old], before.softmax(1)[:, 1:], rtol=1e-9, atol=1e-12)
    shares = after[:, [0, *range(num_old, num_old + num_new)]]
    torch.testing.assert_close(
        shares, (before.softmax(1)[:, :1] / (num_new + 1)).expand_as(shares), rtol=1e-9, atol=1e-12
    )


# Methods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["15-1", "15-5"])
def test_published_strengths(protocol):
    mib = 100.0 if protocol == "15-1" else 10.0
    published = {"ft": 0, "lwf": 100, "lwf_mc": 10, "ilt": 100, "ewc": 500, "rw": 100, "pi": 500, "mib": mib}
    assert {name: published_strength(name, protocol) for name in published} == published


@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_step_0_is_one_objective_but_for_lwf_mc(mean_over):
    logits, labels = random_logits(), random_labels()
    expected = slow_cross_entropy(logits, labels, mean_over)
    for name in ("ft", "lwf", "ilt", "ewc", "pi", "rw", "mib"):
        assert_value(make_method(name, mean_over).segmentation_loss(logits, labels), expected)
    expected = slow_binary_cross_entropy(logits, labels, mean_over)
    assert_value(make_method("lwf_mc", mean_over).segmentation_loss(logits, labels), expected)


@pytest.mark.parametrize(
    ("name", "slow"),
    [("lwf", slow_distillation), ("mib", slow_unbiased_distillation), ("lwf_mc", slow_binary_distillation)],
)
def test_what_a_method_keeps(name, slow):
    student = Output(random_logits(), random_logits(3, seed=6))
    teacher = Output(random_logits(2, seed=2), random_logits(3, seed=7))
    (term,) = make_method(name).retention_losses(student, teacher).values()
    assert_value(term, slow(student.logits, teacher.logits))


def test_ilt_keeps_output_and_features_with_equal_weight():
    student = Output(random_logits(), random_logits(3, seed=6))
    teacher = Output(random_logits(2, seed=2), random_logits(3, seed=7))
    expected = slow_distillation(student.logits, teacher.logits)
    expected += ((student.features - teacher.features) ** 2).mean().item()
    assert_value(sum(make_method("ilt").retention_losses(student, teacher).values()), expected)
