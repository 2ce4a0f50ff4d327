"""AlterSGD: alternate descent and ascent at the end of each step (Huang et al. 2021, Algorithm 1 and Eq. 6).

The first floor(pT) of T iterations train normally. Then halves of `every` iterations alternate, starting with
a descent:

    descent                       minimises   l_seg + lambda_a R
    ascent, flip = "seg" (Eq. 6)  minimises  -l_seg + lambda_b R
    ascent, flip = "all" (Eq. 2)  minimises  -l_seg - lambda_b R

The paper can be read in four ways: its Eq. 6 flips l_seg alone, its Algorithm 1, Eq. 2 and Theorem 1 flip the
whole loss; its Algorithm 1 says "iteration", and gives p in epochs of losses that are means over the whole
training set.

To second order a pair on the same loss L moves by -(eta^2 / 2) grad ||grad L||^2 (Theorem 1): towards flatter
regions. What it does to first order is left to the controls, which leave out the second order and nothing
else. With flip = "seg" a pair cancels l_seg and leaves two steps on R: `Consolidate`. With flip = "all" it
cancels everything: `Pause`, which still passes the images through the network and so moves the statistics of
its norms, and `Stop`, which ends the step at floor(pT).

What else the paper leaves open are options whose default comes first.
"""

import math
from fractions import Fraction
from typing import Any

from torch.optim import Optimizer

from configs.registry import Conflicts
from methods.base import Weights
from methods.phases.descent import Descent, register


@register("altersgd")
class AlterSGD(Descent):
    keys = ("p", "lambda_a", "lambda_b", "flip", "every", "momentum", "batch", "weight_decay", "lr")

    def __init__(
        self,
        p: float = 25 / 30,
        lambda_a: float = 1.0,
        lambda_b: float | None = None,
        *,
        flip: str = "seg",  # an ascent flips l_seg alone | all of L
        every: int = 1,  # iterations of a half: of a descent, and of an ascent
        momentum: str = "keep",  # keep | reset at the start of the phase | off in the phase
        batch: str = "next",  # the ascent takes the next mini-batch | the same one as its descent
        weight_decay: str = "always",  # always decays | signed: follows the sign of l_seg
        lr: str = "decay",  # the schedule continues | hold: the learning rate stays where the phase began
        **options: Any,
    ):
        super().__init__(lambda_a, **options)
        self.lambda_b = lambda_a if lambda_b is None else lambda_b
        # 25/30 as a float is not 25/30: floor(pT) must not depend on the rounding of p.
        self.p = Fraction(p).limit_denominator(1_000_000)
        if not 0 <= self.p <= 1:
            raise ValueError(f"phase.p must lie in [0, 1], not {p}")
        if every < 1:
            raise ValueError(f"phase.every must be at least one iteration, not {every}")
        self.flip, self.every = flip, every
        self.momentum, self.batch, self.weight_decay, self.lr = momentum, batch, weight_decay, lr

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        phase, optim = config.phase, config.optim
        if phase.momentum != "keep" and optim.momentum == 0:
            yield "phase.momentum", f"{phase.momentum!r} has nothing to change: optim.momentum is 0"
        if phase.weight_decay == "signed" and optim.weight_decay == 0:
            yield "phase.weight_decay", "'signed' has nothing to change: optim.weight_decay is 0"

    def __call__(self, iteration: int, total: int) -> Weights:
        if not self.ascends(iteration, total):
            return Weights(1.0, self.lambda_a)
        return Weights(-1.0, -self.lambda_b if self.flip == "all" else self.lambda_b)

    def ascends(self, iteration: int, total: int) -> bool:
        late = iteration - self.boundary(total)
        return late > 0 and (late - 1) // self.every % 2 == 1

    def boundary(self, total: int) -> int:
        return math.floor(self.p * total)

    def batch_of(self, iteration: int, total: int) -> int:
        repeats = self.batch == "same" and self.ascends(iteration, total)
        return iteration - self.every if repeats else iteration

    def schedule_iteration(self, iteration: int, total: int) -> int:
        return min(iteration, self.boundary(total) + 1) if self.lr == "hold" else iteration

    def prepare(self, optimizer: Optimizer, iteration: int, total: int) -> None:
        late = iteration - self.boundary(total)
        if late <= 0:
            return
        if late == 1 and self.momentum == "reset":
            optimizer.state.clear()
        for group in optimizer.param_groups:
            if self.momentum == "off":
                group["momentum"] = 0.0
            if self.weight_decay == "signed":
                sign = -1.0 if self.ascends(iteration, total) else 1.0
                group["weight_decay"] = abs(group["weight_decay"]) * sign


@register("consolidate")
class Consolidate(AlterSGD):
    """The control of flip = "seg": after floor(pT) only R is minimised. l_seg apart,
    every option does what it does there.
    """

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        yield from super().conflicts(config)
        if config.phase.flip == "all":
            control = "which is the control of seg; those of all are pause and stop"
            yield "phase.flip", f"'all' is not for phase.name consolidate, {control}"

    def __call__(self, iteration: int, total: int) -> Weights:
        weights = super().__call__(iteration, total)
        return weights if iteration <= self.boundary(total) else Weights(0.0, weights.keep)


@register("pause")
class Pause(AlterSGD):
    """A control of flip = "all": after floor(pT) images pass, so the norms' statistics move,
    and no weight does.
    """

    def __call__(self, iteration: int, total: int) -> Weights:
        trains = iteration <= self.boundary(total)
        return Weights(1.0, self.lambda_a) if trains else Weights(0.0, 0.0, updates=False)

    def ascends(self, iteration: int, total: int) -> bool:
        return False


@register("stop")
class Stop(Pause):
    """A control of flip = "all": the step ends at floor(pT), with the learning rates of the whole step."""

    def last_iteration(self, total: int) -> int:
        return self.boundary(total)
