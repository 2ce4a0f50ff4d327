"""The DeepLab-v3 head of torchvision with one more 3x3 convolution: that of DKD and STAR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ASPP(nn.Module):
    """in_channels -> out_channels at the same resolution.

    Five branches side by side, one of them pooled over the whole map, in training and in eval; norms are
    PyTorch's, followed by a ReLU. So what it gives is never negative.
    """

    def __init__(
        self, in_channels: int, out_channels: int = 256, *, dilations: Sequence[int] = (6, 12, 18)
    ) -> None:
        super().__init__()
        self.out_channels = out_channels
        branches = [_unit(in_channels, out_channels, 1)]
        branches += [_unit(in_channels, out_channels, 3, dilation) for dilation in dilations]
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), *_unit(in_channels, out_channels, 1))
        self.convs = nn.ModuleList([*branches, pool])
        self.project = nn.Sequential(*_unit(5 * out_channels, out_channels, 1), nn.Dropout(0.1))
        self.last_conv = _unit(out_channels, out_channels, 3, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        *branches, pool = self.convs
        maps = [branch(x) for branch in branches]
        maps.append(pool(x).expand_as(maps[0]))  # as enlarging a single place
        return self.last_conv(self.project(torch.cat(maps, dim=1)))


def _unit(in_channels: int, out_channels: int, size: int, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (size // 2)
    conv = nn.Conv2d(in_channels, out_channels, size, padding=padding, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))
