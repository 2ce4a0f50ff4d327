"""ILT, Incremental Learning Techniques (Michieli and Zanuttigh 2019):
distil the output and the backbone's features.

Both terms have weight 100 in MiB's experiments; `feature_ratio` is the weight of the second relative to the
first.
"""

from torch import Tensor

from configs.registry import NonNegative, Settings
from methods.base import Method, register


@register("ilt")
class ILT(Method):
    class Options(Settings):
        feature_ratio: NonNegative = 1.0

    options: Options
    needs_teacher = True
    strength = 100.0

    def retention_losses(self, student, teacher) -> dict[str, Tensor]:
        return {
            "distillation": self.losses.distillation(student.logits, teacher.logits),
            "features": self.options.feature_ratio
            * self.losses.feature_distillation(student.features, teacher.features),
        }
