"""The fused losses against the plain ones: values and gradients, in every layout and for far logits."""

import pytest
import torch

from data.protocols import IGNORE_INDEX
from methods import METHODS, make_method
from methods.losses import fused
from methods.losses import plain as losses
from models import Output

SHAPE = (3, 7, 6, 5)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def tensors(num_old: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    student = (scale * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).to(dtype)
    teacher = (scale * torch.randn(SHAPE, generator=generator, dtype=torch.float64)).to(dtype)[:, :num_old]
    labels = torch.randint(SHAPE[1], (SHAPE[0], *SHAPE[2:]), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE_INDEX
    return student, teacher, labels


def value_and_gradient(loss, student):
    student = student.clone(memory_format=torch.preserve_format).requires_grad_()
    value = loss(student)
    (gradient,) = torch.autograd.grad(2.5 * value, student)
    return value.detach(), gradient


def assert_same(plain, fast, student):
    tolerance = TOLERANCE[student.dtype]
    for expected, got in zip(
        value_and_gradient(plain, student), value_and_gradient(fast, student), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mean_over", ["all", "valid"])
@pytest.mark.parametrize("num_old", [1, 2, 6])
def test_cross_entropies(num_old, mean_over, layout, dtype):
    student, _, labels = tensors(num_old, dtype)
    student = student.contiguous(memory_format=layout)
    for name, arguments in (("cross_entropy", ()), ("unbiased_cross_entropy", (num_old,))):
        plain, fast = getattr(losses, name), getattr(fused, name)
        assert_same(
            lambda z, f=plain, a=arguments: f(z, labels, *a, mean_over),
            lambda z, f=fast, a=arguments: f(z, labels, *a, mean_over),
            student,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("num_old", [1, 2, 6, 7])
@pytest.mark.parametrize("name", ["distillation", "unbiased_distillation"])
def test_distillations(name, num_old, layout, dtype):
    student, teacher, _ = tensors(num_old, dtype)
    student = student.contiguous(memory_format=layout)
    plain, fast = getattr(losses, name), getattr(fused, name)
    assert_same(lambda z: plain(z, teacher), lambda z: fast(z, teacher), student)


@pytest.mark.parametrize("scale", [100.0, 1000.0])
def test_far_logits(scale):
    """Probabilities underflow in single precision; the loss and its gradient must not."""
    student, teacher, labels = tensors(4, torch.float32, scale)
    for one, other in (
        (
            lambda z: losses.unbiased_cross_entropy(z, labels, 4),
            lambda z: fused.unbiased_cross_entropy(z, labels, 4),
        ),
        (lambda z: losses.cross_entropy(z, labels), lambda z: fused.cross_entropy(z, labels)),
        (
            lambda z: losses.unbiased_distillation(z, teacher),
            lambda z: fused.unbiased_distillation(z, teacher),
        ),
    ):
        assert value_and_gradient(other, student)[1].isfinite().all()
        assert_same(one, other, student)


@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_only_void_pixels(mean_over):
    student, _, labels = tensors(4, torch.float32)
    labels.fill_(IGNORE_INDEX)
    value, gradient = value_and_gradient(
        lambda z: fused.unbiased_cross_entropy(z, labels, 4, mean_over), student
    )
    assert value == 0 and not gradient.any()


def test_with_one_old_class_it_is_cross_entropy_to_the_last_bit():
    student, _, labels = tensors(1, torch.float32)
    for module in (losses, fused):
        one = value_and_gradient(lambda z, m=module: m.cross_entropy(z, labels), student)
        other = value_and_gradient(lambda z, m=module: m.unbiased_cross_entropy(z, labels, 1), student)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_the_same_with_either(name):
    student, teacher, labels = tensors(4, torch.float64)
    features = torch.randn(2, 3, 8, 4, 4, dtype=torch.float64)
    plain, fast = make_method(name), make_method(name, losses="fused")
    for method in (plain, fast):
        method.num_old = 4

    def objective(method):
        def total(z):
            outputs = (
                Output(scores, f, (f, scores)) for scores, f in zip((z, teacher), features, strict=True)
            )
            kept = method.retention_losses(*outputs)
            return method.segmentation_loss(z, labels) + 10 * sum(kept.values())

        return total

    assert_same(objective(plain), objective(fast), student)


def test_both_losses_share_one_sum():
    student, teacher, labels = tensors(4, torch.float64)
    student.requires_grad_()
    assert fused.sum_up(student, 4) is fused.sum_up(student, 4)
    assert fused.sum_up(student, 3) is not fused.sum_up(student, 4)
    with torch.no_grad():
        assert not fused.sum_up(student, 4).requires_grad
    assert fused.sum_up(student, 4).requires_grad
    for _ in range(2):  # the sum of a finished backward pass is not used again
        fused.unbiased_cross_entropy(student, labels, 4).backward()
    with torch.no_grad():
        student += 1.0  # nor that of other values
    total = fused.unbiased_cross_entropy(student, labels, 4) + 10 * fused.unbiased_distillation(
        student, teacher
    )
    expected = losses.unbiased_cross_entropy(student, labels, 4) + 10 * losses.unbiased_distillation(
        student, teacher
    )
    torch.testing.assert_close(
        torch.autograd.grad(total, student), torch.autograd.grad(expected, student), rtol=1e-12, atol=1e-12
    )


def test_it_refuses_what_it_cannot_do():
    student, teacher, labels = tensors(4, torch.float64)
    student.requires_grad_()
    for loss in (
        fused.unbiased_distillation(student, teacher),
        fused.unbiased_cross_entropy(student, labels, 4),
        fused.cross_entropy(student, labels),
    ):
        with pytest.raises(RuntimeError, match=r"train\.losses=plain"):
            torch.autograd.grad(loss, student, create_graph=True)
    loss = fused.cross_entropy(student, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"train\.losses=plain"):
        loss.backward()
