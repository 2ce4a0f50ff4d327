"""SSUL, Semantic Segmentation with Unknown Label (Cha et al. 2021): objects that are not known yet have a
class of their own, and all that was learned is frozen.

The outputs are [unknown, background, foreground classes], one sigmoid each, with a small head (3x3
convolution, norm, 1x1) for the unknown class, for the background and for the classes of every step:

    l_seg = BCE summed over the outputs, averaged over pixels that are not void; no R

A pixel without a label is of the unknown class if it is salient, else background. Where it has no label and
the teacher's largest sigmoid is that of a foreground class and at least `threshold`, it gets that class as a
pseudo-label. New heads start as copies of the head of the unknown class, which has seen such objects. From
step 1 on backbone, DeepLab's head, earlier heads and all norms are frozen; the heads of the new classes and
of the unknown class have the learning rate of the config, that of the background 1e-4 of it
(`background_lr`). In testing p_background + p_unknown stands for the background, and the largest p wins.

Saliency maps come from another network and other data: `method.options.saliency=<folder>` of PNG files, one
for each training image and of its size, not 0 where something is salient. Without it **all** unlabelled
pixels are unknown, as the authors do on ADE20K: on VOC that is not the published variant, and results say so.

Published recipe: configs/recipes/ssul.yaml (50 epochs, batch 32, learning rate 0.01 in all steps and a tenth
for the backbone in step 0, random scaling and cropping to 513; void left out: data.void=ignore,
method.cross_entropy=valid). The authors keep the checkpoint with the best new classes on the val set; here
it is always the last. SSUL-M is this with method.memory=100: half of each batch. Ours: the norm of this code
base in the small heads.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.registry import Conflicts, NonNegative, Probability, Settings
from data.protocols import BACKGROUND, IGNORE_INDEX, SALIENT
from methods.base import Method, register

UNKNOWN_OUTPUT, BACKGROUND_OUTPUT, NUM_EXTRA = 0, 1, 1  # a class has its label + NUM_EXTRA as output


@register("ssul")
class SSUL(Method):
    class Options(Settings):
        saliency: str | None = None  # a folder of maps
        threshold: Probability = 0.7  # of pseudo-labels
        body_lr: NonNegative = 0.1  # learning rate of the backbone in step 0, as a share of the others'
        background_lr: NonNegative = 1e-4  # of the background's head in later steps

    options: Options
    needs_teacher = True
    memory = "half"
    shares_first_step = False

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        if config.average.name == "ewf":
            yield "average.name", "'ewf' has nothing to fuse: method.name ssul freezes all that steps share"
        saliency = config.method.options.get("saliency")
        if saliency is not None and not Path(saliency).is_dir():
            yield "method.options", f"saliency: no folder {saliency}; leave it out to do without maps"

    @classmethod
    def remarks(cls, config: Any) -> list[str]:
        without = "no saliency maps: all that has no label is unknown"
        given = config.method.options.get("saliency") is not None
        return [*super().remarks(config), "saliency maps" if given else without]

    def add_classifier(self, model: Any, step) -> None:
        hidden = model.head.out_channels
        for num in (1, 1, step.num_new) if step.index == 0 else (step.num_new,):
            model.add_classes(num, hidden)

    @torch.no_grad()
    def init_classifier(self, model: Any) -> None:
        unknown, new = model.classifiers[UNKNOWN_OUTPUT].state_dict(), model.classifiers[-1]
        same = {name: t.expand_as(new.state_dict()[name]).clone() for name, t in unknown.items()}
        new.load_state_dict(same)  # the last convolution has an output for each new class

    def freeze(self, model: Any) -> None:
        model.freeze(model.body, model.head, *model.classifiers[2:-1], *model.norms())

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        if self.num_old == 1:
            rest = [p for part in (model.head, model.classifiers) for p in part.parameters()]
            body = {"params": list(model.body.parameters()), "lr_scale": self.options.body_lr}
            return [body, {"params": rest}]
        background = list(model.classifiers[BACKGROUND_OUTPUT].parameters())
        slow = {id(p) for p in background}
        return [
            {"params": [p for p in model.parameters() if id(p) not in slow]},
            {"params": background, "lr_scale": self.options.background_lr},
        ]

    def targets(self, labels: Tensor, teacher) -> Tensor:
        score, output = teacher.logits.sigmoid().max(dim=1)
        unlabelled = (labels == BACKGROUND) | (labels == SALIENT)
        sure = unlabelled & (output > BACKGROUND_OUTPUT) & (score >= self.options.threshold)
        return torch.where(sure, output - NUM_EXTRA, labels)

    def segmentation_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        unknown = SALIENT if self.options.saliency else BACKGROUND
        outputs = torch.where(labels == unknown, UNKNOWN_OUTPUT, labels + NUM_EXTRA)
        outputs = torch.where(labels == IGNORE_INDEX, IGNORE_INDEX, outputs)
        return self.losses.binary_cross_entropy(logits, outputs, self.mean_over)

    @classmethod
    def scores(cls, logits: Tensor, num_classes: int) -> Tensor:
        unknown, background, classes = logits.sigmoid().split([1, 1, num_classes - 1], dim=1)
        return torch.cat([background + unknown, classes], dim=1)
