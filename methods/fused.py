"""The losses of losses.py by hand: the same values and gradients several times faster, without their large temporaries.

Loss and gradient come out of one pass, picture by picture, so that a picture's scores stay in the cache and each exponential
is taken once; the backward pass only scales. Kept in between is the gradient and nothing else. Not twice differentiable:
whoever needs that takes `train.losses=plain`. What is not here is as in losses.py.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from data.protocols import IGNORE_INDEX
from methods import losses
from methods.losses import binary_cross_entropy, binary_distillation, feature_distillation, num_pixels

__all__ = [
    "binary_cross_entropy",
    "binary_distillation",
    "cross_entropy",
    "distillation",
    "feature_distillation",
    "unbiased_cross_entropy",
    "unbiased_distillation",
]


def cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    return _CrossEntropy.apply(logits, labels, 0) / num_pixels(labels, mean_over)


def unbiased_cross_entropy(logits: Tensor, labels: Tensor, num_old: int, mean_over: str = "all") -> Tensor:
    if num_old == 1:
        return cross_entropy(logits, labels, mean_over)
    return _CrossEntropy.apply(logits, labels, num_old) / num_pixels(labels, mean_over)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return unbiased_distillation(student[:, : teacher.shape[1]], teacher)


def unbiased_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    if teacher.shape[1] == 1:  # nothing but background
        return losses.unbiased_distillation(student, teacher)
    return _Distillation.apply(student, teacher) / teacher.numel()


class _WithGradient(Function):
    """A scalar of (logits, *others) whose gradient to the logits is known when it is."""

    @classmethod
    def forward(cls, ctx, logits: Tensor, *others) -> Tensor:
        ctx.gradient = torch.empty_like(logits)
        return cls.loss_and_gradient(ctx.gradient, logits, *others)

    @staticmethod
    def backward(ctx, scale: Tensor) -> tuple[Tensor | None, ...]:
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True: the second derivative would silently lack these terms
            raise RuntimeError("the fused losses cannot be differentiated twice: set train.losses=plain")
        if ctx.gradient is None:
            raise RuntimeError("the fused losses allow one backward pass: set train.losses=plain for more")
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scale), *[None] * (len(ctx.needs_input_grad) - 1)


class _CrossEntropy(_WithGradient):
    """Sum over valid pixels of -log p_y; labels below `num_old` mean "one of the classes below num_old" (MiB Eq. 5).

    With the log-sums  all = lse(z)  and  old = lse(z_c, c < num_old):  loss = all - old  or  all - z_y,  and, for c < num_old,
    dloss/dz_c = exp(z_c - all) - [y < num_old] exp(z_c - old) = exp(z_c - old) (exp(old - all) - [y < num_old]).
    """

    @staticmethod
    def loss_and_gradient(gradient: Tensor, logits: Tensor, labels: Tensor, num_old: int) -> Tensor:
        total = logits.new_zeros(())
        for d, z, y in zip(gradient, logits, labels, strict=True):
            valid = y != IGNORE_INDEX
            is_old, is_new = y < num_old, valid & (y >= num_old)
            at_label = z.gather(0, y.where(valid, 0)[None])[0]
            new, sum_new = _exponentials(z[num_old:], out=d[num_old:])
            every = new
            if num_old:
                old, sum_old = _exponentials(z[:num_old], out=d[:num_old])
                every = torch.logaddexp(old, new)
                share = old - every
                d[:num_old] *= torch.expm1(share).where(is_old, share.exp()) * valid / sum_old
                at_label = old.where(is_old, at_label)
            d[num_old:] *= (new - every).exp_() * valid / sum_new
            d.scatter_add_(0, y.where(is_new, 0)[None], -is_new.to(d.dtype)[None])
            total += (every - at_label).where(valid, 0).sum()
        return total


class _Distillation(_WithGradient):
    """Sum over pixels of MiB's Eq. 8, with q = softmax(teacher) and the student's new classes counted as background.

    With  all = lse(z)  and  bkg = lse(z_0, z_new):  loss = all - q_0 bkg - sum_{1 <= c < num_old} q_c z_c, since q sums to one.
    """

    @staticmethod
    def loss_and_gradient(gradient: Tensor, student: Tensor, teacher: Tensor) -> Tensor:
        total = student.new_zeros(())
        kept, new = slice(1, teacher.shape[1]), slice(teacher.shape[1], None)
        for d, z, t in zip(gradient, student, teacher, strict=True):
            q = torch.empty_like(t)
            q /= _exponentials(t, out=q)[1]
            background = torch.logaddexp(z[0], z[new].logsumexp(0))
            foreground, sum_foreground = _exponentials(z[kept], out=d[kept])
            every = torch.logaddexp(foreground, background)
            d[kept] *= (foreground - every).exp_() / sum_foreground
            d[kept] -= q[kept]
            share = (background - every).exp_() - q[0]
            for hidden in (slice(0, 1), new):
                torch.sub(z[hidden], background, out=d[hidden]).exp_().mul_(share)
            q[0] *= background
            q[kept] *= z[kept]
            total += (every - q.sum(0)).sum()
        return total


def _exponentials(z: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """exp(z - max) into `out`; returns the log of the sum of exp(z), and the sum of `out`, both over the classes."""
    largest = z.amax(0)
    torch.sub(z, largest, out=out).exp_()
    total = out.sum(0)
    return total.log().add_(largest), total
