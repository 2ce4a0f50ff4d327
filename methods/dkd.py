"""DKD, Decomposed Knowledge Distillation (Baek et al. 2022): sigmoids of foreground classes, whose scores
are held together and part by part.

A classifier w, b on the head's features x >= 0 is cut into positive and negative reasoning, without the bias,

    z = w.x + b        z+ = max(w, 0).x        z- = min(w, 0).x

and with BCE summed over classes and averaged over pixels, z_T of the teacher, s the sigmoid,

    l_seg = BCE(z_new, y; pos_weight) + BCE(z_a, 0)
    R = BCE(z_old, s(z_T)) + BCE(z+_old, s(z+_T)) + BCE(z-_old, s(z-_T))        strength 5

z_a is an auxiliary classifier on features whose gradient is cut off: it learns what is not an object, and the
classifiers of new classes start as its copy. A pixel is background where no sigmoid exceeds 1/2, else the
largest one's. There is no background class to be modelled, and step 0 cannot be shared.

As the authors' code: z+ and z- at the resolution of the features, the others at that of the labels; void and
all that is not new is a negative; pos_weight 2 in step 0 and 1 later; from step 1 on norms keep statistics,
scales and shifts, and only the new classifier decays. The backbone has a tenth of the learning rate
(`body_lr`). DKD-M is this with method.memory=100, concatenated to the images of the step.

Published recipe: configs/recipes/dkd.yaml (60 epochs, batch 32, learning rate 0.01 and 0.001 of the head;
mixed precision; plain ReLU, dropout 0.1 of the head in step 0, norms of the backbone with momentum 0.01).
Ours: the norms and the head of this code base, whose leaky ReLU lets features be slightly negative unless
model.norm says otherwise; labels of remembered images are those of the step that saw them, where the code
asks for true labels of the new classes in them (in the mode disjoint there are none).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.registry import NonNegative, Settings
from methods.base import Method, register
from models.upsample import enlarge


@register("dkd")
class DKD(Method):
    class Options(Settings):
        pos_weight: NonNegative = 2.0  # of positive pixels, in step 0
        pos_weight_later: NonNegative = 1.0
        body_lr: NonNegative = 0.1  # learning rate of the backbone, as a share of the others'

    options: Options
    needs_teacher = True
    memory = "concatenated"
    shares_first_step = False
    strength = 5.0

    def add_classifier(self, model: Any, step) -> None:
        model.add_classes(step.num_new)  # no background
        if step.index == 0:
            model.add_further("auxiliary", 1)

    @torch.no_grad()
    def init_classifier(self, model: Any) -> None:
        new, auxiliary = model.classifiers[-1], model.further["auxiliary"]
        new.weight.copy_(auxiliary.weight.expand_as(new.weight))
        new.bias.copy_(auxiliary.bias.expand_as(new.bias))

    def freeze(self, model: Any) -> None:
        model.freeze(*model.norms())

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        *old, new = model.classifiers
        decay: dict[str, Any] = {} if self.num_old == 1 else {"weight_decay": 0.0}
        rest = [p for part in (model.head, model.further, *old) for p in part.parameters()]
        return [
            {"params": list(model.body.parameters()), "lr_scale": self.options.body_lr} | decay,
            {"params": rest} | decay,
            {"params": list(new.parameters())},
        ]

    def outputs(self, network: Any, hidden: Tensor) -> Mapping[str, Tensor]:
        weight = torch.cat([classifier.weight for classifier in network.classifiers])
        return {
            "auxiliary": network.further["auxiliary"](hidden.detach()),
            "positive": F.conv2d(hidden, weight.clamp(min=0)),
            "negative": F.conv2d(hidden, weight.clamp(max=0)),
        }

    def learn(self, student, batch) -> Tensor:
        options, first = self.options, self.num_old
        pos_weight = options.pos_weight if first == 1 else options.pos_weight_later
        new = student.logits[:, first - 1 :]
        auxiliary = enlarge(student.extra["auxiliary"], batch.labels.shape[1:])
        objects = self.losses.foreground_cross_entropy(new, batch.labels, first, pos_weight)
        return objects + F.softplus(auxiliary).mean()

    def retention_losses(self, student, teacher) -> dict[str, Tensor]:
        pairs = {"distillation": (student.logits, teacher.logits)}
        pairs |= {name: (student.extra[name], teacher.extra[name]) for name in ("positive", "negative")}
        return {name: self.losses.binary_distillation(*both) for name, both in pairs.items()}

    @classmethod
    def scores(cls, logits: Tensor, num_classes: int) -> Tensor:
        return torch.cat([torch.full_like(logits[:, :1], 0.5), logits.sigmoid()], dim=1)
