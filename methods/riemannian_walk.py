"""RW, Riemannian Walk (Chaudhry et al. 2018), as in MiB's comparison: EWC's Fisher plus a path score.

Every tenth iteration the loss removed since the last look is divided by the distance in the Fisher metric:
score += g (theta_before - theta) / (0.5 F (theta - theta_before)^2 + 1e-8). At the end of a step its positive
part is averaged half and half with the old score, and omega = min_max(F) + min_max(score).
"""

import torch

from configs.registry import Probability, Settings, Size
from methods.base import register
from methods.importance import (
    ImportanceMethod,
    Tensors,
    aligned,
    extend,
    min_max,
    move_since,
    trainable,
    update_fisher,
)


@register("rw")
class RiemannianWalk(ImportanceMethod):
    class Options(Settings):
        decay: Probability = 0.9
        every: Size = 10

    options: Options
    strength = 100.0
    statistics = ("fisher", "score", "path", "previous", "clock")
    largest = 2.0
    fisher: Tensors
    score: Tensors
    path: Tensors
    previous: Tensors
    clock: dict[str, int]

    def begin_step(self, model, step) -> None:
        super().begin_step(model, step)
        extend(self.fisher, trainable(model), 1.0)
        self.path, self.previous = {}, {}
        extend(self.path, trainable(model), 0.0)
        self.clock = {"observations": 0}

    def observe(self, parameters: Tensors, gradients: Tensors, sign: float) -> None:
        if self.clock["observations"] % self.options.every == 0:
            self._walk(parameters, gradients, sign)
        self.clock["observations"] += 1
        update_fisher(self.fisher, gradients, self.options.decay)

    def _walk(self, parameters: Tensors, gradients: Tensors, sign: float) -> None:
        move = move_since(self.previous, parameters)
        if move is None:
            return
        distance = torch._foreach_mul(move, move)
        torch._foreach_mul_(distance, aligned(self.fisher, parameters))
        torch._foreach_mul_(distance, 0.5)
        torch._foreach_add_(distance, 1e-8)
        torch._foreach_div_(move, distance)
        torch._foreach_addcmul_(
            aligned(self.path, parameters), list(gradients.values()), move, value=1 / sign
        )

    def importance(self, parameters: Tensors) -> Tensors:
        for name, path in self.path.items():
            gain = path.clamp(min=0)
            self.score[name] = 0.5 * (gain + self.score[name]) if name in self.score else gain
        self.path, self.previous = {}, {}
        fisher, score = min_max(self.fisher), min_max(self.score)
        return {name: fisher[name] + score[name] for name in fisher}
