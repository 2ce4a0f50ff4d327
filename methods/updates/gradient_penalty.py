"""A penalty on the gradient norm: what Theorem 1 says AlterSGD approximates, done directly.

    minimise  l_seg + lambda R + c ||grad l_seg||^2

A descent and an ascent on one batch move by -(eta^2 / 2) grad ||grad l_seg||^2, which is what two plain
updates with c = eta / 4 add. The gradient of the penalty is 2 c H g with g = grad l_seg; H g is the
difference of two gradients:

    H g = ||g|| (grad l_seg(theta + r g / ||g||) - g) / r + O(r)

which needs no second derivative, so every norm and every fast loss will do (the scheme of Zhao et al. 2022,
who penalise ||grad|| of the whole loss). Our choices: the squared norm, of l_seg alone, because the theorem
is about these; it is minimised whichever sign the phase gives l_seg; on several ranks each takes the norm on
its own images.

The cost is three gradient evaluations per update; the teacher passes once.
"""

from typing import Any

import torch
from torch import nn

from methods.base import Weights
from methods.updates.plain import (
    Evaluate,
    Terms,
    Update,
    give_gradients,
    moved,
    register,
    same_statistics,
    take_gradients,
)

SEGMENTATION_ONLY = Weights(learn=1.0, keep=0.0)


@register("gradient_penalty")
class GradientPenalty(Update):
    keys = ("penalty", "radius")
    evaluations = 3

    def __init__(self, penalty: float = 0.01, radius: float = 0.01, **options: Any):
        super().__init__(**options)
        self.penalty, self.radius = penalty, radius

    def __call__(self, model: nn.Module, evaluate: Evaluate, weights: Weights, scale: float) -> Terms:
        with same_statistics(model):
            evaluate(SEGMENTATION_ONLY, local=True)
            here = take_gradients(model)
            with moved(model, here, self.radius) as length:
                evaluate(SEGMENTATION_ONLY, local=True)
        change = take_gradients(model)
        torch._foreach_sub_(change, here)  # radius * H g / ||g||, times the scale
        torch._foreach_mul_(change, 2 * self.penalty * length / (scale * self.radius))
        give_gradients(model, change)
        return evaluate(weights)
