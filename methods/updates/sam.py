"""SAM, sharpness-aware minimisation (Foret et al. 2021), as an update rule:
descend by the gradient of a worse neighbour.

    e = rho g / ||g||        g the gradient of the objective at theta (Eq. 2, p = 2)
    theta <- theta - eta grad L(theta + e)                          (Eq. 3)

From the paper: one gradient ascent step to the worst point of a ball, no second-order term, rho = 0.05, and
under several ranks every rank climbs by the gradient of its own images (their m-sharpness) and only the
second gradient is averaged. Our choices: L is the weighed objective of the iteration, distillation included,
so under AlterSGD the ascents look for their own worst neighbour; only the first pass enters the running
statistics of the norms; EWC, PI and RW observe the gradient that the update uses.

The cost is two gradient evaluations per update; the teacher passes once.
"""

from typing import Any

from torch import nn

from methods.base import Weights
from methods.updates.plain import Evaluate, Terms, Update, moved, register, same_statistics, take_gradients


@register("sam")
class SAM(Update):
    keys = ("rho",)
    evaluations = 2

    def __init__(self, rho: float = 0.05, **options: Any):
        super().__init__(**options)
        self.rho = rho

    def __call__(self, model: nn.Module, evaluate: Evaluate, weights: Weights, scale: float) -> Terms:
        terms = evaluate(weights, local=True)
        climb = take_gradients(model)
        with same_statistics(model), moved(model, climb, self.rho):
            evaluate(weights)
        return terms
