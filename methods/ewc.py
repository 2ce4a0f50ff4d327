"""EWC, Elastic Weight Consolidation (Kirkpatrick et al. 2017), online as in MiB's comparison.

The diagonal Fisher information is a moving average of squared gradients, F <- a g^2 + (1 - a) F with a = 0.9,
starting at one and carried over from step to step.
"""

from configs.registry import Probability, Settings
from methods.base import register
from methods.importance import ImportanceMethod, Tensors, extend, min_max, trainable, update_fisher


@register("ewc")
class EWC(ImportanceMethod):
    class Options(Settings):
        decay: Probability = 0.9

    options: Options
    strength = 500.0
    statistics = ("fisher",)
    fisher: Tensors

    def begin_step(self, model, step) -> None:
        super().begin_step(model, step)
        extend(self.fisher, trainable(model), 1.0)

    def observe(self, parameters: Tensors, gradients: Tensors, sign: float) -> None:
        update_fisher(self.fisher, gradients, self.options.decay)

    def importance(self, parameters: Tensors) -> Tensors:
        return min_max(self.fisher)
