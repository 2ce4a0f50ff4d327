"""Activated batch normalisation: act(batch_norm(x) * (|weight| + eps) + bias),
the unit the network is made of.

Three implementations with the same function and the same state (weight, bias, running_mean, running_var):
`abn`, pure PyTorch, twice differentiable, on any device; `abn_lean`, the same but keeping only its output for
the backward pass, which the next layer keeps anyway, and computing its input back from it; `iabn`, the
package inplace-abn, which does so in kernels. Statistics go over all ranks of an explicit process `group`;
without one every rank keeps to its own batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from models.synchronised import synchronised_batch_norm

NORMS = ("abn", "abn_lean", "iabn")
ACTIVATIONS = ("leaky_relu", "identity")
LEAKY_SLOPE = 0.01
EPS = 1e-5

NormFactory = Callable[..., nn.Module]  # (num_features, activation="leaky_relu") -> norm


def make_norm(kind: str, group: dist.ProcessGroup | None = None) -> NormFactory:
    """Return the constructor (num_features, activation) of every norm in a network;
    `group` synchronises its statistics.
    """
    if kind not in NORMS:
        raise ValueError(f"unknown norm {kind!r}: model.norm is one of {', '.join(NORMS)}")
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    if kind == "abn":
        return partial(ABN, group=group)
    if kind == "abn_lean":
        if group is not None:
            raise ValueError(
                "model.norm=abn_lean keeps the statistics of each process apart: "
                "use model.norm=abn or iabn, or model.sync=false"
            )
        return LeanABN
    return _make_inplace_norm(group)


def _make_inplace_norm(group: dist.ProcessGroup | None) -> NormFactory:
    try:
        import inplace_abn
    except ImportError as error:
        raise ValueError(
            f"model.norm=iabn needs the package inplace-abn, which cannot be imported ({error}). Install it "
            "with `SETUPTOOLS_SCM_PRETEND_VERSION=1.1.0 pip install --no-build-isolation "
            "inplace-abn==1.1.0`, or use model.norm=abn, which computes the same"
        ) from error
    if group is None:
        return partial(_inplace_norm, inplace_abn.InPlaceABN)
    if not torch.cuda.is_available() or dist.get_backend(group) == "gloo":
        raise ValueError(
            "model.norm=iabn synchronises its statistics on CUDA devices only: "
            "use model.norm=abn, or model.sync=false to keep the statistics of each process apart"
        )
    return partial(_inplace_norm, inplace_abn.InPlaceABNSync, group=group)


def _inplace_norm(
    kernel: Callable[..., Any], num_features: int, activation: str = "leaky_relu", **options: Any
) -> nn.Module:
    norm = kernel(num_features, eps=EPS, activation=activation, activation_param=LEAKY_SLOPE, **options)
    # The package counts batches and adds the count to what is loaded; without it the states of both norms are
    # one.
    norm.num_batches_tracked = None
    norm.register_load_state_dict_pre_hook(_drop_batch_count)
    return norm


def _drop_batch_count(module: nn.Module, state: dict, prefix: str, *_: Any) -> None:
    state.pop(f"{prefix}num_batches_tracked", None)


class ABN(nn.Module):
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        activation: str = "leaky_relu",
        *,
        eps: float = EPS,
        momentum: float = 0.1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        self.num_features = num_features
        self.activation = activation
        self.eps = eps
        self.momentum = momentum
        self.group = group
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs() + self.eps
        tensors = x, self.running_mean, self.running_var, scale, self.bias
        if self.training and self.group is not None:
            x = synchronised_batch_norm(*tensors, self.momentum, self.eps, self.group)
        else:
            x = F.batch_norm(*tensors, self.training, self.momentum, self.eps)
        if self.activation == "leaky_relu":
            # In place: neither form of batch_norm needs its own output for the backward pass.
            x = F.leaky_relu(x, LEAKY_SLOPE, inplace=True)
        return x

    def extra_repr(self) -> str:
        synchronised = ", synchronised" if self.group is not None else ""
        return f"{self.num_features}, {self.activation}{synchronised}"


def add_and_activate(norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """leaky_relu(norm(x) + residual): the end of a residual block, whose norm has no activation."""
    if isinstance(norm, LeanABN) and norm.training:
        return norm.normalise(x, residual, LEAKY_SLOPE)
    return F.leaky_relu(norm(x) + residual, LEAKY_SLOPE, inplace=True)


class LeanABN(ABN):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return self.normalise(x, None, LEAKY_SLOPE if self.activation == "leaky_relu" else 1.0)

    def normalise(self, x: Tensor, residual: Tensor | None, slope: float) -> Tensor:
        scale = self.weight.abs() + self.eps
        statistics = self.running_mean, self.running_var, self.momentum, self.eps
        return _ActivatedBatchNorm.apply(x, residual, scale, self.bias, slope, *statistics)


class _ActivatedBatchNorm(torch.autograd.Function):
    """leaky_relu(batch_norm(x) + residual), which can be undone since slope and scale are positive."""

    @staticmethod
    def forward(ctx, x, residual, scale, bias, slope, running_mean, running_var, momentum, eps):
        y, _, inverse_std = torch.native_batch_norm(
            x, scale, bias, running_mean, running_var, True, momentum, eps
        )
        if residual is not None:
            y += residual
        if slope != 1.0:
            F.leaky_relu_(y, slope)
        ctx.save_for_backward(y, residual, scale, bias, inverse_std)
        ctx.slope, ctx.eps = slope, eps
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, residual, scale, bias, inverse_std = ctx.saved_tensors
        per_channel = (1, -1) + (1,) * (y.dim() - 2)
        scale_, bias_, inverse_std_ = (t.view(per_channel).to(y.dtype) for t in (scale, bias, inverse_std))
        if ctx.slope != 1.0:
            grad = torch.ops.aten.leaky_relu_backward(grad, y, ctx.slope, True)
            y = F.leaky_relu(y, 1 / ctx.slope)
        grad_residual = grad if residual is not None else None
        if residual is not None:
            y = y - residual
        normalised = (y - bias_).div_(scale_)
        # As the input of a batch norm, the normalised values have mean 0 and deviation 1.
        mean, inverse_of_one = torch.zeros_like(inverse_std), torch.ones_like(inverse_std)
        grad, grad_scale, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, normalised, scale, None, None, mean, inverse_of_one, True, ctx.eps, [True, True, True]
        )
        return grad.mul_(inverse_std_), grad_residual, grad_scale, grad_bias, *[None] * 5
