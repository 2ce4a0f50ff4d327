"""Optimizer, learning rate and number of iterations of a step: the only place that knows them.

An optimizer that `optim.name` can choose is a function of the parameters, the initial learning rate and the
config. The phase and the schedule change its `param_groups`; its state is saved with the run.

A schedule that `optim.schedule` can choose is a function of how much of the step is done, from 0 to just
below 1, and of the config's `optim`. It gives the factor on the step's initial learning rate, anew for each
iteration.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configs.registry import Conflicts, Registry
from configs.schema import Config, OptimConfig, TrainConfig
from data.loaders import iterations_per_epoch
from methods import PHASES, Method, make_phase

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]  # or groups of them, as PyTorch has these
MakeOptimizer = Callable[[Parameters, float, Config], torch.optim.Optimizer]
OPTIMIZERS: Registry[MakeOptimizer] = Registry("optim.name", "engine")
SCHEDULES: Registry[Callable[[float, OptimConfig], float]] = Registry("optim.schedule", "engine")
register_schedule = SCHEDULES.register


def epochs_of(train: TrainConfig | Mapping, step: int) -> int:
    return _setting(train, "epochs" if step == 0 else "epochs_later")


def iterations_of(train: TrainConfig | Mapping, num_images: int, step: int) -> int:
    """Return T, the number of optimizer updates of a step."""
    return epochs_of(train, step) * iterations_per_epoch(num_images, _setting(train, "batch_size"), step)


def last_iteration_of(config: Config | Mapping, num_images: int, step: int) -> int:
    """Return the iteration with which a step ends: T, unless its phase stops earlier."""
    phase, train = _setting(config, "phase"), _setting(config, "train")
    settings = phase if isinstance(phase, Mapping) else phase.model_dump()
    epoch = iterations_per_epoch(num_images, _setting(train, "batch_size"), step)
    total = iterations_of(train, num_images, step)
    return make_phase(strength=1.0, step=step, epoch=epoch, **settings).last_iteration(total)


def _setting(section: Any, name: str) -> Any:
    """Return a value of a typed config, or of one that is read from a run's folder."""
    return section[name] if isinstance(section, Mapping) else getattr(section, name)


def settings_of(make: MakeOptimizer, config: Config) -> set[str]:
    """Return the settings that an optimizer has, by PyTorch's names: "momentum", "weight_decay"."""
    return set(make([nn.Parameter(torch.zeros(1))], config.optim.lr, config).defaults)


def _conflicts(make: MakeOptimizer, config: Config) -> Conflicts:
    """A phase cannot change what the optimizer does not have."""
    phase, known = config.phase, settings_of(make, config)
    for key, usual in (("momentum", "keep"), ("weight_decay", "always")):
        value = getattr(phase, key)
        if value != usual and key in PHASES[phase.name].keys and key not in known:
            yield (
                f"phase.{key}",
                f"{value!r} has nothing to change: optim.name {config.optim.name} has no "
                f"{key.replace('_', ' ')} of its own",
            )


def register(name: str) -> Callable[[MakeOptimizer], MakeOptimizer]:
    """Decorator: make an optimizer selectable as `optim.name=<name>`."""

    def add(make: MakeOptimizer) -> MakeOptimizer:
        return OPTIMIZERS.register(name, partial(_conflicts, make))(make)

    return add


@register("sgd")
def sgd(parameters: Parameters, lr: float, config: Config) -> torch.optim.Optimizer:
    optim = config.optim
    return torch.optim.SGD(
        parameters,
        lr=lr,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        weight_decay=optim.weight_decay,
        # Fused, a first update that the scaler skips would leave the momentum uninitialised.
        fused=config.train.amp != "fp16",
    )


@register("adamw")
def adamw(parameters: Parameters, lr: float, config: Config) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay; its averages decay as PyTorch has it, by 0.9 and 0.999."""
    return torch.optim.AdamW(
        parameters, lr=lr, weight_decay=config.optim.weight_decay, fused=config.train.amp != "fp16"
    )


def make_optimizer(model: nn.Module, config: Config, step: int, method: Method) -> torch.optim.Optimizer:
    """Return a new optimizer, one for every step, as published; the method groups the parameters."""
    make = OPTIMIZERS.find(config.optim.name)
    return make(method.parameter_groups(model), initial_learning_rate(config.optim, step), config)


@register_schedule("poly")
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
