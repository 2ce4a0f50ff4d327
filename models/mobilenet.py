"""torchvision's MobileNetV2 as a light body with a chosen output stride."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from models.norm import ABN, NormFactory


class MobileNetV2(nn.Module):
    """torchvision's `features` (same parameter names) with our norms and dilation instead of stride.

    Left out is the last layer, which widens 320 channels to 1280 for the ImageNet classifier: the dilated convolutions of
    the head, most of its work, then cost a quarter.
    """

    def __init__(self, *, output_stride: int, norm: NormFactory) -> None:
        super().__init__()
        from data.vision import torchvision

        network = torchvision.models.MobileNetV2(norm_layer=partial(norm, activation="identity"))
        self.features = network.features[:-1]
        self.out_channels = self.features[-1].out_channels
        pure = all(isinstance(module, ABN) for module in self.modules() if hasattr(module, "running_mean"))
        for module in self.modules():
            if isinstance(module, nn.ReLU6):
                module.inplace = pure  # iabn keeps its output for the backward pass, abn does not
        _dilate(self.features, output_stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def _dilate(features: nn.Module, output_stride: int) -> None:
    """Removes the strides beyond `output_stride`; the 3x3 convolutions after a removed stride see the same places."""
    reached, dilation = 1, 1
    for conv in features.modules():
        if not isinstance(conv, nn.Conv2d) or conv.kernel_size == (1, 1):
            continue
        conv.dilation = conv.padding = (dilation, dilation)
        if conv.stride == (2, 2):
            if reached == output_stride:
                conv.stride = (1, 1)
                dilation *= 2
            else:
                reached *= 2


def mobilenet_v2(*, output_stride: int, norm: NormFactory) -> MobileNetV2:
    return MobileNetV2(output_stride=output_stride, norm=norm)
