"""How the gradient of an update is formed. The plain rule evaluates the objective once,
where the model stands.

Other rules (the files beside this one) evaluate it several times and in other places, on the same images
and with the same dropout. They know neither method nor phase, so every rule runs with every method under
every phase. What one keeps from update to update (f_sam.py) is saved with the run.

An `Evaluate` adds the gradient of weights.learn * l_seg + weights.keep * R to `p.grad` and returns the terms
by name; with `local` the ranks do not exchange what was added until the next evaluation that is not: what
`p.grad` holds by then is averaged with it. A rule evaluates equally often on all ranks, whatever their
gradients are: synchronised norms wait for each other.

What a method adds in `after_backward` (the pull of EWC, PI and RW) is no part of it: that comes after the
rule, in closed form.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from configs.registry import Conflicts, Registry, Settings
from methods.base import Weights

Terms = dict[str, Tensor]


class Evaluate(Protocol):
    def __call__(self, weights: Weights, *, local: bool = False) -> Terms: ...


UPDATES: Registry[type["Update"]] = Registry("update.name", "methods.updates")
register = UPDATES.register


@register("plain")
class Update:
    """The plain rule, and the class that all others begin with."""

    keys: tuple[str, ...] = ()  # of the config's `update`: what a rule is made with
    Options = Settings  # a rule's own settings: `update.options` in the config, `self.options` here
    evaluations = 1  # of the gradient, per update

    def __init__(self, **options: Any):
        self.options = self.Options(**options)

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        """Yield what of the config the rule cannot work with:
        pairs of a key and what is wrong with its value.
        """
        return iter(())

    def __call__(self, model: nn.Module, evaluate: Evaluate, weights: Weights, scale: float) -> Terms:
        """Leave the gradient of the update in `p.grad` and return the terms at the present weights.

        `scale` is what the gradients that `evaluate` adds are multiplied with (fp16; else 1).
        """
        return evaluate(weights)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed step needs of the updates before: tensors, numbers, lists and dicts of them.

        That of the first rank is saved, so all ranks must have the same.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"this update rule keeps no state, but the checkpoint holds {sorted(state)}")


def make_update(
    name: str, *, step: int, from_step: int, options: Mapping[str, Any] | None = None, **settings: float
) -> Update:
    """Return the rule of incremental step `step`, made with those of the `settings` that it takes."""
    make = UPDATES.find(name)
    UPDATES.check_options(name, options or {})
    if step < from_step:
        return Update()
    return make(**{key: settings[key] for key in make.keys}, **(options or {}))


# --------------------------------------------------------------------------------------- pieces for the rules


def take_gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradient of every trainable parameter, laid out in memory as it is;
    `p.grad` is empty afterwards.
    """
    taken = []
    for p in model.parameters():
        if p.requires_grad:
            # A copy: what `p.grad` was may be the memory that the ranks exchange.
            taken.append(torch.zeros_like(p) if p.grad is None else torch.empty_like(p).copy_(p.grad))
            p.grad = None
    return taken


def give_gradients(model: nn.Module, gradients: list[Tensor]) -> None:
    """Put into `p.grad` what `take_gradients` took: the next evaluation adds to it."""
    for p, gradient in zip((p for p in model.parameters() if p.requires_grad), gradients, strict=True):
        p.grad = gradient


def norm_of(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all tensors as one vector, on their device: no host waits for it.

    It is infinite or NaN where an entry is.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


@contextmanager
def moved(
    model: nn.Module, direction: list[Tensor], distance: float, length: Tensor | None = None
) -> Iterator[Tensor]:
    """The model `distance` further along `direction`, whose length is handed out; afterwards back,
    bit for bit.

    The `length` may be measured otherwise, as ASAM does. The model stays where it is if the length is 0. A
    direction that is not finite (an overflow in fp16) leaves weights that are not finite either until they
    are back, and so are the gradients taken there: the scaler skips the update.
    """
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in parameters]
    length = norm_of(direction) if length is None else length
    factor = torch.where(length > 0, distance / length, 0.0)
    with torch.no_grad():
        torch._foreach_add_(parameters, torch._foreach_mul(direction, factor))
    try:
        yield length
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)


@contextmanager
def same_statistics(model: nn.Module) -> Iterator[None]:
    """Images that pass a second time do not count twice in the running statistics of the norms."""
    buffers = list(model.buffers())
    kept = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
