"""EMA over any method: a step hands over an exponential moving average of its weights (Polyak averaging with
a memory that fades).

    mean <- d_t mean + (1 - d_t) theta_t        d_t = min(decay, (1 + t) / (10 + t))

t counts the updates of the step. The second term is the usual warm-up: after t updates the mean reaches back
over about a tenth of them, until `decay`, 0.999 as is common, takes over at t = 8990. So in steps shorter
than that, which is most of them, the warm-up decides, and a smaller decay is what changes something. The mean
begins as the weights after the first update.

What is averaged, and what becomes of the norms: iterates.py. No gradient is evaluated more.
"""

from typing import Annotated

from pydantic import Field

from methods.averages.iterates import IterateAverage, IterateSettings
from methods.averages.none import register


@register("ema")
class ExponentialMovingAverage(IterateAverage):
    class Options(IterateSettings):
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.999

    def share(self, iteration: int, last: int) -> float:
        t = self.count + 1
        return 1 - min(self.options.decay, (1 + t) / (10 + t))
