"""Statistics of classes in the space of the head's features, over all ranks: what STAR replays.

The features are coarser than the labels. A place of theirs belongs to the class in its middle.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from methods.ranks import summed


def at_features(labels: Tensor, features: Tensor) -> Tensor:
    """Return the labels in the middle of each place of the features."""
    rows, columns = (
        ((torch.arange(few, device=labels.device) + 0.5) * (many / few)).long()
        for few, many in zip(features.shape[2:], labels.shape[1:], strict=True)
    )
    return labels[:, rows][:, :, columns]


def class_statistics(
    images: Iterable[tuple[Tensor, Any]], classes: Sequence[int]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the number of places of the background and of each class, and of each class its prototype (mean
    direction of features, of length 1), the deviation of directions from it by dimension, and mean and
    deviation of norms.

    One pass over (labels, output): sums of directions, norms and their squares are all that is needed.
    """
    total = background = torch.zeros(())
    for labels, output in images:
        places = at_features(labels, output.hidden)
        norm = output.hidden.double().norm(dim=1, keepdim=True)
        direction = output.hidden.double() / norm.clamp(min=1e-12)
        facts = torch.cat([torch.ones_like(norm), norm, norm**2, direction, direction**2], dim=1)
        member = torch.stack([places == c for c in classes], dim=1).to(facts.dtype)
        total = total.to(facts.device) + torch.einsum("bkhw,bfhw->kf", member, facts)
        background = background.to(facts.device) + (places == 0).sum()
    total, background = summed(total).cpu(), summed(background).cpu()
    number, norm, norm2, rest = total.split([1, 1, 1, total.shape[1] - 3], dim=1)
    direction, direction2 = rest.chunk(2, dim=1)
    n = number.clamp(min=1)
    mu = F.normalize(direction, dim=1)
    sigma = (direction2 / n - 2 * mu * direction / n + mu**2).clamp(min=0).sqrt()
    spread = ((norm2 - norm**2 / n) / (n - 1).clamp(min=1)).clamp(min=0).sqrt()
    found = {"prototypes": mu, "noise": sigma, "norms": torch.cat([norm / n, spread], dim=1)}
    return background.float(), number[:, 0].float(), {name: value.float() for name, value in found.items()}
