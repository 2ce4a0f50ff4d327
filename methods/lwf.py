"""LwF, Learning without Forgetting (Li and Hoiem 2016), as MiB's authors carried it to segmentation.

R is the cross-entropy between the teacher's and the student's softmax over the *old* classes, divided by
their number.
"""

from torch import Tensor

from methods.base import Method, register


@register("lwf")
class LwF(Method):
    needs_teacher = True
    strength = 100.0

    def retention_losses(self, student, teacher) -> dict[str, Tensor]:
        return {"distillation": self.losses.distillation(student.logits, teacher.logits)}
