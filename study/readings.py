"""The four ways to read AlterSGD's paper, and at which shares p they are compared.

What an ascent flips (l_seg alone: Eq. 6 | all of L: Eq. 2, Algorithm 1, Theorem 1) x how long it lasts (an
iteration: the word of Algorithm 1 | an epoch: the unit of its losses and of p). docs/altersgd.md says what
the paper says where.
"""

from dataclasses import dataclass
from fractions import Fraction

SIXTHS = (Fraction(1, 6), Fraction(1, 3), Fraction(1, 2), Fraction(2, 3), Fraction(5, 6))
PUBLISHED_P, CONTROLLED_P = Fraction(5, 6), (Fraction(5, 6), Fraction(2, 3))
CORNERS = ((1, 1000), (100, 1), (100, 1000), (10, 100))  # (lambda_a, lambda_b) of table 4


@dataclass(frozen=True)
class Reading:
    """`changes` are the keys of `phase` that differ from the default,
    `without` the phases that lack its second order.
    """

    name: str
    changes: tuple[tuple[str, str], ...]
    without: tuple[str, ...]

    @property
    def by_epoch(self) -> bool:
        return ("every", "epoch") in self.changes

    def share(self, p: Fraction, epochs: int) -> Fraction:
        """Return the p at which this reading is tried for the paper's `p`, in steps of `epochs` epochs."""
        return ending_on_a_descent(p, epochs) if self.by_epoch and p < 1 else p

    def controls(self, p: Fraction, epochs: int) -> list[tuple[str, Fraction]]:
        """Return phases and shares of the controls for the paper's `p`.

        Where whole epochs of all of L cancel, an odd number of them leaves one descent: these controls also
        train for that one.
        """
        share = self.share(p, epochs)
        shares = (
            [share, share + Fraction(1, epochs)]
            if self.by_epoch and ("flip", "all") in self.changes
            else [share]
        )
        return [(phase, s) for s in shares for phase in self.without]


READINGS = (
    Reading("l_seg by iteration", (), ("consolidate",)),
    Reading("l_seg by epoch", (("every", "epoch"),), ("consolidate",)),
    Reading("all of L by iteration", (("flip", "all"),), ("pause", "stop")),
    Reading("all of L by epoch", (("flip", "all"), ("every", "epoch")), ("pause", "stop")),
)


def ending_on_a_descent(p: Fraction, epochs: int) -> Fraction:
    """Return the share nearest to p, the smaller of two, that leaves an odd number of epochs: descent,
    ascent, ..., descent.

    At least three, as far as there are as many: a single one would be plain training.
    """
    left = [n for n in range(1, epochs + 1, 2) if n >= 3] or [1]
    odd = [Fraction(epochs - n, epochs) for n in left]
    return min(odd, key=lambda share: (abs(share - p), share))
