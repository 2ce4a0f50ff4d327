"""C-Flat (Bian et al. 2024) as an update rule: SAM, and a push to where the gradient is small all around.

    minimise  L + R0 + lambda R1        R0 = max L(theta + e) - L(theta)          zeroth-order sharpness
                                        R1 = rho max ||grad L(theta + e)||        first-order flatness

over ||e|| <= rho, in four gradients:

    g0 = grad L(theta)                  g1 = grad L(theta + rho g0 / ||g0||)      of L + R0: SAM's
    d  = rho (g1 - g0) / ||g1 - g0||    towards the largest gradient norm: H g0 / ||g0|| = (g1 - g0) / rho
    g2 = grad L(theta + d)              g3 = grad L(theta + d + rho g2 / ||g2||)  of R1: g3 - g2
    theta <- theta - eta (g1 + lambda (g3 - g2))

Read in the authors' code; the paper's own text was not at hand. rho = lambda = 0.2 are the defaults of that
code, for image classification; another library that carries the rule has rho = 0.1. As there, only the first
pass enters the running statistics of the norms, and on several ranks each goes its own way with the gradients
of its own images, and the sums are averaged. The code adds 1e-12 to every norm; here a norm of 0 is no move.

Our choices: L is the weighed objective of the iteration, distillation included, as in sam.py; the last
gradient is taken of lambda L, which leaves the sum in place. lambda = 0 is SAM at twice its cost.

The cost is four gradient evaluations per update; the teacher passes once.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from configs.registry import NonNegative, Settings
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


@register("c_flat")
class CFlat(Update):
    evaluations = 4

    class Options(Settings):
        rho: Annotated[float, Field(gt=0)] = 0.2  # how far each of the three moves goes
        weight: NonNegative = 0.2  # lambda, of the first-order term

    options: Options

    def __call__(self, model: nn.Module, evaluate: Evaluate, weights: Weights, scale: float) -> Terms:
        rho, weight = self.options.rho, self.options.weight
        terms = evaluate(weights, local=True)
        start = take_gradients(model)
        with same_statistics(model):
            with moved(model, start, rho):
                evaluate(weights, local=True)
            worse = take_gradients(model)
            with moved(model, list(torch._foreach_sub(worse, start)), rho):
                evaluate(weights, local=True)
                steeper = take_gradients(model)
                with moved(model, steeper, rho):
                    torch._foreach_sub_(worse, steeper, alpha=weight)
                    give_gradients(model, worse)
                    evaluate(Weights(weight * weights.learn, weight * weights.keep))
        return terms
