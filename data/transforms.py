"""Joint transforms of picture and mask. Both stay uint8; `normalise` makes floats on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data.vision import torchvision

v2, tv_tensors = torchvision.transforms.v2, torchvision.tv_tensors
NEAREST_EXACT = v2.InterpolationMode.NEAREST_EXACT
MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as are the weights the networks start from
STD = (0.229, 0.224, 0.225)


# torchvision samples masks at the corners of pixels ("nearest"), which puts them half a pixel beside the picture.
# "nearest-exact" samples at the centres, where the bilinear filter does; a picture of one channel may ask for it.


class _RandomResizedCrop(v2.RandomResizedCrop):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Mask):
            return super().transform(inpt, params)
        mask = tv_tensors.Image(inpt)
        exact = v2.functional.resized_crop(mask, **params, size=self.size, interpolation=NEAREST_EXACT)
        return tv_tensors.Mask(exact[0])


class _Resize(v2.Resize):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Mask):
            return super().transform(inpt, params)
        mask = tv_tensors.Image(inpt)
        return tv_tensors.Mask(v2.functional.resize(mask, self.size, interpolation=NEAREST_EXACT)[0])


def train_transform(crop: int, scale: Sequence[float] = (0.5, 2.0), flip: float = 0.5) -> v2.Transform:
    """A crop of `scale` times the picture's area and an aspect of 3/4 to 4/3, resized to a square; then a flip.

    Ten tries to find a crop inside the picture, then the largest central one of an allowed aspect.
    """
    low, high = scale
    return v2.Compose([_RandomResizedCrop(crop, scale=(low, high)), v2.RandomHorizontalFlip(flip)])


def test_transform(size: int | None) -> v2.Transform | None:
    """Shorter side to `size`, then the central square; None leaves pictures as they are."""
    return None if size is None else v2.Compose([_Resize(size), v2.CenterCrop(size)])


test_transform.__test__ = False  # pytest takes the name for a test


def normalise(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A uint8 batch (B, 3, H, W) -> zero mean and unit variance over ImageNet, computed in float32."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) * 255 for values in (MEAN, STD))
    return ((images.float() - mean) / std).to(dtype)
