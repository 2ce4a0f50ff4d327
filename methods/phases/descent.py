"""What a phase is: with which two numbers the terms of the objective are weighed in each iteration.

Plain training is the simplest one, and the class that all others begin with.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from configs.registry import Conflicts, Registry, Settings
from methods.base import Weights

PHASES: Registry[type["Descent"]] = Registry("phase.name", "methods.phases")
register = PHASES.register


@register("descent")
class Descent:
    """Plain training: every iteration descends l_seg + lambda R."""

    keys: tuple[str, ...] = ("lambda_a",)  # what it is made with: keys of the config's `phase`, and `epoch`
    Options = Settings  # a phase's own settings: `phase.options` in the config, `self.options` here

    def __init__(self, lambda_a: float = 1.0, **options: Any):
        self.lambda_a, self.options = lambda_a, self.Options(**options)

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        """Yield what of the config the phase cannot work with:
        pairs of a key and what is wrong with its value.
        """
        return iter(())

    def __call__(self, iteration: int, total: int) -> Weights:
        """Return the weights of update number `iteration` (from 1, as in Algorithm 1) out of `total`."""
        return Weights(learn=1.0, keep=self.lambda_a)

    def boundary(self, total: int) -> int:
        """Return the last iteration of normal training."""
        return total

    def last_iteration(self, total: int) -> int:
        """Where the step ends; the learning rates are those of a step of `total` iterations."""
        return total

    def batch_of(self, iteration: int, total: int) -> int:
        """Return which batch of the step's stream (from 1) the iteration trains on."""
        return iteration

    def schedule_iteration(self, iteration: int, total: int) -> int:
        """Return the iteration whose learning rate is used."""
        return iteration

    def prepare(self, optimizer: Optimizer, iteration: int, total: int) -> None:
        """Called before each update, for what a phase changes in the optimizer itself."""


def make_phase(
    name: str,
    *,
    strength: float | None,
    step: int,
    from_step: int = 1,
    p: float = 25 / 30,
    lambda_a: float | None = None,
    lambda_b: float | None = None,
    every: str | int = "iteration",
    epoch: int | None = None,
    options: Mapping[str, Any] | None = None,
    **choices: str,
) -> Descent:
    """Return the phase of incremental step `step`, in which an epoch has `epoch` iterations.

    lambda_a and lambda_b are the method's `strength` unless given.
    """
    make = PHASES.find(name)
    PHASES.check_options(name, options or {})
    assert strength is not None, "engine.arguments.read_config fills in the published one"
    if name == "descent" or step < from_step:
        return Descent(strength)
    lambda_a = strength if lambda_a is None else lambda_a
    lambda_b = strength if lambda_b is None else lambda_b
    length = {"iteration": 1, "epoch": epoch}.get(every, every) if isinstance(every, str) else every
    assert isinstance(length, int), "who asks for halves of an epoch says how long an epoch is"
    weights = {"lambda_a": lambda_a, "lambda_b": lambda_b}
    given: dict[str, Any] = choices | weights | {"p": p, "every": length, "epoch": epoch}
    return make(**{key: given[key] for key in make.keys if key in given}, **(options or {}))
