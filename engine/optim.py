"""Optimizer, learning rates and the number of iterations of a step: the only place that knows them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from configs.schema import Config, OptimConfig, TrainConfig
from data.loaders import iterations_per_epoch
from methods import Method, Weights, make_phase


def epochs_of(train: TrainConfig | Mapping, step: int) -> int:
    return _setting(train, "epochs" if step == 0 else "epochs_later")


def iterations_of(train: TrainConfig | Mapping, num_images: int, step: int) -> int:
    """T: the optimizer updates of a step."""
    return epochs_of(train, step) * iterations_per_epoch(num_images, _setting(train, "batch_size"), step)


def last_iteration_of(config: Config | Mapping, num_images: int, step: int) -> int:
    """The iteration with which a step ends: T, unless its phase stops earlier."""
    phase, train = _setting(config, "phase"), _setting(config, "train")
    settings = phase if isinstance(phase, Mapping) else phase.model_dump()
    epoch = iterations_per_epoch(num_images, _setting(train, "batch_size"), step)
    total = iterations_of(train, num_images, step)
    return make_phase(strength=1.0, step=step, epoch=epoch, **settings).last_iteration(total)


def _setting(section: Any, name: str) -> Any:
    """The value of a typed config, or of one that is read from a run's folder."""
    return section[name] if isinstance(section, Mapping) else getattr(section, name)


def initial_learning_rate(optim: OptimConfig, step: int) -> float:
    return optim.lr if step == 0 else optim.lr_later * optim.lr_decay ** (step - 1)


def make_optimizer(model: nn.Module, config: Config, step: int) -> torch.optim.Optimizer:
    """A new one for every step, as published."""
    optim = config.optim
    return torch.optim.SGD(
        model.parameters(),
        lr=initial_learning_rate(optim, step),
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        weight_decay=optim.weight_decay,
        # Fused, a first update that the scaler skips would leave the momentum uninitialised.
        fused=config.train.amp != "fp16",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, iteration: int, total: int, power: float) -> float:
    """The poly schedule, stepped per iteration; the first one runs at the full learning rate."""
    lr = optimizer.defaults["lr"] * (1 - (iteration - 1) / total) ** power
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def apply_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    method: Method,
    weights: Weights,
    lr: float,
) -> dict[str, Tensor]:
    """One optimizer update by the gradients in `p.grad`; returns the terms that the method adds in parameter space."""
    scaler.unscale_(optimizer)
    terms = {}
    # An overflow in fp16: the scaler is going to skip this update, and so does the method.
    if not scaler.is_enabled() or gradients_are_finite(model):
        terms = method.after_backward(model, weights, lr)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return terms


def gradients_are_finite(model: nn.Module) -> bool:
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    return bool(torch.stack(norms).isfinite().all())
