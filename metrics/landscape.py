"""The loss along lines and over planes in the space of the parameters. The loss is as in metrics/flatness.py,
but may have several values: the result then has a column for each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from metrics.flatness import Loss, mean_loss, restored


def filter_normalised_direction(parameters: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Return a Gaussian direction in which every filter is as long as that of the
    weights (Li et al. 2018, section 4).

    A filter is the part of a weight that makes one output channel. Biases and the scales of norms stay where
    they are.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = []
    for p in parameters:
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
        if p.dim() < 2:
            direction.append(torch.zeros_like(p, requires_grad=False))
            continue
        filters = tuple(range(1, p.dim()))
        lengths = [torch.linalg.vector_norm(t.detach(), dim=filters, keepdim=True) for t in (p, noise)]
        direction.append(noise * lengths[0] / lengths[1])
    return direction


def loss_around(
    loss: Loss,
    batches: Sequence,
    parameters: Sequence[Tensor],
    directions: Sequence[Sequence[Tensor]],
    coordinates: Sequence[Sequence[float]],
) -> Tensor:
    """L(theta + a_1 d_1 + a_2 d_2 + ...) at each of the coordinates (a_1, a_2, ...)."""
    values = []
    with restored(parameters) as centre, torch.no_grad():
        for place in tqdm(coordinates, "landscape", unit="place", leave=False, disable=None):
            for p, c, *moves in zip(parameters, centre, *directions, strict=True):
                p.copy_(c + sum(a * d for a, d in zip(place, moves, strict=True)))
            values.append(mean_loss(loss, batches))
    return torch.stack(values)


def loss_between(
    loss: Loss,
    batches: Sequence,
    tensors: Sequence[Tensor],
    start: Sequence[Tensor],
    end: Sequence[Tensor],
    places: Sequence[float],
) -> Tensor:
    """Return the loss with `tensors` at (1 - t) start + t end for each t of `places`;
    t = 0 and t = 1 are exact.
    """
    values = []
    with restored(tensors), torch.no_grad():
        for t in tqdm(places, "line", unit="place", leave=False, disable=None):
            for tensor, a, b in zip(tensors, start, end, strict=True):
                tensor.copy_(torch.lerp(a, b, t))
            values.append(mean_loss(loss, batches))
    return torch.stack(values)


def barrier(losses: Sequence[float], places: Sequence[float]) -> float:
    """max_t [ L(t) - (1 - t) L(0) - t L(1) ]: how far the line rises above the
    straight one between its ends.
    """
    first, last = losses[0], losses[-1]
    return max(value - (1 - t) * first - t * last for value, t in zip(losses, places, strict=True))
