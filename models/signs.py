"""Norms that are scaled by their weight, w, as ours, which are scaled by |w| + eps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.deeplabv3 import DeepLabV3
from models.norm import EPS

State = dict[str, Tensor]


def without_signs(network: nn.Module, state: State) -> State:
    """Plain batch norms, scaled by w, as ours, scaled by |w| + eps: the same function.

    w (conv(x) - mean) = |w| (-conv(x) + mean) for w < 0, so the filter and the mean change their sign. Only a
    scale below eps has no exact counterpart and becomes eps; its weight stays above 0, where |w| has a
    gradient.
    """
    state = dict(state)
    for name, parts in _convolutions_before(network).items():
        weight = state[f"{name}.weight"]
        sign = torch.where(weight < 0, -1.0, 1.0).to(weight.dtype)
        for convs, part in zip(parts, sign.chunk(len(parts)), strict=True):
            for conv in convs:
                state[f"{conv}.weight"] = state[f"{conv}.weight"] * part.view(-1, 1, 1, 1)
        state[f"{name}.running_mean"] = state[f"{name}.running_mean"] * sign
        state[f"{name}.weight"] = (weight.abs() - EPS).clamp(min=torch.finfo(weight.dtype).tiny)
    return state


def _convolutions_before(network: nn.Module) -> dict[str, list[list[str]]]:
    """Name of a norm -> for each equal part of its channels, the convolutions whose sum it normalises."""
    before: dict[str, list[list[str]]] = {}
    conv = ""
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            conv = name
        elif hasattr(module, "running_mean"):
            before[name] = [[conv]]  # every norm follows its convolution, but for two of the head
    for name, module in network.named_modules():
        if isinstance(module, DeepLabV3):
            before[f"{name}.map_bn"] = [[f"{name}.map_convs.{i}"] for i in range(len(module.map_convs))]
            before[f"{name}.red_bn"] = [[f"{name}.red_conv", f"{name}.pool_red_conv"]]
    return before


def negative_scales(network: nn.Module, state: State, remedy: str) -> str:
    """Return what to say of a MiB file whose norms are taken for InPlaceABN's: nothing,
    unless that makes a difference.
    """
    weights = [state[f"{name}.weight"] for name in _convolutions_before(network)]
    negative = sum(int((weight < 0).sum()) for weight in weights)
    if not negative:
        return ""
    return (
        f"note: {negative} of its {sum(map(len, weights))} norm weights are negative and taken as |weight| + "
        f"eps, as InPlaceABN does; a file that was trained with MiB's --norm_act abn needs {remedy}"
    )
