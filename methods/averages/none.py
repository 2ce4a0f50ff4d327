"""Which weights a step hands over: they are saved, scored, and the start and the teacher of the next step.

Without an average they are those of the last iteration. Another one (ewf.py) may freeze parts of the model
during the step and mix its weights at the end with those that the step began with. It knows neither method
nor phase nor update rule, so it runs with all of them, and keeps nothing that a resumed step does not find
again in the checkpoint of the step before.
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

    def end_step(self, model: nn.Module, step: Step) -> None:
        """Called once after the last iteration and the method's own end_step, on all ranks alike,
        before the model is saved.
        """


def make_average(name: str, options: Mapping[str, Any] | None = None) -> Average:
    make = AVERAGES.find(name)
    AVERAGES.check_options(name, options or {})
    return make(**(options or {}))
