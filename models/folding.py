"""A network in eval mode with its norms folded into the convolutions before them:
the same outputs to rounding, in less time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from models.deeplabv3 import DeepLabV3
from models.norm import ACTIVATIONS, LEAKY_SLOPE
from models.resnet import BasicBlock, Bottleneck, ResNet


@torch.no_grad()
def fold_norms(network: nn.Module) -> None:
    """The network can no longer be trained, and its state is another one."""
    for module in list(network.modules()):
        for convs, name in _norms_after_convs(module):
            _fold(convs, getattr(module, name))
            leaky = getattr(module, name).activation == "leaky_relu"
            left = nn.LeakyReLU(LEAKY_SLOPE, inplace=True) if leaky else nn.Identity()
            setattr(module, name, left)


def _norms_after_convs(module: Any) -> Iterator[tuple[list[nn.Conv2d], str]]:
    """Yield the convolutions whose outputs, side by side or added up, a norm is given;
    and the name of the norm.

    Only of modules of which we know in which order they call their parts. What other backbones do is left as
    it is.
    """
    children = dict(module.named_children())
    pairs: list[tuple[str, str]] = []
    if isinstance(module, DeepLabV3):
        yield [*module.map_convs], "map_bn"
        yield [module.red_conv, module.pool_red_conv], "red_bn"
        pairs = [("global_pooling_conv", "global_pooling_bn")]
    elif isinstance(module, ResNet | BasicBlock | Bottleneck):
        pairs = [(name, name.replace("conv", "bn")) for name in children if name.startswith("conv")]
    elif type(module).forward is nn.Sequential.forward:
        pairs = list(pairwise(children))
    for conv, norm in pairs:
        if isinstance(children[conv], nn.Conv2d) and _is_ours(children[norm]):
            yield [children[conv]], norm


def _is_ours(norm: nn.Module) -> bool:
    """Return whether it scales by |weight| + eps: the norms of torch do not."""
    return hasattr(norm, "running_mean") and getattr(norm, "activation", None) in ACTIVATIONS


def _fold(convs: list[nn.Conv2d], norm: Any) -> None:
    tensors = norm.weight, norm.bias, norm.running_mean, norm.running_var
    weight, bias, mean, var = (tensor.double() for tensor in tensors)
    scale = (weight.abs() + norm.eps) * torch.rsqrt(var + norm.eps)
    shift = bias - mean * scale
    if sum(conv.out_channels for conv in convs) == len(scale):  # side by side
        sizes = [conv.out_channels for conv in convs]
        scales, shifts = list(scale.split(sizes)), list(shift.split(sizes))
    else:  # added up
        scales, shifts = [scale] * len(convs), [shift] + [torch.zeros_like(shift)] * (len(convs) - 1)
    for conv, scale_, shift_ in zip(convs, scales, shifts, strict=True):
        if conv.bias is not None:
            shift_ = shift_ + conv.bias.double() * scale_
        conv.weight = nn.Parameter((conv.weight.double() * scale_.view(-1, 1, 1, 1)).to(conv.weight.dtype))
        conv.bias = nn.Parameter(shift_.to(conv.weight.dtype))
