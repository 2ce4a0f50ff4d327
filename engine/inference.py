"""From images to class scores, in every convention of evaluation: whole images, sliding windows,
flips and scales.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.segmenter import Segmenter
from models.upsample import enlarge

STRIDE = 16  # images are padded to a multiple of the largest output stride, never stretched to it


@torch.inference_mode()
def predict(
    model: Segmenter,
    images: Tensor,
    *,
    window: int | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> Tensor:
    """Return class scores (B, C, H, W) of normalised images of any size.

    One scale without flip gives what the method's rule makes of the logits, or the logits themselves;
    otherwise the mean over all versions of the rule's scores, or of softmax probabilities. `window` slides a
    square of that side over the image with half overlap.
    """
    forward = (lambda x: _slide(model, x, window)) if window else (lambda x: _padded(model, x))
    if len(scales) == 1 and scales[0] == 1.0 and not flip:
        logits = forward(images)
        return logits if model.rule is None else model.rule(logits)
    size = (images.shape[-2], images.shape[-1])
    total = torch.zeros(())
    for scale in scales:
        scaled = images
        if scale != 1.0:
            sides = [max(1, round(side * scale)) for side in size]
            scaled = F.interpolate(images, size=sides, mode="bilinear", antialias=True)
        for flipped in (False, True) if flip else (False,):
            scores = forward(scaled.flip(-1)).flip(-1) if flipped else forward(scaled)
            total = total + probabilities(model, enlarge(scores, size))
    return total / (len(scales) * (2 if flip else 1))


def probabilities(model: Segmenter, logits: Tensor) -> Tensor:
    """Return scores of classes between 0 and 1 from logits (B, outputs, ...)."""
    return logits.softmax(dim=1) if model.rule is None else model.rule(logits)


def _padded(model: Callable, images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    images = F.pad(images, (0, -width % STRIDE, 0, -height % STRIDE))  # zero is the mean colour
    return model(images).logits[..., :height, :width]


def _slide(model: Callable, images: Tensor, window: int) -> Tensor:
    height, width = images.shape[-2:]
    images = F.pad(images, (0, max(0, window - width), 0, max(0, window - height)))
    padded_height, padded_width = images.shape[-2:]
    total: Tensor | None = None
    hits = images.new_zeros(1, 1, padded_height, padded_width)
    for top in _starts(padded_height, window):
        for left in _starts(padded_width, window):
            here = (..., slice(top, top + window), slice(left, left + window))
            logits = _padded(model, images[here])
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], padded_height, padded_width)
            total[here] += logits
            hits[here] += 1
    assert total is not None  # there is always a first window
    return (total / hits)[..., :height, :width]


def _starts(length: int, window: int) -> list[int]:
    last = length - window
    step = max(1, window // 2)
    return sorted({*range(0, last, step), last})
