"""Notice the first non-finite loss without waiting for the device in every iteration."""

from collections.abc import Mapping

import torch
from torch import Tensor


class NonFiniteLoss(ArithmeticError):
    def __init__(self, iteration: int, terms: Mapping[str, float]):
        super().__init__(
            f"the loss is not finite at iteration {iteration}: "
            + ", ".join(f"{k} = {v:g}" for k, v in terms.items())
        )
        self.iteration = iteration


class FiniteGuard:
    """`watch` stays on the device; `check` copies, and belongs to the iterations that are logged anyway."""

    def __init__(self, device: torch.device):
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self.values: Tensor | None = None
        self.names: list[str] = []

    def watch(self, iteration: int, terms: Mapping[str, Tensor]) -> None:
        if self.values is None:
            self.names = list(terms)
            self.values = torch.zeros(len(terms), device=self.first_bad.device)
        values = torch.stack([terms[name].detach().float() for name in self.names if name in terms])
        if len(values) < len(self.names):  # an update that was skipped lacks the terms that follow the backward pass
            return
        is_first = ~values.isfinite().all() & (self.first_bad == 0)
        self.values = torch.where(is_first | (self.first_bad == 0), values, self.values)
        self.first_bad = torch.where(is_first, iteration, self.first_bad)

    def check(self) -> None:
        if self.first_bad.item():
            terms = dict(zip(self.names, self.values.tolist(), strict=True))
            raise NonFiniteLoss(int(self.first_bad.item()), terms)
