"""torchvision's ResNets as they are: PyTorch's norms, scaled by the signed weight, and plain ReLUs.

The first block of a stage that dilates instead of striding has the dilation of the stage before, as in
torchvision; those of models/resnet.py, as in MiB, have their own stage's there.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from models.backbone import Backbone, register
from models.norm import NormFactory


class ReluResNet(Backbone):
    """What came before the ReLU of a stage cannot be computed back: stages are compared as they are."""

    signed_norms = True
    stride_in_1x1 = False
    channels = (256, 512, 1024, 2048)
    stem: tuple[str, ...] = ("conv1", "bn1", "relu", "maxpool")

    def __init__(self, name: str, output_stride: int) -> None:
        super().__init__()
        from data.vision import torchvision

        dilated = [False, output_stride == 8, True]
        network = torchvision.models.get_model(name, weights=None, replace_stride_with_dilation=dilated)
        for part, module in network.named_children():
            if part not in ("avgpool", "fc"):
                self.add_module(part, module)

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each of the four stages gives."""
        for part, module in self.named_children():
            x = module(x)
            if part not in self.stem:
                yield x


@register("resnet50_relu")
def resnet50_relu(*, output_stride: int, norm: NormFactory) -> nn.Module:
    return ReluResNet("resnet50", output_stride)


@register("resnet101_relu")
def resnet101_relu(*, output_stride: int, norm: NormFactory) -> nn.Module:
    return ReluResNet("resnet101", output_stride)
