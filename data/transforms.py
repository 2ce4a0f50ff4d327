"""From decoded pictures to what a network takes. Picture and mask stay uint8; `normalise` makes floats on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as are the weights the networks start from
STD = (0.229, 0.224, 0.225)

JointTransform = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def train_transform(crop: int, scale: Sequence[float] = (0.5, 2.0), flip: float = 0.5) -> JointTransform:
    """A crop of `scale` times the picture's area and an aspect of 3/4 to 4/3, resized to a square; then a flip.

    Ten tries to find a crop inside the picture, then the largest central one of an allowed aspect.
    """
    from data import joint

    low, high = scale
    return joint.RandomCrop(crop, (low, high), flip)


def test_transform(size: int | None) -> JointTransform | None:
    """Shorter side to `size`, then the central square; None leaves pictures as they are."""
    if size is None:
        return None
    from data import joint

    return joint.CentralSquare(size)


test_transform.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for a test


def normalise(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A uint8 batch (B, 3, H, W) -> zero mean and unit variance over ImageNet, computed in float32."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) * 255 for values in (MEAN, STD))
    return ((images.float() - mean) / std).to(dtype)
