"""F-SAM, friendly SAM (Li et al. 2024), as an update rule: climb by the noise of a batch, not its gradient.

    m <- lambda m + (1 - lambda) g      an average over iterations, which estimates the full gradient
    e = rho d / ||d||                   d = g - sigma m
    theta <- theta - eta grad L(theta + e)

From the paper: the rule, sigma = 1. From the authors' code: m begins as the first gradient, and that first
update climbs by g itself; d takes m from before g enters it, where the paper's algorithm takes it from after.
With sigma = 1 both point the same way: g - m_new = lambda (g - m_old). lambda and rho are searched in the
paper; the code's class has 0.9 and 0.05, its training script 0.95, its example 0.6 and 0.2 (CIFAR-100). Ours
are those of the class, rho thereby SAM's.

Our choices:
- L is the weighed objective of the iteration, distillation included, as in sam.py. An ascent of AlterSGD has
  another objective and so another full gradient: there is an m for each pair of signs that a phase gives
  l_seg and R, and the first update of a pair climbs by g.
- On several ranks each climbs by its own images (SAM's m-sharpness), and m is the average over all of their
  images: one exchange of gradients more per update, and a state that every rank shares.
- m is kept without the loss scale of fp16, and what overflows does not enter it.
- Only the first pass enters the running statistics of the norms.

m is part of the checkpoint inside a step (resume.pt), and begins anew in every step, as the optimizer does.
The cost is two gradient evaluations per update; the teacher passes once.
"""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from configs.registry import NonNegative, Settings
from methods.base import Weights
from methods.ranks import averaged, is_distributed
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

Signs = tuple[int, int]


@register("f_sam")
class FSAM(Update):
    evaluations = 2

    class Options(Settings):
        rho: Annotated[float, Field(gt=0)] = 0.05  # distance of the neighbour
        sigma: NonNegative = 1.0  # how much of the average is taken off the gradient
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.9  # lambda, of the average

    options: Options

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.averages: dict[Signs, list[Tensor]] = {}

    def __call__(self, model: nn.Module, evaluate: Evaluate, weights: Weights, scale: float) -> Terms:
        terms = evaluate(weights, local=True)
        climb = take_gradients(model)
        torch._foreach_div_(climb, scale)
        whole = mean_over_ranks(climb)
        signs = signs_of(weights)
        average = self.averages.get(signs)
        if average is not None:
            torch._foreach_sub_(climb, average, alpha=self.options.sigma)
        if scale == 1.0 or norm_of(whole).isfinite():  # only fp16, whose scale is not 1, overflows and waits
            if average is None:
                self.averages[signs] = whole
            else:
                torch._foreach_lerp_(average, whole, 1 - self.options.decay)
        with same_statistics(model), moved(model, climb, self.options.rho):
            evaluate(weights)
        return terms

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [[*signs, average] for signs, average in self.averages.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = {(learn, keep): average for learn, keep, average in state["averages"]}


def signs_of(weights: Weights) -> Signs:
    """Return whether l_seg and R are descended (1), ascended (-1) or left out (0)."""
    learn, keep = ((weight > 0) - (weight < 0) for weight in (weights.learn, weights.keep))
    return learn, keep


def mean_over_ranks(gradients: list[Tensor]) -> list[Tensor]:
    """Return copies, averaged over the ranks where there are others."""
    copies = [g.clone() for g in gradients]
    if is_distributed():
        together = averaged(torch.cat([g.flatten() for g in gradients]))
        for copy, mean in zip(copies, together.split([g.numel() for g in gradients]), strict=True):
            copy.copy_(mean.view_as(copy))
    return copies
