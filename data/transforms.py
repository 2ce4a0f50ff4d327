"""From decoded images to what a network takes: crops and sizes of an image and its mask together,
on plain uint8 tensors.

An image is (3, H, W), its labels (H, W). Both stay uint8; `normalise` makes floats on the device. torchvision
draws the crop and resizes images. Masks are resized here: it would sample them at the corners of pixels
("nearest"), half a pixel beside the image; "nearest-exact" samples at the centres, where the bilinear filter
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from data.protocols import IGNORE_INDEX

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as are the weights the networks start from
STD = (0.229, 0.224, 0.225)
MEAN_COLOUR = tuple(round(255 * mean) for mean in MEAN)

JointTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def train_transform(
    crop: int, scale: Sequence[float] = (0.5, 2.0), flip: float = 0.5, augment: str = "resized_crop"
) -> JointTransform:
    """Return a transform that takes a square of `crop` pixels out of an image, then a flip.

    resized_crop: a part of `scale` times the image's area and an aspect of 3/4 to 4/3, resized. Ten tries to
    find one inside the image, then the largest central one of an allowed aspect.
    scale_crop: the image's sides are multiplied by a factor of `scale`, then a square is cut out.
    """
    low, high = scale
    return AUGMENTATIONS[augment](crop, (low, high), flip)


def test_transform(size: int | None) -> JointTransform | None:
    """Shorter side to `size`, then the central square; None leaves images as they are."""
    return None if size is None else CentralSquare(size)


test_transform.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for a test


class Draw(NamedTuple):
    """What is random about a crop."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool


class RandomCrop:
    """A random part of the image, resized to a square, flipped or not."""

    def __init__(self, size: int, scale: tuple[float, float], flip: float):
        self.size, self.flip = [size, size], flip
        self.crop = _v2().RandomResizedCrop(size, scale=scale)

    def draw(self, image: Tensor) -> Draw:
        return Draw(**self.crop.make_params([image]), flipped=bool(torch.rand(1) < self.flip))

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        top, left, height, width, flipped = self.draw(image)
        image = image[:, top : top + height, left : left + width]
        labels = labels[top : top + height, left : left + width]
        image, labels = resize(image, self.size), resize_labels(labels, self.size)
        return (image.flip(-1), labels.flip(-1)) if flipped else (image, labels)


class ScaleCrop:
    """The image at a random size, a random square of it, flipped or not.

    A side that is shorter than the square is padded on both ends: the image with its mean colour over
    ImageNet, which is zero for the network, the labels with void, which no loss counts.
    """

    def __init__(self, size: int, scale: tuple[float, float], flip: float):
        self.size, self.scale, self.flip = size, scale, flip

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        factor, top, left, flipped = torch.rand(4).tolist()
        low, high = self.scale
        factor = low + (high - low) * factor
        height, width = (max(1, int(side * factor)) for side in labels.shape)
        image, labels = resize(image, [height, width]), resize_labels(labels, [height, width])
        rows, row = self._window(height, top)
        columns, column = self._window(width, left)
        square = torch.tensor(MEAN_COLOUR, dtype=torch.uint8).view(3, 1, 1).repeat(1, self.size, self.size)
        void = torch.full((self.size, self.size), IGNORE_INDEX, dtype=torch.uint8)
        square[:, row, column], void[row, column] = image[:, rows, columns], labels[rows, columns]
        return (square.flip(-1), void.flip(-1)) if flipped < self.flip else (square, void)

    def _window(self, side: int, share: float) -> tuple[slice, slice]:
        """Return which part of a side is kept, and where in the square it stands."""
        spare = side - self.size
        if spare < 0:
            start = -spare // 2
            return slice(side), slice(start, start + side)
        first = min(int(share * (spare + 1)), spare)
        return slice(first, first + self.size), slice(self.size)


AUGMENTATIONS: dict[str, Callable[..., JointTransform]] = {
    "resized_crop": RandomCrop,
    "scale_crop": ScaleCrop,
}


class CentralSquare:
    """The shorter side to `size`, then the central square."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        image = resize(image, [self.size])
        labels = resize_labels(labels, list(image.shape[-2:]))
        crop, square = _v2().functional.center_crop, [self.size, self.size]
        return crop(image, square), crop(labels, square)


def resize(image: Tensor, size: list[int]) -> Tensor:
    return _v2().functional.resize(image, size, antialias=True)


def resize_labels(labels: Tensor, size: list[int]) -> Tensor:
    return F.interpolate(labels[None, None], size=tuple(size), mode="nearest-exact")[0, 0]


def normalise(
    images: Tensor,
    dtype: torch.dtype = torch.float32,
    mean: Sequence[float] = MEAN,
    std: Sequence[float] = STD,
) -> Tensor:
    """Return a uint8 batch (B, 3, H, W) with zero mean and unit variance over the images of which these are
    mean and deviation, ImageNet's if nothing is said; computed in float32.
    """
    centre, spread = _statistics(images.device, torch.get_default_dtype(), tuple(mean), tuple(std))
    return ((images.float() - centre) / spread).to(dtype)


@lru_cache
def _statistics(
    device: torch.device, dtype: torch.dtype, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of bytes. Made once: numbers that go to a GPU wait for all it has to do."""
    with torch.inference_mode(False):  # evaluation may ask first
        centre, spread = (torch.tensor(values, dtype=dtype, device=device) for values in (mean, std))
        return centre.view(3, 1, 1) * 255, spread.view(3, 1, 1) * 255


def _v2() -> Any:
    """Importing torchvision takes as long as importing torch: only who loads images waits for it."""
    from data.vision import torchvision

    return torchvision.transforms.v2
