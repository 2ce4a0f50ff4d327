"""The losses of losses.py by hand: the same values and gradients several times faster, without their large temporaries.

Both of MiB's losses see the old foreground classes almost only through one number per pixel, the log-sum of their scores.
So these classes are summed up first (`_SumUp`), once for both losses; what remains is the formulas of losses.py on the few
channels left, and one product with the teacher (`_Match`). Pictures are worked on one by one, so that their scores stay in
the cache; each exponential is taken once, in what will become the gradient of the logits; the backward pass only scales it.
Hence one backward pass and no second derivative: whoever needs more takes `train.losses=plain`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from data.protocols import IGNORE_INDEX
from methods.losses import plain as losses
from methods.losses.plain import (
    binary_cross_entropy,
    binary_distillation,
    feature_distillation,
    local_pod,
    num_pixels,
)

__all__ = [
    "binary_cross_entropy",
    "binary_distillation",
    "cross_entropy",
    "distillation",
    "feature_distillation",
    "local_pod",
    "unbiased_cross_entropy",
    "unbiased_distillation",
    "weighted_cross_entropy",
]


def cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    return _CrossEntropy.apply(logits, labels) / num_pixels(labels, mean_over)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, mean_over: str = "all") -> Tensor:
    pictures = zip(logits.split(1), labels.split(1), strict=True)
    totals = torch.stack([_CrossEntropy.apply(z, y) for z, y in pictures])
    return (totals * weights).sum() / num_pixels(labels, mean_over)


def unbiased_cross_entropy(logits: Tensor, labels: Tensor, num_old: int, mean_over: str = "all") -> Tensor:
    if num_old == 1:
        return cross_entropy(logits, labels, mean_over)
    shifted = (labels - (num_old - 2)).clamp(min=0)
    few_labels = torch.where(labels == IGNORE_INDEX, labels, shifted)
    return losses.unbiased_cross_entropy(sum_up(logits, num_old), few_labels, 2, mean_over)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return unbiased_distillation(student[:, : teacher.shape[1]], teacher)


def unbiased_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """With q = softmax(teacher) summing to one, Eq. 8 is  lse(z) - q_0 lse(z_0, z_new) - sum_{1 <= c < num_old} q_c z_c."""
    num_old = teacher.shape[1]
    if num_old == 1:  # nothing but background
        return losses.unbiased_distillation(student, teacher)
    few = sum_up(student, num_old)
    match, q_background = _Match.apply(student, teacher)
    per_pixel = few.logsumexp(dim=1) - q_background * few[:, 1:].logsumexp(dim=1) - match
    return per_pixel.mean() / num_old


def sum_up(logits: Tensor, num_old: int) -> Tensor:
    """(B, 2 + num_new, H, W): the log-sum of the old foreground classes, the background and the new classes.

    It stays with the logits, for the next loss that asks.
    """
    key = num_old, logits._version, logits.requires_grad and torch.is_grad_enabled()
    holder: Any = logits
    known, few = getattr(holder, "_summed_up", (None, holder))
    if known != key or (few.requires_grad and few.grad_fn.gradient is None):  # its backward pass is over
        few = _SumUp.apply(logits, num_old)
        holder._summed_up = key, few
    return few


class _SumUp(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_old: int) -> Tensor:
        gradient = torch.empty_like(logits)
        few = logits.new_empty(len(logits), 2 + logits.shape[1] - num_old, *logits.shape[2:])
        scale = torch.empty_like(few[:, 0])
        for d, z, f, s in zip(gradient, logits, few, scale, strict=True):
            total = _exponentials(z[1:num_old], out=d[1:num_old], log_sum=f[0])
            torch.reciprocal(total, out=s)
            f[1] = z[0]
            f[2:] = z[num_old:]
        ctx.gradient, ctx.scale, ctx.num_old = gradient, scale, num_old
        return few

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        gradient, num_old = _take_gradient(ctx), ctx.num_old
        for d, share, s in zip(gradient, g, ctx.scale, strict=True):
            d[0] = share[1]
            d[1:num_old].mul_(share[0] * s)
            d[num_old:] = share[2:]
        return gradient, None


class _Match(Function):
    """sum_{1 <= c < num_old} q_c z_c per pixel, and q_0."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        num_old = teacher.shape[1]
        gradient = torch.empty_like(student)
        match, q_background, scale = (torch.empty_like(student[:, 0]) for _ in range(3))
        for d, z, t, m, q_0, s in zip(gradient, student, teacher, match, q_background, scale, strict=True):
            q = d[:num_old]  # but for the scale
            torch.reciprocal(_exponentials(t, out=q), out=s)
            torch.mul(q[0], s, out=q_0)
            torch.sum(q[1:] * z[1:num_old], 0, out=m).mul_(s)
        ctx.gradient, ctx.scale, ctx.num_old = gradient, scale, num_old
        ctx.mark_non_differentiable(q_background)
        return match, q_background

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None]:
        gradient = _take_gradient(ctx)
        for d, share, s in zip(gradient, g, ctx.scale, strict=True):
            d[0] = 0
            d[1 : ctx.num_old].mul_(share * s)
            d[ctx.num_old :] = 0
        return gradient, None


class _CrossEntropy(Function):
    """Sum over valid pixels of -log p_y."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        gradient = torch.empty_like(logits)
        total = logits.new_zeros(())
        for d, z, y in zip(gradient, logits, labels, strict=True):
            valid = y != IGNORE_INDEX
            y = y.where(valid, 0)[None]
            log_sum = torch.empty_like(z[0])
            d *= valid / _exponentials(z, out=d, log_sum=log_sum)
            d.scatter_add_(0, y, -valid.to(d.dtype)[None])
            total += (log_sum - z.gather(0, y)[0]).where(valid, 0).sum()
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _take_gradient(ctx).mul_(g), None


def _exponentials(z: Tensor, out: Tensor, log_sum: Tensor | None = None) -> Tensor:
    """exp(z - max) into `out`, log sum exp(z) into `log_sum`; returns the sum of `out`. All over the classes."""
    largest = z.amax(0)
    torch.sub(z, largest, out=out).exp_()
    total = out.sum(0)
    if log_sum is not None:
        torch.log(total, out=log_sum).add_(largest)
    return total


def _take_gradient(ctx: Any) -> Tensor:
    if torch.is_grad_enabled():  # create_graph=True: the second derivative would silently lack these terms
        raise RuntimeError("the fused losses cannot be differentiated twice: set train.losses=plain")
    if ctx.gradient is None:
        raise RuntimeError("the fused losses allow one backward pass: set train.losses=plain for more")
    gradient, ctx.gradient = ctx.gradient, None
    return gradient
