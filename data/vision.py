"""torchvision, importable beside a torch of another build: `from data.vision import torchvision`.

A torchvision made for CUDA cannot load its compiled operators into a CPU-only torch, and its import fails at
the first operator it wants to describe. Nothing here needs those operators, so their signatures are enough.
"""

from __future__ import annotations

import torch

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    import torchvision
import torchvision.transforms.v2
import torchvision.tv_tensors

__all__ = ["torchvision"]
