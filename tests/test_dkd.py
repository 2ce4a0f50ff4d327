"""DKD: losses against loops over pixels, what is frozen, and how it starts."""

import math

import pytest
import torch
from conftest import TINY_NETWORK

from data.protocols import IGNORE_INDEX, steps_from_lists
from methods import Batch, make_method
from methods.losses import fused, plain
from models.segmenter import build_segmenter

STEPS = steps_from_lists([[1, 2, 3], [4, 5]])


def bce(z: float, y: float, pos_weight: float = 1.0) -> float:
    s = 1 / (1 + math.exp(-z))
    return -pos_weight * y * math.log(s) - (1 - y) * math.log(1 - s)


def pixels(*maps: torch.Tensor):
    """The values of maps (B, C, H, W) and (B, H, W) at each pixel."""
    flat = [m.movedim(1, -1).flatten(0, 2).tolist() if m.dim() == 4 else m.flatten().tolist() for m in maps]
    return zip(*flat, strict=True)


@pytest.mark.parametrize("losses", [plain, fused])
@pytest.mark.parametrize("pos_weight", [1.0, 2.5])
def test_foreground_cross_entropy_against_a_loop_over_pixels(losses, pos_weight):
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 2, 5, 4, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(6, (2, 5, 4))
    labels[0, 0] = IGNORE_INDEX
    loss = losses.foreground_cross_entropy(logits, labels, 4, pos_weight)
    slow = [bce(z, y == 4 + c, pos_weight) for zs, y in pixels(logits, labels) for c, z in enumerate(zs)]
    assert loss.item() == pytest.approx(sum(slow) / labels.numel(), rel=1e-12)
    loss.backward()
    for g, zs, y in pixels(logits.grad, logits, labels):
        for c, z in enumerate(zs):
            s, positive = 1 / (1 + math.exp(-z)), float(y == 4 + c)
            expected = (s * (1 - positive) - pos_weight * positive * (1 - s)) / labels.numel()
            assert g[c] == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def networks(double_precision):
    """Student and teacher of step 1 that differ, the method between them."""
    torch.manual_seed(1)
    method, student = make_method("dkd"), build_segmenter(**TINY_NETWORK)
    method.add_classifier(student, STEPS[0])
    teacher = student.frozen_copy()
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.1 * torch.randn_like(p))
    method.add_classifier(student, STEPS[1])
    for network in (student, teacher):
        method.attach(network, STEPS[1])
    method.begin_step(student, STEPS[1])
    return method, student.eval(), teacher


def test_the_terms_against_loops_over_pixels(networks):
    method, student, teacher = networks
    images, labels = torch.randn(2, 3, 16, 16), torch.randint(6, (2, 16, 16))
    batch = Batch(images, labels)
    ours, theirs = student(images), teacher(images)
    hidden = {"student": ours.hidden, "teacher": theirs.hidden}

    new = [bce(z, y == 4 + c) for zs, y in pixels(ours.logits[:, 3:], labels) for c, z in enumerate(zs)]
    auxiliary = torch.nn.functional.interpolate(
        student.further["auxiliary"](ours.hidden), size=(16, 16), mode="bilinear", align_corners=False
    )
    away = [bce(z, 0.0) for ((z,),) in pixels(auxiliary)]
    expected = sum(new) / labels.numel() + sum(away) / labels.numel()
    assert method.learn(ours, batch).item() == pytest.approx(expected, rel=1e-10)

    def part(network, features, sign):
        """sum over channels of (w_c)+ x_c or (w_c)- x_c, by hand, for the old classes."""
        weight = network.classifiers[0].weight[:, :, 0, 0]
        kept = torch.where(sign * weight > 0, weight, torch.zeros(()))
        return torch.einsum("kc,bchw->bkhw", kept, features)

    terms = method.keep(ours, theirs, batch)
    pairs = {"distillation": (ours.logits[:, :3], theirs.logits)}
    for name, sign in (("positive", 1), ("negative", -1)):
        pairs[name] = part(student, hidden["student"], sign), part(teacher, hidden["teacher"], sign)
    assert terms.keys() == pairs.keys()
    for name, (one, other) in pairs.items():
        slow = [
            bce(z, 1 / (1 + math.exp(-t)))
            for zs, ts in pixels(one, other)
            for z, t in zip(zs, ts, strict=True)
        ]
        assert terms[name].item() == pytest.approx(sum(slow) / (one.numel() / 3), rel=1e-10), name


def test_no_gradient_of_the_auxiliary_classifier_reaches_the_features(networks):
    _, student, _ = networks
    output = student(torch.randn(1, 3, 16, 16))
    output.extra["auxiliary"].sum().backward()
    assert student.further["auxiliary"].weight.grad is not None
    assert all(p.grad is None for part in (student.body, student.head) for p in part.parameters())


def test_new_classes_start_as_the_auxiliary_classifier(networks):
    method, student, _ = networks
    method.init_classifier(student)
    images = torch.randn(1, 3, 16, 16)
    output = student(images)
    same = student.further["auxiliary"](output.hidden).expand(-1, 2, -1, -1)
    new = student.classifiers[-1](output.hidden)
    assert torch.equal(new, same)


def test_positive_and_negative_parts_add_up_to_the_scores_without_bias(networks):
    _, student, _ = networks
    output = student(torch.randn(1, 3, 16, 16))
    bias = torch.cat([c.bias for c in student.classifiers])[:, None, None]
    small = torch.cat([c(output.hidden) for c in student.classifiers], dim=1)
    assert torch.allclose(output.extra["positive"] + output.extra["negative"] + bias, small)
