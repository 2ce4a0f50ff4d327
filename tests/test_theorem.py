"""scripts.theorem: the order in eta that is left of a pair's move, with and without what training adds."""

import re

import pytest
import torch

from scripts import theorem


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
