"""A network in eval mode with its norms folded into the convolutions before them: the same outputs to rounding, in less time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.deeplabv3 import DeepLabV3
from models.norm import LEAKY_SLOPE


class Activation(nn.Module):
    """What is left of a folded norm."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, LEAKY_SLOPE, inplace=True)


@torch.no_grad()
def fold_norms(network: nn.Module) -> None:
    """The network can no longer be trained, and its state is another one."""
    for module in list(network.modules()):
        for convs, name in _norms_after_convs(module):
            _fold(convs, getattr(module, name))
            leaky = getattr(module, name).activation == "leaky_relu"
            setattr(module, name, Activation() if leaky else nn.Identity())


def _norms_after_convs(module: Any) -> Iterator[tuple[list[nn.Conv2d], str]]:
    """The convolutions whose outputs, side by side or added up, a norm is given; and the name of the norm."""
    if isinstance(module, DeepLabV3):
        yield [*module.map_convs], "map_bn"
        yield [module.global_pooling_conv], "global_pooling_bn"
        yield [module.red_conv, module.pool_red_conv], "red_bn"
        return
    children = dict(module.named_children())
    if isinstance(module, nn.Sequential):
        pairs = list(zip(children, list(children)[1:], strict=False))
    else:  # torchvision's names in the blocks of a ResNet
        pairs = [(name, name.replace("conv", "bn")) for name in children if name.startswith("conv")]
    for conv, norm in pairs:
        if isinstance(children[conv], nn.Conv2d) and hasattr(children.get(norm), "running_mean"):
            yield [children[conv]], norm


def _fold(convs: list[nn.Conv2d], norm: Any) -> None:
    double = [t.double() for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)]
    weight, bias, mean, var = double
    scale = (weight.abs() + norm.eps) * torch.rsqrt(var + norm.eps)
    shift = bias - mean * scale
    added_up = len(convs) > 1 and convs[0].out_channels == len(scale)
    start = 0
    for conv in convs:
        channels = slice(0, None) if added_up else slice(start, start + conv.out_channels)
        start += conv.out_channels
        folded = conv.weight.double() * scale[channels].view(-1, 1, 1, 1)
        dtype, trained = conv.weight.dtype, conv.weight.requires_grad
        conv.weight = nn.Parameter(folded.to(dtype), requires_grad=trained)
        if not added_up or conv is convs[0]:
            conv.bias = nn.Parameter(shift[channels].to(dtype), requires_grad=trained)
