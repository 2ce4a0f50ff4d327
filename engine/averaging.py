"""Running statistics of norms for weights that no iteration of training had (methods/averages)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.objective import Placement
from models.segmenter import Segmenter


@torch.no_grad()
def recompute_statistics(model: Segmenter, batches: Iterable[Tensor], place: Placement) -> None:
    """Replace the running statistics by their plain average over the batches: uint8 images,
    as the loader gives them.

    Norms that the step has in eval mode keep theirs. Those that are synchronised count the images of all
    ranks, so every rank must ask, with as many batches.
    """
    training = (module for module in model.modules() if module.training)
    norms = [m for m in training if isinstance(getattr(m, "running_mean", None), Tensor)]
    momenta = [norm.momentum for norm in norms]
    try:
        for number, images in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1 / number  # type: ignore[assignment]  # the n-th of n counts as one n-th
            with place.autocast():
                model(place.images(images), enlarged=False)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
