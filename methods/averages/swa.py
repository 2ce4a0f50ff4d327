"""SWA, stochastic weight averaging (Izmailov et al. 2018), over any method: a step hands over the plain
average of its last weights.

    mean = (theta_1 + ... + theta_n) / n        over every `every`-th of the last `share` of the iterations

the last iteration included. From the paper: the last quarter of training, and norm statistics that are
computed anew by a pass over the training images. The paper keeps the learning rate constant or cyclical
while it averages, and takes one model per epoch or cycle; here the run's own schedule goes on, so that
nothing but what is handed over differs from the run without it, and by default every iteration counts. With a
learning rate that falls to zero the averaged weights lie closer together than in the paper.

What is averaged, and what becomes of the norms: iterates.py. No gradient is evaluated more.
"""

import math
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from configs.registry import Size
from methods.averages.iterates import IterateAverage, IterateSettings
from methods.averages.none import register


@register("swa")
class StochasticWeightAveraging(IterateAverage):
    class Options(IterateSettings):
        share: Annotated[float, Field(gt=0, le=1)] = 0.25  # of the iterations, at the end of the step
        every: Size = 1  # iterations between two that count

    def share(self, iteration: int, last: int) -> float:
        # As floor(pT) of a phase: it must not depend on the rounding of the share.
        counted = math.floor(Fraction(self.options.share).limit_denominator(1_000_000) * last)
        before_the_end = last - iteration
        counts = before_the_end < max(counted, 1) and before_the_end % self.options.every == 0
        return 1 / (self.count + 1) if counts else 0.0
