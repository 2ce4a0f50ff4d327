"""ResNet backbones with torchvision's parameter names and a chosen output stride
(dilation instead of stride).

Every norm carries a leaky ReLU, except the last one of a block and the one of the projection: there it
follows the sum. resnet50_v1 and resnet101_v1 halve the resolution in the first 1x1 convolution of a stage, as
the networks of Caffe, Keras and detectron2's STRIDE_IN_1X1 do, the others in its 3x3 convolution, as those of
torchvision and MiB. Names and shapes are the same, the functions are not: models/strides.py keeps the files
apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from models.backbone import Backbone, register
from models.norm import LEAKY_SLOPE, NormFactory, add_and_activate


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, dilation: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, width, stride, dilation)
        self.bn1 = norm(width)
        self.conv2 = _conv3x3(width, width, 1, dilation)
        self.bn2 = norm(width, "identity")
        self.downsample = _projection(in_channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        return add_and_activate(self.bn2, self.conv2(out), self.downsample(x))


class Bottleneck(nn.Module):
    expansion = 4
    stride_in_1x1 = False

    def __init__(self, in_channels: int, width: int, stride: int, dilation: int, norm: NormFactory) -> None:
        super().__init__()
        out_channels = width * self.expansion
        first, second = (stride, 1) if self.stride_in_1x1 else (1, stride)
        self.conv1 = nn.Conv2d(in_channels, width, 1, stride=first, bias=False)
        self.bn1 = norm(width)
        self.conv2 = _conv3x3(width, width, second, dilation)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = norm(out_channels, "identity")
        self.downsample = _projection(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x))
        out = self.bn2(self.conv2(out))
        return add_and_activate(self.bn3, self.conv3(out), self.downsample(x))


class BottleneckV1(Bottleneck):
    """The stride comes before the 3x3 convolution, which then sees the coarser grid.

    A stage that dilates instead has no stride left, and there both kinds are one: its 3x3 convolutions see
    the places of the coarser grid.
    """

    stride_in_1x1 = True


def _conv3x3(in_channels: int, out_channels: int, stride: int, dilation: int) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, 3, stride=stride, padding=dilation, dilation=dilation, bias=False
    )


def _projection(in_channels: int, out_channels: int, stride: int, norm: NormFactory) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), norm(out_channels, "identity")
    )


class ResNet(Backbone):
    """Four stages of `block`; a stage that would exceed `output_stride` dilates its 3x3 convolutions instead.

    With the usual stem the dilations of the stages are 1, 1, 1, 2 at stride 16 and 1, 1, 2, 4 at stride 8.
    `small_images` halves the image once in the stem (3x3, no pooling) instead of twice (7x7, max-pooling).
    """

    slope = LEAKY_SLOPE
    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        output_stride: int,
        norm: NormFactory,
        width: int = 64,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if small_images:
            self.conv1 = _conv3x3(3, width, stride=2, dilation=1)
            self.maxpool: nn.Module = nn.Identity()
            reached = 2
        else:
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
            reached = 4
        self.bn1 = norm(width)

        channels, dilation = width, 1
        for stage, depth in enumerate(depths):
            stride = 1 if stage == 0 else 2
            if reached * stride > output_stride:
                dilation, stride = dilation * stride, 1
            reached *= stride
            blocks = []
            for index in range(depth):
                blocks.append(block(channels, width << stage, stride if index == 0 else 1, dilation, norm))
                channels = (width << stage) * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.channels = tuple((width << stage) * block.expansion for stage in range(len(depths)))
        self.stride_in_1x1 = getattr(block, "stride_in_1x1", None)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, a=LEAKY_SLOPE, mode="fan_out")

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each of the four stages gives."""
        x = self.maxpool(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
            yield x


@register("resnet18")
def resnet18(*, output_stride: int, norm: NormFactory) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), output_stride=output_stride, norm=norm)


@register("resnet34")
def resnet34(*, output_stride: int, norm: NormFactory) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), output_stride=output_stride, norm=norm)


@register("resnet50")
def resnet50(*, output_stride: int, norm: NormFactory) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), output_stride=output_stride, norm=norm)


@register("resnet101")
def resnet101(*, output_stride: int, norm: NormFactory) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 23, 3), output_stride=output_stride, norm=norm)


@register("resnet50_v1")
def resnet50_v1(*, output_stride: int, norm: NormFactory) -> ResNet:
    return ResNet(BottleneckV1, (3, 4, 6, 3), output_stride=output_stride, norm=norm)


@register("resnet101_v1")
def resnet101_v1(*, output_stride: int, norm: NormFactory) -> ResNet:
    return ResNet(BottleneckV1, (3, 4, 23, 3), output_stride=output_stride, norm=norm)


@register("resnet_tiny")
def resnet_tiny(*, output_stride: int, norm: NormFactory, width: int = 16) -> ResNet:
    """About 0.3 M parameters, for generated images of 64 pixels."""
    return ResNet(
        BasicBlock, (1, 1, 1, 1), output_stride=output_stride, norm=norm, width=width, small_images=True
    )
