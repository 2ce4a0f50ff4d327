"""Means over seeds, and tests of the differences that seeds share."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SMALLEST_TEST = 3  # seeds


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample: n - 1) over n seeds."""

    mean: float | None
    deviation: float | None
    n: int


def spread(values: Iterable[float]) -> Spread:
    values = list(values)
    return Spread(
        statistics.fmean(values) if values else None,
        statistics.stdev(values) if len(values) > 1 else None,
        len(values),
    )


@dataclass(frozen=True)
class Difference:
    """One setting minus another over the seeds that both have; `p` of a paired t test, None for too few
    seeds."""

    values: tuple[float, ...]
    p: float | None

    @property
    def spread(self) -> Spread:
        return spread(self.values)


def paired(ours: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    seeds = sorted(ours.keys() & reference.keys())
    values = tuple(ours[seed] - reference[seed] for seed in seeds)
    # Without any spread, as between copies of a run, t is not defined.
    if len(seeds) < SMALLEST_TEST or max(values) - min(values) < 1e-9:
        return Difference(values, None)
    from scipy.stats import ttest_rel  # takes a second to import

    return Difference(
        values, float(ttest_rel([ours[s] for s in seeds], [reference[s] for s in seeds]).pvalue)
    )
