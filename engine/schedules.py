"""Learning rates: where a step begins, and by which schedule they change.

A schedule that `optim.schedule` can choose is a function of how much of the step is done, from 0 to just
below 1, and of the config's `optim`. It gives the factor on the step's initial learning rate, anew for each
iteration.
"""

from collections.abc import Callable

import torch

from configs.registry import Registry
from configs.schema import OptimConfig

SCHEDULES: Registry[Callable[[float, OptimConfig], float]] = Registry("optim.schedule", "engine")
register = SCHEDULES.register


@register("poly")
def poly(progress: float, optim: OptimConfig) -> float:
    return (1 - progress) ** optim.power


def make_schedule(optim: OptimConfig) -> Callable[[float], float]:
    schedule = SCHEDULES.find(optim.schedule)
    return lambda progress: schedule(progress, optim)


def initial_learning_rate(optim: OptimConfig, step: int) -> float:
    return optim.lr if step == 0 else optim.lr_later * optim.lr_decay ** (step - 1)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, schedule: Callable[[float], float], iteration: int, total: int
) -> float:
    """The learning rate of an iteration; the first one of a step has no progress behind it.

    A method may have given groups of parameters a factor of their own.
    """
    lr = optimizer.defaults["lr"] * schedule((iteration - 1) / total)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr
