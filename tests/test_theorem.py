"""scripts.theorem: the order in eta that is left of a pair's move, with and without what training adds;
and of a pair of epochs.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metrics import flatness
from scripts.dev import theorem, theorem_epoch
from scripts.dev.theorem_epoch import NUM_BATCHES, Problem, Variant, along, error, pair_of_epochs

SMALL = 0.01  # of n eta, where lambda_max is 0.7: what is left of the next order is a percent or less
DOCUMENT = Path(__file__).parent.parent / "docs" / "flatness.md"


@pytest.mark.slow
def test_the_slopes_of_theorem_1(tmp_path, capsys):
    assert theorem.main([str(tmp_path / "new" / "theorem.png")]) == 0
    assert (tmp_path / "new" / "theorem.png").stat().st_size > 1000
    shown = capsys.readouterr().out.splitlines()[2:]
    plain, other_batch, first, settled = (float(re.search(r"  (\d\.\d\d)  ", line)[1]) for line in shown)
    assert plain == pytest.approx(3, abs=0.1)
    assert other_batch == pytest.approx(1, abs=0.1)
    assert first == pytest.approx(1, abs=0.1)
    assert settled == pytest.approx(2, abs=0.1)


def test_settled_momentum_lengthens_the_move_of_theorem_1():
    """By 1 / (1 - momentum^2): the buffer alternates between g / (1 + momentum) and its negative."""
    variant = theorem.Variant(momentum=0.9, pair=theorem.SETTLED + 1)
    moved, predicted = theorem.pair_of_steps(1e-3, variant)
    assert torch.allclose(moved, predicted / (1 - 0.9**2), rtol=0, atol=0.05 * moved.norm().item())


# ---- an epoch each way -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


def mini_batches(problem: Problem) -> list[torch.Tensor]:
    return problem.epochs(Variant("batch"), 1, seed=0)[0]


def test_an_epoch_of_full_gradients_moves_like_n_pairs_and_not_like_one_with_n_eta(problem):
    moves = pair_of_epochs(problem, SMALL, Variant())
    expected = -NUM_BATCHES * (SMALL / NUM_BATCHES) ** 2 * hessian_gradient(problem)
    assert error(moves, expected) < 0.02
    assert along(moves, moves.theorem) == pytest.approx(1 / NUM_BATCHES, rel=0.02)
    assert along(moves, moves.pairs) == pytest.approx(1, rel=0.02)


def hessian_gradient(problem: Problem) -> torch.Tensor:
    """H g of the whole loss, from autograd alone."""
    gradient = torch.autograd.grad(problem.loss(problem.all), problem.parameters, create_graph=True)
    half_square = sum((part**2).sum() for part in gradient) / 2
    return flatness.flatten(torch.autograd.grad(half_square, problem.parameters))


def test_one_pair_with_n_eta_moves_like_the_theorem_with_n_eta(problem):
    moves = pair_of_epochs(problem, SMALL, Variant(steps=1))
    assert error(moves, -(SMALL**2) * hessian_gradient(problem)) < 0.02


def test_mini_batches_in_the_same_order_add_commutators(problem):
    batches, parameters = mini_batches(problem), problem.parameters
    gradients = list(flatness.gradients(problem.loss, batches, parameters))

    def product(i: int, j: int) -> torch.Tensor:
        return flatness.hessian_product(problem.loss, [batches[i]], parameters, gradients[j])

    pairs = sum(product(i, i) for i in range(NUM_BATCHES))
    commutators = sum(product(i, j) - product(j, i) for j in range(NUM_BATCHES) for i in range(j))
    moves = pair_of_epochs(problem, SMALL, Variant("batch"))
    assert error(moves, -((SMALL / NUM_BATCHES) ** 2) * (pairs + commutators)) < 0.02
    assert (
        error(moves, -((SMALL / NUM_BATCHES) ** 2) * pairs) > 1
    )  # they outweigh what the order does not change
    assert torch.allclose(moves.pairs, -((SMALL / NUM_BATCHES) ** 2) * pairs)


def test_an_ascent_in_the_reverse_order_leaves_the_sum_over_mini_batches(problem):
    batches = mini_batches(problem)
    at = theorem_epoch.terms(problem, batches, batches[::-1])
    assert torch.allclose(at.ordered, at.pairs)


def test_shuffled_epochs_move_by_the_sum_over_mini_batches_on_average(problem):
    one = pair_of_epochs(problem, SMALL, Variant("shuffled"))
    assert error(one, one.own) < 0.02 and error(one, one.pairs) > 0.5
    mean = theorem_epoch.mean_moves(problem, SMALL, Variant("shuffled", orders=4))
    assert error(mean, mean.pairs) < 0.02


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_first_pair_after_descents_goes_on_descending(nesterov, problem):
    """By 2 mu (1 - mu^n) / (1 - mu)^2 eta g, with Nesterov mu times that;
    also if the descents move the weights.
    """
    factor = 2 * 0.9 * (1 - 0.9**NUM_BATCHES) / 0.1**2 * (0.9 if nesterov else 1)
    variant = Variant(momentum=0.9, nesterov=nesterov, descents=theorem_epoch.SETTLED)
    (gradient,) = flatness.gradients(problem.loss, [problem.all], problem.parameters)
    moves = pair_of_epochs(problem, SMALL / 10, variant)
    assert error(moves, -SMALL / 10 / NUM_BATCHES * factor * gradient) < 0.02
    moves = pair_of_epochs(problem, SMALL / 10, replace(variant, moving=True))
    assert error(moves, moves.own) < 0.02


@pytest.mark.parametrize("nesterov", [False, True])
def test_settled_momentum_moves_along_the_theorem_again(nesterov, problem):
    variant = Variant(momentum=0.9, nesterov=nesterov, pair=theorem_epoch.SETTLED + 1)
    moves = pair_of_epochs(problem, SMALL / 10, variant)
    assert error(moves, moves.own) < 0.02
    assert error(moves, moves.pairs) > 10


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 9, 40])
def test_the_factors_of_momentum_on_a_parabola(steps, nesterov, momentum):
    """Against torch's SGD on x + x^2 / 2 from x = 0, with so small a learning
    rate that nothing else is left.
    """
    variant = Variant(steps=steps, momentum=momentum, nesterov=nesterov)
    eta = 1e-6
    first = parabola(eta, [1] * 300 + [1] * steps + [-1] * steps, variant)
    assert first == pytest.approx(-eta * theorem_epoch.first_order(variant), rel=0.01)
    pairs = 1 + 300 // steps
    settled = parabola(eta, ([1] * steps + [-1] * steps) * pairs, variant)
    assert settled == pytest.approx(-(eta**2) * theorem_epoch.settled(variant), rel=0.01)


def parabola(eta: float, signs: list[int], variant: Variant) -> float:
    """How far the last pair of epochs moves."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], eta, momentum=variant.momentum, nesterov=variant.nesterov)
    for i, sign in enumerate(signs):
        if i == len(signs) - 2 * variant.steps:
            start = x.item()
        x.grad = (sign * (1 + x)).detach()
        optimizer.step()
    return x.item() - start


def test_settled_at_one_step_each_way_is_the_pair_of_theorem_1():
    assert theorem_epoch.settled(Variant(steps=1, momentum=0.9)) == pytest.approx(1 / (1 - 0.9**2))


def test_without_momentum_the_factors_are_those_of_plain_steps():
    assert theorem_epoch.first_order(Variant()) == 0
    assert theorem_epoch.settled(Variant()) == NUM_BATCHES


def test_where_a_prediction_stops_holding():
    sizes = theorem_epoch.SIZES
    assert theorem_epoch.stops_holding([size / 3 for size in sizes]) == pytest.approx(0.3)
    assert theorem_epoch.stops_holding([size**2 for size in sizes]) == pytest.approx(0.1**0.5)
    assert theorem_epoch.stops_holding([0.0001] * len(sizes)) == float("inf")
    assert theorem_epoch.stops_holding([1.0] * len(sizes)) == sizes[0]
    broken = [0.01] * (len(sizes) - 1) + [float("nan")]
    assert sizes[-2] <= theorem_epoch.stops_holding(broken) <= sizes[-1]


@pytest.mark.slow
def test_the_tables_of_the_epoch_are_those_of_the_document(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(theorem, "theorem", lambda image: "")
    assert theorem.main([str(tmp_path / "theorem.png"), "--epoch", str(tmp_path / "new" / "epoch.png")]) == 0
    assert (tmp_path / "new" / "epoch.png").stat().st_size > 1000
    lines = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if re.fullmatch(r"[-+\d.e]*\d", cells[-1])}
    moves = {name: list(map(float, rows[name])) for name in theorem_epoch.VARIANTS}
    for name, (slope, *_, own_slope, end, _) in moves.items():
        order = 1 if name == "momentum 0.9, first pair" else 2
        assert slope == pytest.approx(order, abs=0.05)
        assert own_slope == pytest.approx(order + 1, abs=0.05)
        assert 0.1 < end < 1.0  # no expansion outlives n eta lambda_max = 1
    assert len(rows) == len(moves) + 2 + 5
    document = DOCUMENT.read_text(encoding="utf-8")
    for name, cells in rows.items():
        assert f"| {' | '.join([name, *cells])} |" in document
