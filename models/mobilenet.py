"""torchvision's MobileNetV2 as a light backbone with a chosen output stride."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from models.backbone import Backbone, register
from models.norm import ABN, NormFactory

STAGE_ENDS = (
    3,
    6,
    13,
    17,
)  # blocks with 24, 32, 96 and 320 channels at the strides 4, 8, 16 and 32 (undilated)


class MobileNetV2(Backbone):
    """torchvision's `features` (same parameter names) with our norms and dilation instead of stride.

    Left out is the last layer, which widens 320 channels to 1280 for the ImageNet classifier: the dilated
    convolutions of the head, most of its work, then cost a quarter.
    """

    def __init__(self, *, output_stride: int, norm: NormFactory) -> None:
        super().__init__()
        from data.vision import torchvision

        network = torchvision.models.MobileNetV2(norm_layer=partial(norm, activation="identity"))
        self.features = network.features[:-1]
        self.channels = tuple(self.features[end].out_channels for end in STAGE_ENDS)
        pure = all(type(module) is ABN for module in self.modules() if hasattr(module, "running_mean"))
        for module in self.modules():
            if isinstance(module, nn.ReLU6):
                module.inplace = pure  # the other norms keep their output for the backward pass
        _dilate(self.features, output_stride)

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what the blocks before each change of resolution give, and the last one:
        they end without an activation.
        """
        for number, block in enumerate(self.features):
            x = block(x)
            if number in STAGE_ENDS:
                yield x


class DilatedDepthwise(nn.Conv2d):
    """A depthwise convolution with dilation d, on a CPU as an ordinary one over the d x d
    interleaved grids of the image.

    Neither grid sees the others, so the result is the same; and oneDNN has no fast backward pass for the
    dilated form.
    """

    def __init__(self, conv: nn.Conv2d, dilation: int) -> None:
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            3,
            groups=conv.groups,
            dilation=dilation,
            padding=dilation,
            bias=False,
            device="meta",
        )
        self.weight = conv.weight

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        d, plain = self.dilation[0], x.is_contiguous()
        height, width = x.shape[2:]
        x = F.pad(x, (0, -width % d, 0, -height % d))  # zeros, as beyond the border
        batch, channels, rows, columns = x.shape
        x = x.permute(0, 2, 3, 1).reshape(batch, rows // d, d, columns // d, d, channels)
        x = (
            x.permute(2, 4, 0, 1, 3, 5)
            .reshape(d * d * batch, rows // d, columns // d, channels)
            .permute(0, 3, 1, 2)
        )
        x = F.conv2d(x, self.weight, self.bias, padding=1, groups=self.groups)
        x = x.permute(0, 2, 3, 1).reshape(d, d, batch, rows // d, columns // d, channels)
        x = x.permute(2, 3, 0, 4, 1, 5).reshape(batch, rows, columns, channels).permute(0, 3, 1, 2)
        x = x[:, :, :height, :width]
        return x.contiguous() if plain else x  # else the channels stay last


def _dilate(features: nn.Module, output_stride: int) -> None:
    """Removes the strides beyond `output_stride`; the 3x3 convolutions after a
    removed stride see the same places.
    """
    reached, dilation = 1, 1
    for block in [module for module in features.modules() if isinstance(module, nn.Sequential)]:
        conv = block[0]
        if not isinstance(conv, nn.Conv2d) or conv.kernel_size == (1, 1):
            continue
        if dilation > 1:
            block[0] = DilatedDepthwise(conv, dilation)
        if conv.stride == (2, 2):
            if reached == output_stride:
                conv.stride = (1, 1)
                dilation *= 2
            else:
                reached *= 2


@register("mobilenet_v2")
def mobilenet_v2(*, output_stride: int, norm: NormFactory) -> MobileNetV2:
    return MobileNetV2(output_stride=output_stride, norm=norm)
