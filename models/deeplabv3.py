"""The DeepLab-v3 head of the MiB family: parallel dilated convolutions plus an
image-level branch that is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.norm import LEAKY_SLOPE, NormFactory


class DeepLabV3(nn.Module):
    """in_channels -> out_channels at the same resolution.

    Training pools the whole map. In eval the pooling is an average over a window of `pooling_size` places
    around each place (borders replicated), so that larger images are seen as training saw its crops; None
    pools globally there too. A window as large as the map is global pooling.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        *,
        norm: NormFactory,
        dilations: Sequence[int] = (6, 12, 18),
        pooling_size: int | None = 32,
    ) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.pooling_size = pooling_size
        self.map_convs = nn.ModuleList([nn.Conv2d(in_channels, out_channels, 1, bias=False)])
        for dilation in dilations:
            self.map_convs.append(
                nn.Conv2d(in_channels, out_channels, 3, padding=dilation, dilation=dilation, bias=False)
            )
        mapped = out_channels * len(self.map_convs)
        self.map_bn = norm(mapped)
        self.red_conv = nn.Conv2d(mapped, out_channels, 1, bias=False)
        self.global_pooling_conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
        self.global_pooling_bn = norm(out_channels)
        self.pool_red_conv = nn.Conv2d(out_channels, out_channels, 1, bias=False)
        self.red_bn = norm(out_channels)

        gain = nn.init.calculate_gain("leaky_relu", LEAKY_SLOPE)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_normal_(module.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        out = self.map_bn(torch.cat([conv(x) for conv in self.map_convs], dim=1))
        pool = self.global_pooling_bn(self.global_pooling_conv(self._pool(x)))
        return self.red_bn(self.red_conv(out) + self.pool_red_conv(pool))

    def _pool(self, x: Tensor) -> Tensor:
        """B x C x 1 x 1 when the whole map is pooled, else B x C x H x W."""
        height, width = x.shape[-2:]
        if self.training or self.pooling_size is None or self.pooling_size >= max(height, width):
            return x.mean(dim=(2, 3), keepdim=True)
        window = min(self.pooling_size, height), min(self.pooling_size, width)
        pool = F.avg_pool2d(x, window, stride=1)
        top, left = (window[0] - 1) // 2, (window[1] - 1) // 2
        padding = (left, width - pool.shape[-1] - left, top, height - pool.shape[-2] - top)
        return F.pad(pool, padding, mode="replicate")
