"""What a backbone is: the part of the network that turns images into features,
built by a registered function.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from configs.registry import Registry
from models.norm import NormFactory


class Colours(NamedTuple):
    """Mean and standard deviation of each colour channel, 0 to 1, which a backbone's images are normalised by."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Backbone(nn.Module):
    """What every backbone is: a module that says these things of itself.

    tests/test_backbones.py holds every registered one to them.
    """

    channels: tuple[int, ...]  # of what each stage gives
    colours: Colours = IMAGENET
    stride_in_1x1: bool | None = None  # where a bottleneck halves the resolution; None: it has no such block

    @property
    def out_channels(self) -> int:
        """Channels of the last stage, which the head is given."""
        return self.channels[-1]

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each stage gives, in order; the last is what the head is given, at the output stride."""
        raise NotImplementedError

    def before_activation(self, stage: Tensor) -> Tensor:
        """What a stage gives, without the activation it ends with: some methods compare that."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last stage gives."""
        *_, features = self.stages(x)
        return features


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
