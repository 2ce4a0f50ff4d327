"""DFT*, Direct Fine-Tuning with what is learned frozen ("Revisiting Continual Semantic Segmentation with
Pre-trained Vision Models", 2025): the simple baseline that keeps up with many methods.

Plain cross-entropy throughout. Classifiers of all steps of the protocol exist from step 0 on, and their
scores enter every softmax: they learn as negatives what is not theirs. From step 1 on backbone, head and the
classifiers of earlier steps are frozen and in eval, so that only the new classifier and those still to come
are trained. There is no teacher and no R: a phase that flips l_seg has nothing to hold it back with.

It knows how many classes will come, which no other method here does, and its step 0 cannot be shared.

As the authors' code; but that predicts over all classifiers, ours over those of classes seen so far. After
the last step these are the same.

Published recipe: learning rate 0.02 in step 0, then 0.0005 on 15-1 and 10-1, 0.005 on 19-1; 30 epochs, batch
24, mixed precision, overlapped; void ignored.
"""

from typing import Any

from torch import Tensor

from configs.registry import Conflicts
from methods.base import Method, register


@register("dft")
class DFT(Method):
    shares_first_step = False
    knows_future = True

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        if config.average.name == "ewf":
            yield (
                "average.name",
                "'ewf' has nothing to fuse: method.name dft freezes all that steps share",
            )

    def add_classifier(self, model: Any, step) -> None:
        if step.index == 0:
            for every in self.protocol:
                super().add_classifier(model, every)

    def freeze(self, model: Any) -> None:
        model.freeze(model.body, model.head)

    def begin_step(self, model: Any, step) -> None:
        super().begin_step(model, step)
        model.freeze(*model.classifiers[: step.index])

    @classmethod
    def scores(cls, logits: Tensor, num_classes: int) -> Tensor:
        return logits[:, :num_classes].softmax(dim=1)
