"""Which convolution of a bottleneck strides, the first 1x1 or the 3x3: weight files of both kinds have the
same names and shapes, and in the wrong network most of what they know is lost.

Known of a file, in this order:
- what it says itself: a key `stride_in_1x1` (true or false) beside its `state_dict`;
- its content, whatever its name: published files by a digest of one tensor, torchvision's by the hash that
  torchvision publishes;
- its format: InPlaceABN's and MiB's networks stride in the 3x3 convolution.
Not known of any other file in torchvision's naming, for example of one that somebody trained or converted: it
is taken for what model.body says, and a note names the other choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from models.backbone import TIMM

MARK = "stride_in_1x1"
PROBE = "layer2.0.conv2.weight"  # the first convolution that the two kinds show different places
# sha256 of the probe, as float32 -> whether the file's network strides in 1x1
PUBLISHED = {
    # a published ImageNet ResNet-50 v1, its filters rounded to 8 bits
    "c02957d8512e0deda860bd03d578a83fa1be337552b762f11877a062a7d6552e": True,
}
KINDS = {True: "in the first 1x1 convolution", False: "in the 3x3 convolution"}


def stride_of(
    file: Mapping[str, Any], tensors: Mapping[str, Tensor], format_name: str, sha256: Callable[[], str]
) -> bool | None:
    """Return whether the network of a file strides in 1x1; None if nothing tells."""
    if isinstance(file.get(MARK), bool):
        return file[MARK]
    if PROBE not in tensors or format_name in ("InPlaceABN", "MiB"):
        return False if format_name in ("InPlaceABN", "MiB") else None
    content = hashlib.sha256(tensors[PROBE].detach().float().contiguous().numpy().tobytes()).hexdigest()
    if content in PUBLISHED:
        return PUBLISHED[content]
    return False if sha256()[:8] in _torchvision_hashes() else None


def other_body(backbone_name: str) -> str:
    """Return the backbone of the other kind: resnet50 for resnet50_v1, and the other way round."""
    name = backbone_name.removeprefix(TIMM)
    return name.removesuffix("_v1") if name.endswith("_v1") else f"{name}_v1"


def _torchvision_hashes() -> set[str]:
    """Return the first 8 digits of the sha256 of all files with bottlenecks that torchvision publishes."""
    from data.vision import torchvision

    urls = [
        weights.url
        for name in ("resnet50", "resnet101")
        for weights in torchvision.models.get_model_weights(name)
    ]
    return {url.rpartition("-")[2].removesuffix(".pth") for url in urls}
