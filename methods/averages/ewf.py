"""EWF, Endpoints Weight Fusion (Xiao et al. 2023), over any method.

From step 1 on, at the end of a step,

    theta <- (1 - a) theta_old + a theta        a = sqrt(C_new / (C_new + C_old))

for every tensor of the old model, the running statistics of the norms too. C_old counts the background: 15-1
begins with a = sqrt(1/17). The new classifier is as it was trained; all older ones are frozen during the
step. theta_old is what the step before saved, in which MiB has not lowered the background's bias yet: of
log(C_new + 1) it keeps the share a.

Read in the authors' code (the formula, which tensors, the freezing); the paper's own text was not at hand.
The code has a further option, which its authors say the paper does not mention: only the 45 % of all weights
that moved furthest are fused. Not here.

Our choices:
- Interpolated from theta_old on, so that a frozen weight keeps its bits; the sum above may round them.
- Tensors that are no floating-point numbers, as a norm's count of batches, stay as the step left them.
- EWC, PI and RW close their statistics before the fusion, for these are about the path that was trained; they
  observe and pull no frozen classifier. Their next anchor is the fused model.
- The published runs are overlapped, over MiB and PLOP.
"""

import math

import torch
from torch import Tensor

from data.protocols import Step
from methods.averages.none import Average, register


@register("ewf")
class EndpointsWeightFusion(Average):
    old: dict[str, Tensor]

    def remember(self, model) -> None:
        # Off the device: they are needed again at the end only.
        self.old = {name: t.detach().to("cpu", copy=True) for name, t in model.state_dict().items()}

    def begin_step(self, model, step: Step) -> None:
        for classifier in model.classifiers[: step.index]:  # one for each step
            classifier.requires_grad_(False)

    @torch.no_grad()
    def end_step(self, model, step: Step) -> None:
        if step.index == 0:
            return
        new = model.state_dict()
        for name, old in self.old.items():
            if old.is_floating_point():
                new[name].copy_(torch.lerp(old.to(new[name].device), new[name], share_of_new(step)))
        self.old = {}


def share_of_new(step: Step) -> float:
    """a."""
    return math.sqrt(step.num_new / step.num_classes)
