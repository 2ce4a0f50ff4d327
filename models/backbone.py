"""What a backbone is: the part of the network that turns images into features,
built by a registered function.
"""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from configs.registry import Registry
from models.norm import NormFactory


class Backbone(Protocol):
    """A module as the segmenter uses it; models/resnet.py and models/mobilenet.py are two."""

    out_channels: int  # of the last stage

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each stage gives, in order; the last is what the head is given, at the output stride."""

    def before_activation(self, stage: Tensor) -> Tensor:
        """What a stage gives, without the activation it ends with: some methods compare that."""


class MakeBackbone(Protocol):
    def __call__(self, *, output_stride: int, norm: NormFactory) -> nn.Module:
        """Return a new backbone whose features are `output_stride` times smaller than the images."""


BACKBONES: Registry[MakeBackbone] = Registry("model.body", "models")
register = BACKBONES.register


def build_backbone(name: str, *, output_stride: int, norm: NormFactory) -> nn.Module:
    backbone = BACKBONES.find(name)(output_stride=output_stride, norm=norm)
    missing = [
        part for part in ("out_channels", "stages", "before_activation") if not hasattr(backbone, part)
    ]
    if missing:
        raise ValueError(
            f"model.body: {name!r} has no {missing[0]}; models/backbone.py says what a backbone needs"
        )
    return backbone
