"""PI, Path Integral or Synaptic Intelligence (Zenke et al. 2017), as in MiB's comparison.

Each parameter is credited with the loss it removed along the path of training: delta += g (theta_before -
theta). At the end of a step delta / (theta - theta_start)^2, if positive, is added to its score.

As in the reference, g is read where the move ends, not where it began.
"""

import torch

from methods.base import register
from methods.importance import (
    ImportanceMethod,
    Tensors,
    aligned,
    extend,
    min_max,
    move_since,
    snapshot,
    trainable,
)


@register("pi")
class PathIntegral(ImportanceMethod):
    strength = 500.0
    statistics = ("score", "delta", "start", "previous")
    score: Tensors
    delta: Tensors
    start: Tensors
    previous: Tensors

    def begin_step(self, model, step) -> None:
        super().begin_step(model, step)
        self.start = snapshot(trainable(model))
        self.delta, self.previous = {}, {}
        extend(self.delta, self.start, 0.0)

    def observe(self, parameters: Tensors, gradients: Tensors, sign: float) -> None:
        move = move_since(self.previous, parameters)
        if move is None:
            return
        # Dividing by the sign turns the gradient of an ascent back into the gradient of l_seg.
        torch._foreach_addcmul_(
            aligned(self.delta, parameters), list(gradients.values()), move, value=1 / sign
        )

    def importance(self, parameters: Tensors) -> Tensors:
        for name, p in parameters.items():
            gain = (self.delta[name] / ((p.detach() - self.start[name]) ** 2 + 1e-20)).clamp(min=0)
            self.score[name] = gain + self.score.get(name, 0.0)
        self.delta, self.start, self.previous = {}, {}, {}
        return min_max(self.score)
