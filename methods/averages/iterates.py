"""What averages over the iterations of a step have in common (ema.py, swa.py).

    mean <- mean + share (theta - mean)        after an update; the first one that counts is the mean

The mean goes over all parameters. Interpolated from the mean on, so that a weight that did not move, as one
that is frozen, keeps its bits. Training itself does not notice: the optimizer goes on from theta. Only at the
end of the step the mean takes its place: it is saved, scored, and the start and the teacher of the next step.

The running statistics of the norms belong to the iterates, not to their mean. `statistics`:

    recompute   one epoch of the step's images passes the mean in training mode, and the statistics are the
                plain average over its batches (Izmailov et al. 2018); no gradient is evaluated
    average     they are averaged as the weights are, and no image passes again

Our choices: `from_step`, 1 unless told otherwise, so that step 0 can be shared; every step averages anew;
EWC, PI and RW close their statistics before, for these are about the path that was trained, and their next
anchor is the mean. Under AlterSGD the iterates after ascents are averaged like those after descents; with its
published p the default share of SWA holds the whole phase.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from configs.registry import Settings
from data.protocols import Step
from methods.averages.none import Average


class IterateSettings(Settings):
    statistics: Literal["recompute", "average"] = "recompute"  # of the norms
    from_step: Annotated[int, Field(ge=0)] = 1  # first step whose iterations are averaged


class IterateAverage(Average):
    Options = IterateSettings
    options: Any

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.averages, self.count, self.mean = False, 0, dict[str, Tensor]()

    def share(self, iteration: int, last: int) -> float:
        """Return how much of the mean the weights after this update are, 0 for nothing.

        `self.count` is the number of those averaged before.
        """
        raise NotImplementedError

    def begin_step(self, model: nn.Module, step: Step) -> None:
        self.averages = step.index >= self.options.from_step

    @torch.no_grad()
    def after_update(self, model: nn.Module, iteration: int, last: int) -> None:
        share = self.share(iteration, last) if self.averages else 0.0
        if not share:
            return
        now = self._averaged(model)
        if self.mean:
            torch._foreach_lerp_(list(self.mean.values()), list(now.values()), share)
        else:
            self.mean = {name: tensor.clone() for name, tensor in now.items()}
        self.count += 1

    @torch.no_grad()
    def end_step(self, model: nn.Module, step: Step) -> None:
        if not self.mean:  # no update counted: the last weights are handed over
            return
        for name, tensor in self._averaged(model).items():
            tensor.copy_(self.mean[name])
        self.stale_statistics = self.options.statistics == "recompute"
        self.mean = {}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]

    def _averaged(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what is averaged: counts of batches, which are whole numbers, stay as the step left them."""
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        if self.options.statistics == "average":
            tensors |= {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        return {name: tensor.detach() for name, tensor in tensors.items()}
