"""MiB-AugM: MiB with a memory of old images, which make half of every batch. Needs method.memory; published:
100 images, lambda 10.

On images of the step l_seg is MiB's (Eq. 5). A remembered image is labelled with classes that are old by now,
so these count as they are, while its background may hide classes that came later: -log p_y for an old class
y, -log(p_0 + sum of new p) for the background and for new labels, should there be any. Both halves weigh the
same, and so they do in the distillation.
"""

from typing import Any

import torch
from torch import Tensor

from configs.registry import Conflicts
from data.protocols import BACKGROUND, IGNORE_INDEX
from methods.base import register
from methods.mib import MiB


@register("mib_augm")
class MiBAugM(MiB):
    memory = "half"
    strength = {"default": 10.0}

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        if config.method.memory == 0:
            yield "method.memory", "0 leaves method.name mib_augm nothing to remember; published: 100"

    def memory_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        background_or_new = torch.cat([logits[:, :1], logits[:, self.num_old :]], dim=1)
        hidden = background_or_new.logsumexp(dim=1, keepdim=True)
        scores = torch.cat([hidden, logits[:, 1 : self.num_old]], dim=1)
        is_new = (labels >= self.num_old) & (labels != IGNORE_INDEX)
        return self.losses.cross_entropy(scores, labels.masked_fill(is_new, BACKGROUND), self.mean_over)
