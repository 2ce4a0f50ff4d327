"""What EWC, PI and RW share: a quadratic pull towards the old parameters,
weighed by how much each one mattered.

    R = sum_i omega_i (theta_i - anchor_i)^2        over the parameters of the old model

`omega` is a statistic gathered while the old classes were learned, min-max normalised per tensor. The
gradient of R is added in closed form after the data terms' backward pass: the observers read clean data
gradients, no second graph is built, and the hooks of DistributedDataParallel fire once.

No pull is stronger than the one whose update ends on the anchor, 2 lambda omega = 1 / learning rate. Beyond
1.36 / learning rate (momentum 0.9, Nesterov) the weights with the largest omega would swing about their
anchor ever further. The published recipe stays below: 2 * 500 * 1 = 1 / 0.001. A recipe with a higher
learning rate does not.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from configs.registry import Conflicts
from methods.base import Method, Weights

Tensors = dict[str, Tensor]


class ImportanceMethod(Method):
    """A subclass names its `statistics` (dicts of tensors by parameter name)
    and says how they are observed and used.
    """

    statistics: tuple[str, ...] = ()
    largest = 1.0  # that omega can be

    def __init__(self, cross_entropy: str = "all", **options: Any):
        super().__init__(cross_entropy, **options)
        self.omega: Tensors = {}
        self.anchor: Tensors = {}
        for name in self.statistics:
            setattr(self, name, {})

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        if config.optim.name != "sgd":
            why = "whose pull is limited by how far an update of sgd moves; another optimizer rescales it"
            yield "optim.name", f"{config.optim.name!r} is not for method.name {cls.name}, {why}"

    def observe(self, parameters: Tensors, gradients: Tensors, sign: float) -> None:
        """Update the statistics from the gradients of sign * l_seg at the present parameters."""
        raise NotImplementedError

    def importance(self, parameters: Tensors) -> Tensors:
        """omega, from the statistics at the end of a step."""
        raise NotImplementedError

    def begin_step(self, model: nn.Module, step) -> None:
        super().begin_step(model, step)
        self.anchor = snapshot({name: p for name, p in trainable(model).items() if name in self.omega})

    def end_step(self, model: nn.Module) -> None:
        self.omega = self.importance(trainable(model))

    @torch.no_grad()
    def after_backward(self, model: nn.Module, weights: Weights, learning_rate: float) -> dict[str, Tensor]:
        parameters = trainable(model)
        if weights.learn != 0:
            gradients = {name: gradient(p) for name, p in parameters.items()}
            self.observe(parameters, gradients, weights.learn)
        if not self.anchor:
            return {}
        stiffness = (
            2 * abs(weights.keep) * learning_rate
        )  # an ascent of R pushes away, by no more than a descent pulls
        moved, pull, value = self._pull(parameters, limit=1 / stiffness if stiffness else math.inf)
        torch._foreach_add_([gradient(parameters[name]) for name in moved], pull, alpha=2 * weights.keep)
        return {"penalty": value}

    @torch.no_grad()
    def penalty(self, model: nn.Module) -> Tensor:
        """R at the present parameters."""
        return self._pull(trainable(model))[2] if self.anchor else torch.zeros(())

    def _pull(self, parameters: Tensors, limit: float = math.inf) -> tuple[list[str], list[Tensor], Tensor]:
        """Names, min(omega, limit) * (theta - anchor), and R, to which no limit applies."""
        names, omega = list(self.anchor), aligned(self.omega, self.anchor)
        distance = torch._foreach_sub(aligned(parameters, self.anchor), list(self.anchor.values()))
        pull = torch._foreach_mul(distance, omega)
        value = torch.stack(
            [torch.dot(a.flatten(), b.flatten()) for a, b in zip(pull, distance, strict=True)]
        ).sum()
        if limit < self.largest:
            pull = torch._foreach_mul(distance, torch._foreach_clamp_max(omega, limit))
        return names, list(pull), value

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("omega", "anchor", *self.statistics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = {"omega", "anchor", *self.statistics}
        if set(state) != expected:
            raise ValueError(
                f"method {self.name!r} needs the statistics {sorted(expected)}, the checkpoint holds "
                f"{sorted(state)}: start from a step that was trained with this method"
            )
        for name, value in state.items():
            setattr(self, name, value)


def trainable(model: nn.Module) -> Tensors:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every loss"
    return parameter.grad


def snapshot(tensors: Tensors) -> Tensors:
    return {name: t.detach().clone() for name, t in tensors.items()}


def min_max(tensors: Tensors) -> Tensors:
    """(m - min) / (max - min + 1e-8) per tensor."""
    return {name: (t - t.min()) / (t.max() - t.min() + 1e-8) for name, t in tensors.items()}


def extend(statistic: Tensors, parameters: Tensors, value: float) -> None:
    """Start parameters the statistic does not know yet (all at step 0, the new classifier later)
    at `value`.
    """
    for name, p in parameters.items():
        if name not in statistic:
            statistic[name] = torch.full_like(p, value, requires_grad=False)


def aligned(tensors: Tensors, like: Tensors) -> list[Tensor]:
    """Return the tensors in the order of `like`, for the foreach kernels."""
    return [tensors[name] for name in like]


def move_since(previous: Tensors, parameters: Tensors) -> list[Tensor] | None:
    """theta_before - theta since the last look, which is now; None at the first look."""
    if not previous:
        previous |= snapshot(parameters)
        return None
    now, before = list(parameters.values()), aligned(previous, parameters)
    move = torch._foreach_sub(before, now)
    torch._foreach_copy_(before, now)
    return list(move)


def update_fisher(fisher: Tensors, gradients: Tensors, decay: float) -> None:
    """F <- a g^2 + (1 - a) F. The square forgets the sign of an ascent."""
    information, g = aligned(fisher, gradients), list(gradients.values())
    torch._foreach_mul_(information, 1 - decay)
    torch._foreach_addcmul_(information, g, g, value=decay)
