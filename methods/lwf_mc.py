"""LwF-MC, the multi-class LwF of iCaRL (Rebuffi et al. 2017) without its exemplars.

One sigmoid per class instead of a softmax, in step 0 too; R is the binary cross-entropy to the teacher's
sigmoids, summed over the old classes. Its step 0 therefore cannot be shared with the softmax methods.
"""

from torch import Tensor

from methods.base import Method, register


@register("lwf_mc")
class LwFMC(Method):
    needs_teacher = True
    strength = 10.0
    shares_first_step = False

    def segmentation_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.losses.binary_cross_entropy(logits, labels, self.mean_over)

    def retention_losses(self, student, teacher) -> dict[str, Tensor]:
        return {"distillation": self.losses.binary_distillation(student.logits, teacher.logits)}
