"""ASAM, adaptive SAM (Kwon et al. 2021), as an update rule: SAM in a ball that grows with the weights.

    e = rho T^2 g / ||T g||        g the gradient of the objective at theta, T = diag(|theta| + eta)
    theta <- theta - learning rate * grad L(theta + e)

A weight moves in proportion to its size, so networks that say the same with rescaled layers have the same
neighbours (eta = 0): it makes no difference when one layer is multiplied with what the next is divided by.

From the paper and the authors' code: the element-wise T, one ascent, rho = 0.5, eta = 0.01; T stretches the
parameters whose name says "weight" and is 1 on biases. The paper has rho = 1 for CIFAR-100 and ImageNet. The
code's example runs with eta = 0, its class and the paper with 0.01. The code adds 1e-16 to the norm; here a
norm of 0 is no move.

Our choices, as in sam.py: L is the weighed objective of the iteration, distillation included; every rank
climbs by the gradient of its own images and only the second gradient is averaged; only the first pass enters
the running statistics of the norms. The scales of the norms are weights, as in the authors' code.

The cost is two gradient evaluations per update; the teacher passes once.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from configs.registry import NonNegative, Settings
from methods.base import Weights
from methods.updates.plain import (
    Evaluate,
    Terms,
    Update,
    moved,
    norm_of,
    register,
    same_statistics,
    take_gradients,
)


@register("asam")
class ASAM(Update):
    evaluations = 2

    class Options(Settings):
        rho: Annotated[float, Field(gt=0)] = 0.5  # size of the ball, relative to the weights
        eta: NonNegative = 0.01  # added to |theta|, so that weights of 0 move too

    options: Options

    def __call__(self, model: nn.Module, evaluate: Evaluate, weights: Weights, scale: float) -> Terms:
        terms = evaluate(weights, local=True)
        climb, sizes = take_gradients(model), sizes_of(model, self.options.eta)
        torch._foreach_mul_(climb, sizes)
        length = norm_of(climb)
        torch._foreach_mul_(climb, sizes)
        with same_statistics(model), moved(model, climb, self.options.rho, length):
            evaluate(weights)
        return terms


@torch.no_grad()
def sizes_of(model: nn.Module, eta: float) -> list[Tensor]:
    """Return the diagonal of T for every trainable parameter: |theta| + eta for weights, 1 for biases."""
    return [
        p.abs().add_(eta) if name.endswith("weight") else torch.ones_like(p)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
