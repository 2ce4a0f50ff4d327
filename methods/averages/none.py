"""Which weights a step hands over: they are saved, scored, and the start and the teacher of the next step.

Without an average they are those of the last iteration. Another one may freeze parts of the model during the
step, mix its weights at the end with those that the step began with (ewf.py), or average over the iterations
(ema.py, swa.py). It knows neither method nor phase nor update rule, so it runs with all of them. What it
gathers over the iterations is saved with the run; all else a resumed step finds again in the checkpoint of
the step before.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from configs.registry import Conflicts, Registry, Settings
from data.protocols import Step

AVERAGES: Registry[type["Average"]] = Registry("average.name", "methods.averages")
register = AVERAGES.register


@register("none")
class Average:
    """The weights of the last iteration, and the class that all others begin with."""

    Options = Settings  # an average's own settings: `average.options` in the config, `self.options` here
    # Set by `end_step` if the running statistics of the norms no longer fit the weights: before the model is
    # saved they are computed anew, over one epoch of the step's images.
    stale_statistics = False

    def __init__(self, **options: Any):
        self.options = self.Options(**options)

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        """Yield what of the config the average cannot work with:
        pairs of a key and what is wrong with its value.
        """
        return iter(())

    def remember(self, model: nn.Module) -> None:
        """Called from step 1 on with the model as the step before saved it: no class added,
        no bias lowered.
        """

    def begin_step(self, model: nn.Module, step: Step) -> None:
        """Called with the model as the step starts from it, before the method's own begin_step:
        what is frozen here stays so.
        """

    def after_update(self, model: nn.Module, iteration: int, last: int) -> None:
        """Called after each update of the weights, the step ending with iteration `last`.

        Not called where the phase only passes images through the network, nor where the scaler of fp16 skips
        an update.
        """

    def end_step(self, model: nn.Module, step: Step) -> None:
        """Called once after the last iteration and the method's own end_step, on all ranks alike,
        before the model is saved.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed step needs of the iterations before: tensors, numbers and dicts of them.

        That of the first rank is saved. What follows from the weights alone is the same on all of them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"this average keeps no state, but the checkpoint holds {sorted(state)}")


def make_average(name: str, options: Mapping[str, Any] | None = None) -> Average:
    make = AVERAGES.find(name)
    AVERAGES.check_options(name, options or {})
    return make(**(options or {}))
