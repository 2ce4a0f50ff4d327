"""MiB, Modeling the Background (Cermelli et al. 2020): the method AlterSGD builds on.

The background of a step hides old classes, and the teacher's background hides the step's new ones. Both
losses say so (Eq. 5 and 8), and the new classifier starts from the background's, so that the first prediction
of a new class is what the teacher called background (Eq. 10). Published strength: 10, but 100 on VOC 15-1.
"""

from typing import Any

from torch import Tensor

from methods.base import Method, register


@register("mib")
class MiB(Method):
    needs_teacher = True
    strength = {"default": 10.0, "15-1": 100.0}

    def init_classifier(self, model: Any) -> None:
        model.init_new_from_background()

    def segmentation_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.losses.unbiased_cross_entropy(logits, labels, self.num_old, self.mean_over)

    def retention_losses(self, student, teacher) -> dict[str, Tensor]:
        return {"distillation": self.losses.unbiased_distillation(student.logits, teacher.logits)}
