"""What a backbone is: the part of the network that turns images into features,
built by what is registered under its name, or by timm.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from configs.registry import Registry
from models.norm import NormFactory

TIMM = "timm/"  # timm/<name> is a network of the package timm


class Colours(NamedTuple):
    """Mean and deviation of each colour, between 0 and 1, by which a backbone wants its images normalised."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Backbone(nn.Module):
    """What segmenter and methods know of a backbone; tests/test_backbones.py holds every one to it."""

    channels: tuple[int, ...]  # of what each stage gives
    slope: float = 1.0  # of the leaky ReLU that every stage ends with; 1 = there is none
    signed_norms: bool = False  # its norms scale by the weight itself, not by |weight| + eps
    note: str = ""  # what a run says of it once
    stride_in_1x1: bool | None = None  # or in 3x3; None = there is no such choice (models/strides.py)

    @property
    def out_channels(self) -> int:
        """Return the channels of the last stage, which the head is given."""
        return self.channels[-1]

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what each stage gives, in order; the last is what the head is given, at the output stride."""
        raise NotImplementedError

    def before_activation(self, stage: Tensor) -> Tensor:
        """Return what a stage gives, without the activation it ends with: some methods compare that."""
        return stage if self.slope == 1.0 else F.leaky_relu(stage, 1 / self.slope)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last stage gives."""
        *_, features = self.stages(x)
        return features


class MakeBackbone(Protocol):
    """What is registered, a function or a class.

    It may say `colours`, if they are not those of ImageNet.
    """

    def __call__(self, *, output_stride: int, norm: NormFactory) -> nn.Module:
        """Return a new backbone whose features are `output_stride` times smaller than the images."""


class Backbones(Registry[MakeBackbone]):
    """All that is registered, and every network of timm as timm/<name>."""

    def __getitem__(self, name: str) -> MakeBackbone:
        if not str(name).startswith(TIMM):
            return super().__getitem__(name)
        from models.from_timm import Timm, why_not

        if why_not(name):
            raise KeyError(name)
        return Timm(name)

    def unknown(self, name: Any) -> str:
        if not str(name).startswith(TIMM):
            return super().unknown(name)
        from models.from_timm import why_not

        return why_not(name)


BACKBONES = Backbones("model.body", "models")
register = BACKBONES.register


def colours_of(name: str) -> Colours:
    """Return by what the backbone of that name wants its images normalised."""
    return getattr(BACKBONES.find(name), "colours", IMAGENET)


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
