"""Transforms of torchvision applied to a picture and its mask together.

Apart from transforms.py since importing torchvision takes as long as importing torch: only who loads pictures waits for it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from data.vision import torchvision

v2, tv_tensors = torchvision.transforms.v2, torchvision.tv_tensors
NEAREST_EXACT = v2.InterpolationMode.NEAREST_EXACT

# torchvision samples masks at the corners of pixels ("nearest"), which puts them half a pixel beside the picture.
# "nearest-exact" samples at the centres, where the bilinear filter does; a picture of one channel may ask for it.


class RandomResizedCrop(v2.RandomResizedCrop):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Mask):
            return super().transform(inpt, params)
        mask = tv_tensors.Image(inpt)
        exact = v2.functional.resized_crop(mask, **params, size=self.size, interpolation=NEAREST_EXACT)
        return tv_tensors.Mask(exact[0])


class Resize(v2.Resize):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Mask):
            return super().transform(inpt, params)
        mask = tv_tensors.Image(inpt)
        return tv_tensors.Mask(v2.functional.resize(mask, self.size, interpolation=NEAREST_EXACT)[0])


class Joint:
    """Transforms in a row, on plain tensors: picture (3, H, W) and labels (H, W), both uint8."""

    def __init__(self, *transforms: v2.Transform):
        self.transforms = v2.Compose(transforms)

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pair = self.transforms(tv_tensors.Image(image), tv_tensors.Mask(labels))
        return tuple(part.as_subclass(Tensor).contiguous() for part in pair)


def random_crops(size: int, scale: tuple[float, float], flip: float) -> Joint:
    return Joint(RandomResizedCrop(size, scale=scale), v2.RandomHorizontalFlip(flip))


def central_squares(size: int) -> Joint:
    return Joint(Resize(size), v2.CenterCrop(size))
