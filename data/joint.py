"""Crops and sizes of a picture and its mask together, on plain uint8 tensors: picture (3, H, W), labels (H, W).

Apart from transforms.py since importing torchvision takes as long as importing torch: only who loads pictures waits for it.
torchvision draws the crop and resizes pictures. Masks are resized here: it would sample them at the corners of pixels
("nearest"), half a pixel beside the picture; "nearest-exact" samples at the centres, where the bilinear filter does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from data.vision import torchvision

v2 = torchvision.transforms.v2


class Draw(NamedTuple):
    """What is random about a crop."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool


class RandomCrop:
    """A random part of the picture, resized to a square, flipped or not."""

    def __init__(self, size: int, scale: tuple[float, float], flip: float):
        self.size, self.flip = [size, size], flip
        self.crop = v2.RandomResizedCrop(size, scale=scale)

    def draw(self, image: Tensor) -> Draw:
        return Draw(**self.crop.make_params([image]), flipped=bool(torch.rand(1) < self.flip))

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        top, left, height, width, flipped = self.draw(image)
        image = image[:, top : top + height, left : left + width]
        labels = labels[top : top + height, left : left + width]
        image, labels = resize(image, self.size), resize_labels(labels, self.size)
        return (image.flip(-1), labels.flip(-1)) if flipped else (image, labels)


class CentralSquare:
    """The shorter side to `size`, then the central square."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        image = resize(image, [self.size])
        labels = resize_labels(labels, list(image.shape[-2:]))
        return tuple(v2.functional.center_crop(part, [self.size, self.size]) for part in (image, labels))


def resize(image: Tensor, size: list[int]) -> Tensor:
    return v2.functional.resize(image, size, antialias=True)


def resize_labels(labels: Tensor, size: list[int]) -> Tensor:
    return F.interpolate(labels[None, None], size=tuple(size), mode="nearest-exact")[0, 0]
