"""Notice the first non-finite loss without waiting for the device in every iteration."""

from collections.abc import Mapping

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
