"""Batch normalisation over the union of the batches of all ranks, which may differ in size.

One map is kept for the backward pass, the input. On a GPU the function is PyTorch's own, whose kernels do the
same; elsewhere it is written in eager operations. Both exchange a few sums per channel in each direction.
Asked for a graph of the backward pass (create_graph), both take the eager formulas, whose exchanges can be
differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules._functions import SyncBatchNorm

Gradients = tuple[Tensor | None, ...]


def synchronised_batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    scale: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """F.batch_norm in training, with statistics over the group."""
    if not x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()  # PyTorch's function would keep a copy without its history
    normalise = FUNCTIONS.get(x.device.type, EagerSyncBatchNorm.apply)
    world_size = dist.get_world_size(group)
    return normalise(x, scale, bias, running_mean, running_var, eps, momentum, group, world_size)


class SynchronisedBatchNorm(nn.BatchNorm2d):
    """PyTorch's batch norm with statistics over a group; and timm's, which ends with an activation."""

    running_mean: Tensor
    running_var: Tensor
    group: dist.ProcessGroup | None  # None in a copy, which has no ranks beside it
    act: nn.Module
    drop: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.group is not None:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            statistics, momentum = (self.running_mean, self.running_var), self.momentum or 0.0
            x = synchronised_batch_norm(
                x, *statistics, self.weight, self.bias, momentum, self.eps, self.group
            )
        else:
            x = super().forward(x)
        return self.act(self.drop(x)) if hasattr(self, "act") else x


def synchronise_batch_norms(network: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give the batch norms of PyTorch and timm, which other backbones have, their statistics over the group.

    Their states and names stay. Norms of a single image, as LayerNorm, have nothing to exchange.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = SynchronisedBatchNorm
            cast(SynchronisedBatchNorm, module).group = group


class EagerSyncBatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
        momentum: float,
        group: dist.ProcessGroup,
        world_size: int,
    ) -> Tensor:
        full = x.to(torch.promote_types(x.dtype, scale.dtype))  # never sum in half precision
        mean, centred, var, count = _statistics(full, group)
        unbiased = var * (count / (count - 1).clamp(min=1))
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        inverse_std = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, scale, mean, inverse_std, count)
        ctx.eps, ctx.process_group = eps, group
        return centred.mul_(_per_channel(scale * inverse_std, x)).add_(_per_channel(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, grad)
        x, scale, mean, inverse_std, count = ctx.saved_tensors
        centred = x.to(mean.dtype) - _per_channel(mean, x)
        return _gradients(ctx, grad, centred, scale, inverse_std, count)


class TorchSyncBatchNorm(SyncBatchNorm):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.eps = arguments[5]
        return SyncBatchNorm.forward(ctx, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        if torch.is_grad_enabled():
            return _differentiable_gradients(ctx, grad)
        return SyncBatchNorm.backward(ctx, grad)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"cuda": TorchSyncBatchNorm.apply}  # by type of device


def _statistics(full: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, centred values, biased variance, and the values per channel of all ranks."""
    channels, dims = full.shape[1], _all_but_channels(full)
    sums = torch.cat([full.sum(dims), full.new_full((1,), full.numel() / channels)])
    total, count = all_reduce_sum(sums, group).split([channels, 1])
    mean = total / count
    # The mean first, then the centred squares: E[x^2] - E[x]^2 would cancel digits.
    centred = full - _per_channel(mean, full)
    var = all_reduce_sum(centred.square().sum(dims), group) / count
    return mean, centred, var, count


def _differentiable_gradients(ctx: Any, grad: Tensor) -> Gradients:
    """The statistics are computed once more, for they depend on the input."""
    x, scale, *_ = ctx.saved_tensors
    _, centred, var, count = _statistics(x.to(torch.promote_types(x.dtype, scale.dtype)), ctx.process_group)
    return _gradients(ctx, grad, centred, scale, torch.rsqrt(var + ctx.eps), count)


def _gradients(
    ctx: Any, grad: Tensor, centred: Tensor, scale: Tensor, inverse_std: Tensor, count: Tensor
) -> Gradients:
    """Of input, scale and bias; those of scale and bias are this rank's own, as of every other parameter."""
    dims = _all_but_channels(grad)
    full = grad.to(centred.dtype)
    of_bias, with_centred = full.sum(dims), (full * centred).sum(dims)
    of_scale = with_centred * inverse_std
    of_input = None
    if ctx.needs_input_grad[0]:
        sums = all_reduce_sum(torch.cat([of_bias, with_centred]), ctx.process_group)
        mean, slope = (sums / count).split(len(of_bias))
        # grad - mean(grad) - centred * mean(grad * centred) / var, all of it times scale / std
        of_input = (
            full - _per_channel(mean, grad) - centred * _per_channel(slope * inverse_std.square(), grad)
        )
        of_input = (of_input * _per_channel(scale * inverse_std, grad)).to(grad.dtype)
    return of_input, of_scale, of_bias, *[None] * 6


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks of `group`; differentiable any number of times,
    every rank must take part in each.
    """
    return _AllReduceSum.apply(x, group)


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Each rank's input feeds every rank's output, so its gradient is the sum of theirs.
        return _AllReduceSum.apply(grad, ctx.group), None
