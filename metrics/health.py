"""Notice the first loss that is not finite without waiting for the device in every iteration,
and weights before they are saved.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError


class NonFiniteLoss(UserError, ArithmeticError):
    def __init__(self, iteration: int, terms: Mapping[str, float]):
        super().__init__(
            f"the loss is not finite at iteration {iteration}: "
            + ", ".join(f"{k} = {v:g}" for k, v in terms.items())
        )
        self.iteration = iteration


class NonFiniteWeights(UserError, ArithmeticError):
    """The losses of an iteration come from before its update,
    so that they may be finite where the weights are not.
    """


def find_not_finite(state: Any, name: str = "") -> str | None:
    """Return the dotted name of the first tensor in a nested state that holds NaN or infinity;
    None if there is none.
    """
    if isinstance(state, Tensor):
        return None if state.isfinite().all() else name
    parts = (
        state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list) else ()
    )
    found = (find_not_finite(part, f"{name}.{key}" if name else str(key)) for key, part in parts)
    return next((broken for broken in found if broken is not None), None)


class FiniteGuard:
    """`watch` stays on the device; `check` copies, and belongs to the iterations that are logged anyway.

    The terms may differ between iterations: a skipped update lacks those that follow the backward pass.
    """

    def __init__(self) -> None:
        self.watched: list[tuple[int, list[str], Tensor]] = []  # since the last check

    def watch(self, iteration: int, terms: Mapping[str, Tensor]) -> None:
        values = torch.stack([value.detach().float() for value in terms.values()])
        self.watched.append((iteration, list(terms), values))

    def check(self) -> None:
        watched, self.watched = self.watched, []
        if not watched or torch.cat([values for _, _, values in watched]).isfinite().all():
            return
        iteration, names, values = next(w for w in watched if not w[2].isfinite().all())
        raise NonFiniteLoss(iteration, dict(zip(names, values.tolist(), strict=True)))
