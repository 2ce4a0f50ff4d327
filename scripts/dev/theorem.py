"""Theorem 1 of AlterSGD, measured: how far a descent and an ascent move the weights,
and how far the theorem says they do.

    python -m scripts.dev.theorem docs/theorem.png
    python -m scripts.dev.theorem docs/theorem.png --epoch docs/theorem_epoch.png

A small tanh network in double precision, six learning rates; the slope of the error in log-log says which
order of eta is left. As the theorem has it, and with what training adds to it: another batch in the ascent,
momentum. With --epoch also for an epoch of descents and one of ascents (scripts/dev/theorem_epoch.py).
docs/flatness.md explains.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from methods.phases.altersgd import AlterSGD
from metrics import flatness
from scripts.dev.theorem_epoch import log_slope, small_network, theorem_epoch
from tracking.tables import format_table

ETAS = [1e-2 * 2**-k for k in range(6)]
SETTLED = 100  # pairs after which 0.9^(2 pairs) no longer shows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.dev.theorem",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("picture", type=Path, help="draw it here (.png)")
    parser.add_argument("--epoch", type=Path, metavar="PICTURE", help="measure whole epochs too (.png)")
    given = parser.parse_args(arguments)
    print(theorem(given.picture))
    if given.epoch:
        print(f"\n{theorem_epoch(given.epoch)}")
    return 0


@dataclass(frozen=True)
class Variant:
    """How the pair whose displacement is measured is made: the theorem's by default."""

    momentum: float = 0.0
    batch: str = "same"
    pair: int = 1  # which pair of the phase


VARIANTS = {
    "the theorem's: plain SGD, one batch": Variant(),
    "another batch in the ascent": Variant(batch="next"),
    "momentum 0.9, first pair": Variant(momentum=0.9),
    f"momentum 0.9, after {SETTLED} pairs": Variant(momentum=0.9, pair=SETTLED + 1),
}
# Marker, colour (distinct to the colour-blind), line, and how far up the name stands: two of the curves
# almost meet.
LOOKS = (
    ("o", "#D55E00", "-", 0),
    ("s", "#009E73", "-", 6),
    ("^", "#0072B2", "--", -6),
    ("D", "#CC79A7", "-", 0),
)


def pair_of_steps(eta: float, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return how far a descent and an ascent move a tanh network, and -(eta^2 / 2) grad ||grad L||^2,
    which Theorem 1 predicts.
    """
    torch.manual_seed(0)
    net = small_network()
    inputs, targets = torch.randn(2, 16, 3, dtype=torch.float64), torch.randint(3, (2, 16))
    parameters = list(net.parameters())

    def loss(batch: int) -> Tensor:
        return nn.functional.cross_entropy(net(inputs[batch]), targets[batch])

    total = 2 * variant.pair
    phase = AlterSGD(0, 1.0, 1.0, batch=variant.batch)
    optimizer = torch.optim.SGD(parameters, lr=eta, momentum=variant.momentum)
    for iteration in range(1, total + 1):
        if iteration == total - 1:
            start = flatness.flatten(parameters)
            (gradient,) = flatness.gradients(loss, [0], parameters)
            predicted = -(eta**2) * flatness.hessian_product(loss, [0], parameters, gradient)
        batch = (phase.batch_of(iteration, total) - 1) % 2
        optimizer.zero_grad()
        (phase(iteration, total).learn * loss(batch)).backward()
        optimizer.step()
    return flatness.flatten(parameters) - start, predicted


def pair_errors(variant: Variant) -> list[float]:
    """|| displacement - prediction || at each of ETAS."""
    pairs = (pair_of_steps(eta, variant) for eta in ETAS)
    return [(moved - predicted).norm().item() for moved, predicted in pairs]


def slope(errors: Sequence[float]) -> float:
    """Of the straight line through the errors in log-log."""
    return log_slope(ETAS, errors)


def theorem(path: Path) -> str:
    """Measure and draw the errors of all variants; returns them as a table."""
    errors = {name: pair_errors(variant) for name, variant in VARIANTS.items()}
    predicted = [pair_of_steps(eta, Variant())[1].norm().item() for eta in ETAS]
    draw(path, errors, predicted)
    header = ["a descent and an ascent", "slope of the error"]
    header += [f"error / predicted move at eta {ETAS[i]:.1g}" for i in (0, -1)]
    rows = [
        [name, f"{slope(values):.2f}", *(f"{values[i] / predicted[i]:.2g}" for i in (0, -1))]
        for name, values in errors.items()
    ]
    return format_table(header, rows)


def draw(path: Path, errors: dict[str, list[float]], predicted: list[float]) -> None:
    """Each curve carries its name and slope at its right end."""
    from tracking.plotting import STYLE, pyplot, save

    with pyplot.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
        curves = {**errors, "the predicted move itself": predicted}
        looks = (*LOOKS, ("", "black", ":", 0))
        for (name, values), (marker, colour, line, up) in zip(curves.items(), looks, strict=True):
            axis.loglog(ETAS, values, marker=marker, color=colour, linestyle=line, markersize=5)
            place = {"xy": (ETAS[0], values[0]), "xytext": (8, up), "textcoords": "offset points"}
            axis.annotate(f"{name}: {slope(values):.2f}", **place, color=colour, va="center")
        axis.set(xlabel="learning rate eta", ylabel="|| move - prediction ||")
        axis.set_title("Theorem 1: the error of a descent and an ascent, and its slope", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        save(figure, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
