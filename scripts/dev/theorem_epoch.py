"""Theorem 1 at the scale of an epoch, for `python -m scripts.dev.theorem`: n mini-batches down,
then n mini-batches up.

The mini-batches have losses L_i, with gradients g_i and Hessians H_i at the start; eta_eff = n eta. Plain SGD
moves by

    -eta^2 [ sum_i H_i g_i + what depends on the order ] + O(eta^3)

To it two predictions are compared:

    the theorem with eta_eff   -(eta_eff^2 / 2) grad ||g||^2         = -n^2 eta^2 H g
    n pairs of the theorem     -(eta^2 / 2) sum_i grad ||g_i||^2     = -eta^2 sum_i H_i g_i

What depends on the order has mean zero over orders, and vanishes if every step takes the full gradient: -n
eta^2 H g remains, n times less than the theorem with eta_eff. Small steps down and up retrace the gradient
flow, which can be reversed; only the error of each single step is left. docs/flatness.md explains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from methods.phases.altersgd import AlterSGD
from metrics import flatness
from tracking.tables import format_table

NUM_BATCHES, BATCH_SIZE = 8, 8
SIZES = [0.01 * 2**k for k in range(-5, 10)]  # of n eta lambda_max, from tiny to beyond 1
ASYMPTOTIC = 6  # slopes are those of the smallest sizes; the largest of these is where ratios are reported
TOLERANCE = 0.1  # a prediction holds as long as its relative error is below
SETTLED = 12  # epochs, or pairs of epochs, after which 0.9^iterations no longer shows


@dataclass(frozen=True)
class Variant:
    """How the pair of epochs whose displacement is measured is made."""

    images: str = "all"  # of a step: all | batch: a mini-batch, in the same order each way | shuffled: anew
    steps: int = NUM_BATCHES  # each way
    momentum: float = 0.0
    nesterov: bool = False
    descents: int = 0  # epochs of descent before the first pair, which fill the buffer
    moving: bool = False  # whether these descents move the weights too, as in training
    pair: int = 1  # which pair of epochs
    orders: int = 1  # the mean over so many; every second is the one before it backwards


TRAINED = Variant(momentum=0.9, nesterov=True)
VARIANTS = {
    "one pair with the learning rate n eta": Variant(steps=1),
    "full gradient in each step": Variant(),
    "mini-batches, the same order each way": Variant("batch"),
    "mini-batches, shuffled anew": Variant("shuffled"),
    "mini-batches, mean over 8 orders": Variant("shuffled", orders=8),
    "momentum 0.9, first pair": replace(TRAINED, descents=SETTLED),
    f"momentum 0.9, after {SETTLED} pairs": replace(TRAINED, pair=SETTLED + 1),
}
# Marker, colour (distinct to the colour-blind), line, and how far up the name stands: some of the curves
# almost meet.
LOOKS = (
    ("o", "black", "-", 5),
    ("s", "#D55E00", "-", -4),
    ("^", "#009E73", "-", -2),
    ("v", "#0072B2", "-", 0),
    ("D", "#606060", "--", 1),
    ("P", "#CC79A7", "-", 0),
    ("X", "#8C6D00", "-", 0),
)


class Problem:
    """A loss of a small tanh network in double precision, over images of which each mini-batch holds some."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = small_network()
        self.all = torch.arange(NUM_BATCHES * BATCH_SIZE)
        self.inputs = torch.randn(len(self.all), 3, dtype=torch.float64)
        self.targets = torch.randint(3, (len(self.all),))
        self.parameters = list(self.net.parameters())

    def loss(self, images: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.inputs[images]), self.targets[images])

    def epochs(self, variant: Variant, number: int, seed: int) -> list[list[Tensor]]:
        """Returns the images of each step of so many epochs, as `variant` has it."""
        generator = torch.Generator().manual_seed(seed)
        epochs = []
        for _ in range(number):
            images = self.all
            if variant.images == "shuffled":
                images = images[torch.randperm(len(images), generator=generator)]
            epoch = list(images.split(BATCH_SIZE))
            epochs.append([self.all] * variant.steps if variant.images == "all" else epoch)
        return epochs


def small_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


# ---- what is predicted -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """Derivatives at the start of a pair of epochs, of which every prediction is made."""

    gradient: Tensor  # g
    curved: Tensor  # H g
    pairs: Tensor  # sum_i H_i g_i, the mean over both epochs
    ordered: Tensor  # `pairs` and what depends on the order


def terms(problem: Problem, descent: Sequence[Tensor], ascent: Sequence[Tensor]) -> Terms:
    """Returns the derivatives for a descent over these mini-batches and an ascent over those."""
    loss, parameters = problem.loss, problem.parameters
    (gradient,) = flatness.gradients(loss, [problem.all], parameters)
    pairs, ordered = torch.zeros_like(gradient), torch.zeros_like(gradient)
    # A step whose weights differ from the start by -eta v adds -eta^2 H_i v if it ascends, and the opposite
    # if it descends.
    for epoch, offset in ((descent, torch.zeros_like(gradient)), (ascent, len(ascent) * gradient)):
        for images, step in zip(epoch, flatness.gradients(loss, epoch, parameters), strict=True):
            curve = flatness.curvature(loss, images, parameters)
            pairs += curve(step) / 2
            ordered += curve(offset)
            offset = offset - step
    return Terms(
        gradient, flatness.hessian_product(loss, [problem.all], parameters, gradient), pairs, ordered
    )


def first_order(variant: Variant) -> float:
    """Returns how many eta g the pair after a long descent still descends: the buffer of g / (1 - mu)
    persists.

    In the ascent's k-th step the buffer is (2 mu^k - 1) g / (1 - mu). Nesterov looks one step ahead: mu^(k +
    1).
    """
    mu = variant.momentum
    coefficient = 2 * mu * (1 - mu**variant.steps) / (1 - mu) ** 2
    return mu * coefficient if variant.nesterov else coefficient


def settled(variant: Variant) -> float:
    """Returns how many eta^2 H g a pair moves after many pairs,
    when the buffer goes to and fro and the first order cancels.

    The k-th step of an epoch is then (1 - 2 mu^k / (1 + mu^n)) eta g / (1 - mu) long, with Nesterov mu^(k +
    1). That of the descent shifts n ascents against n - k descents, that of the ascent takes n - k ascents
    back: 2 k - n remain. Each gradient counts 1 / (1 - mu) times.
    """
    mu, steps = variant.momentum, variant.steps
    lag = 2 / (1 + mu**steps) * sum((2 * k - steps) * mu**k for k in range(1, steps + 1))
    return (steps - (mu * lag if variant.nesterov else lag)) / (1 - mu) ** 2


# ---- what is measured --------------------------------------------------------------------------------------


class Moves(NamedTuple):
    """The displacement of a pair of epochs, measured and predicted."""

    measured: Tensor
    theorem: Tensor  # with eta_eff
    pairs: Tensor  # of n pairs, one for each mini-batch
    own: Tensor  # with the order, or with momentum


def pair_of_epochs(problem: Problem, eta_eff: float, variant: Variant, seed: int = 0) -> Moves:
    """Returns how far an epoch of descent and one of ascent move the weights,
    with the learning rate eta_eff / n.
    """
    eta, steps = eta_eff / variant.steps, variant.steps
    before = variant.descents * steps
    total = before + 2 * steps * variant.pair
    epochs = problem.epochs(variant, total // steps, seed // 2)
    if seed % 2:  # each order and its reverse: what depends on the order cancels
        epochs = [epoch[::-1] for epoch in epochs]
    repeats = "next" if variant.images == "shuffled" else "same"
    phase = AlterSGD(before / total, 1.0, 1.0, batch=repeats, every=steps)
    with flatness.restored(problem.parameters):
        optimizer = torch.optim.SGD(
            problem.parameters, eta, momentum=variant.momentum, nesterov=variant.nesterov
        )
        for iteration in range(1, total + 1):
            if iteration == total - 2 * steps + 1:
                start = flatness.flatten(problem.parameters)
                at = terms(problem, epochs[-2], epochs[-1 if repeats == "next" else -2])
            epoch, step = divmod(phase.batch_of(iteration, total) - 1, steps)
            optimizer.param_groups[0]["lr"] = eta if variant.moving or iteration > before else 0.0
            optimizer.zero_grad()
            (phase(iteration, total).learn * problem.loss(epochs[epoch][step])).backward()
            optimizer.step()
        measured = flatness.flatten(problem.parameters) - start
    if not variant.momentum:
        own = -(eta**2) * at.ordered
    elif variant.pair == 1:
        own = -eta * first_order(variant) * at.gradient
    else:
        own = -(eta**2) * settled(variant) * at.curved
    return Moves(measured, -(eta_eff**2) * at.curved, -(eta**2) * at.pairs, own)


def mean_moves(problem: Problem, eta_eff: float, variant: Variant) -> Moves:
    """Returns the mean displacement over the orders of `variant`."""
    moves = [pair_of_epochs(problem, eta_eff, variant, seed) for seed in range(variant.orders)]
    return Moves(*(torch.stack(vectors).mean(0) for vectors in zip(*moves, strict=True)))


def error(moves: Moves, predicted: Tensor) -> float:
    """Returns || measured - predicted || / || predicted ||."""
    return ((moves.measured - predicted).norm() / predicted.norm()).item()


def along(moves: Moves, predicted: Tensor) -> float:
    """Returns how far the measured displacement goes along the predicted one,
    whose own length counts as 1.
    """
    return (torch.dot(moves.measured, predicted) / predicted.norm() ** 2).item()


def log_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of the straight line through the values in log-log."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def small_slope(lengths: Sequence[float]) -> float:
    """Returns the slope over the smallest of SIZES."""
    return log_slope(SIZES[:ASYMPTOTIC], lengths[:ASYMPTOTIC])


def stops_holding(errors: Sequence[float]) -> float:
    """Returns the first of SIZES, interpolated in log-log, where the relative error passes TOLERANCE;
    inf if none does.
    """
    late = next((i for i, value in enumerate(errors) if not value <= TOLERANCE), None)  # nan is late too
    if not late:
        return SIZES[0] if late == 0 else float("inf")
    heights = np.nan_to_num(np.log(errors[late - 1 : late + 1]), nan=np.inf, posinf=1e3)
    return float(np.exp(np.interp(np.log(TOLERANCE), heights, np.log(SIZES[late - 1 : late + 1]))))


# ---- what is shown -----------------------------------------------------------------------------------------


def theorem_epoch(path: Path) -> str:
    """Measures and draws all variants, and returns what was found as three tables."""
    problem = Problem()
    first = derivatives(problem)
    etas = [size / first["lambda_max"] for size in SIZES]
    moves = {name: [mean_moves(problem, eta, variant) for eta in etas] for name, variant in VARIANTS.items()}
    draw(path, moves)
    descend(problem)
    tables = [table_of_moves(moves), table_of_derivatives(first, derivatives(problem)), table_of_momentum()]
    return "\n\n".join(tables)


def table_of_moves(moves: dict[str, list[Moves]]) -> str:
    """Returns a line for each variant: slopes, ratios at n eta lambda_max = 0.01,
    where its own prediction stops holding.
    """
    header = [f"an epoch each way, n = {NUM_BATCHES}", "slope"]
    for prediction in ("theorem", "n pairs", "own"):
        header += [f"move / {prediction}", "error slope"]
    header += ["10 % off at n eta lambda_max", "eta lambda_max"]
    rows = []
    for name, values in moves.items():
        cells = [f"{small_slope([each.measured.norm().item() for each in values]):.2f}"]
        for prediction in ("theorem", "pairs", "own"):
            predicted = [getattr(each, prediction) for each in values]
            errors = [(each.measured - p).norm().item() for each, p in zip(values, predicted, strict=True)]
            ratio = along(values[ASYMPTOTIC - 1], predicted[ASYMPTOTIC - 1])
            cells += [f"{ratio:.3g}", f"{small_slope(errors):.2f}"]
        end = stops_holding([error(each, each.own) for each in values])
        rows.append([name, *cells, f"{end:.2g}", f"{end / VARIANTS[name].steps:.2g}"])
    return format_table(header, rows)


def descend(problem: Problem, iterations: int = 200, eta: float = 0.1) -> None:
    """Trains with the full gradient, to where it is small and those of the mini-batches are not."""
    optimizer = torch.optim.SGD(problem.parameters, eta)
    for _ in range(iterations):
        optimizer.zero_grad()
        problem.loss(problem.all).backward()
        optimizer.step()


def derivatives(problem: Problem) -> dict[str, float]:
    """Returns the sizes of what the second order is made of, at the present weights,
    for the same order each way.
    """
    (epoch,) = problem.epochs(Variant("batch"), 1, seed=0)
    at = terms(problem, epoch, epoch)
    whole, single = flatness.gradient_norms(problem.loss, epoch, problem.parameters)
    (top,) = flatness.top_eigenvalues(problem.loss, [problem.all], problem.parameters, 1)
    return {
        "lambda_max": top,
        "||g||^2": whole,
        "mean ||g_i||^2": single,
        "n^2 ||H g||": NUM_BATCHES**2 * at.curved.norm().item(),
        "n ||H g||": NUM_BATCHES * at.curved.norm().item(),
        "||sum H_i g_i||": at.pairs.norm().item(),
        "of the order": (at.ordered - at.pairs).norm().item(),
    }


def table_of_derivatives(first: dict[str, float], trained: dict[str, float]) -> str:
    rows = {"initial weights": first, "after 200 descents": trained}
    cells = [[name, *(f"{value:.2g}" for value in values.values())] for name, values in rows.items()]
    return format_table(["weights", *first], cells)


def table_of_momentum() -> str:
    """Returns the two epochs of the first pair apart, in eta g, and a pair after many, over n plain pairs."""
    header = ["n, with momentum 0.9", "the descent", "the ascent", "first pair", "settled pair / n pairs"]
    rows = []
    for steps in (1, 8, 16, 64, 256):
        variant = replace(TRAINED, steps=steps)
        down, both = -steps / (1 - variant.momentum), -first_order(variant)
        cells = [f"{value:+.1f}" for value in (down, both - down, both)]
        rows.append([str(steps), *cells, f"{settled(variant) / steps:.3g}"])
    return format_table(header, rows)


def draw(path: Path, moves: dict[str, list[Moves]]) -> None:
    """Draws, left, how long each move is, and right, how wrong its own prediction
    is and where it is 10 % wrong.
    """
    from tracking.plotting import STYLE, pyplot, save

    small = sum(size < 1 for size in SIZES)
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.6, 4.4), layout="constrained")
        ends = {}
        for (name, values), (marker, colour, line, up) in zip(moves.items(), LOOKS, strict=True):
            look = {"marker": marker, "color": colour, "linestyle": line, "markersize": 4.5}
            lengths = [each.measured.norm().item() for each in values]
            theorem = [each.theorem.norm().item() for each in values]
            ratios = [length / predicted for length, predicted in zip(lengths, theorem, strict=True)][:small]
            left.loglog(SIZES[:small], ratios, **look)
            place = {"xy": (SIZES[small - 1], ratios[-1]), "xytext": (8, up), "textcoords": "offset points"}
            left.annotate(f"{name}: {small_slope(lengths):.2f}", **place, color=colour, va="center")
            errors = [error(each, each.own) for each in values]
            right.loglog(SIZES, errors, **look)
            ends[name] = stops_holding(errors), colour
        for rank, (name, (end, colour)) in enumerate(sorted(ends.items(), key=lambda item: item[1])):
            place = {"xy": (1, 0.95 - 0.07 * rank), "xycoords": "axes fraction", "xytext": (8, 0)}
            right.annotate(f"{end:.2f}  {name}", **place, textcoords="offset points", color=colour)
        right.axhline(TOLERANCE, color="black", linestyle=":")
        left.set(ylabel="|| move || / || the theorem's move ||", xlim=(2e-3, 0.8), ylim=(0.1, 3e3))
        left.set_title("An epoch each way against the theorem with n eta, and the slope in eta", loc="left")
        right.set(ylabel="|| move - prediction || / || prediction ||", xlim=(4e-3, 6), ylim=(1e-3, 3))
        right.set_title("The error of each one's own prediction, and where it passes 10 %", loc="left")
        for axis in (left, right):
            axis.set_xlabel("n eta lambda_max")
            axis.spines[["top", "right"]].set_visible(False)
        save(figure, path)
