"""What the loss head is measured against: MiB's losses as they were before it,
on logits of the whole batch at full size.

Nothing else uses them. They were written out by hand, too, with one log-sum shared by both terms.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from data.protocols import IGNORE_INDEX
from methods.losses import plain as losses


def enlarge(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def unbiased_cross_entropy(logits: Tensor, labels: Tensor, num_old: int, mean_over: str = "all") -> Tensor:
    shifted = (labels - (num_old - 2)).clamp(min=0)
    few_labels = torch.where(labels == IGNORE_INDEX, labels, shifted)
    return losses.unbiased_cross_entropy(sum_up(logits, num_old), few_labels, 2, mean_over)


def unbiased_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """With q = softmax(teacher) summing to one, Eq.

    8 is lse(z) - q_0 lse(z_0, z_new) - sum_{1 <= c < num_old} q_c z_c.
    """
    num_old = teacher.shape[1]
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


def _exponentials(z: Tensor, out: Tensor, log_sum: Tensor | None = None) -> Tensor:
    """exp(z - max) into `out`, log sum exp(z) into `log_sum`; returns the sum of `out`.

    All over the classes.
    """
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
