import pytest

from data.protocols import Step
from metrics.hiou import harmonic_mean

STEPS = (Step(0, (), (1, 2)), Step(1, (1, 2), (3,)))


@pytest.mark.parametrize(("old", "new"), [(0.1, 0.1), (0.1, 0.9), (0.5, 0.25), (1.0, 1.0)])
def test_it_is_the_formula_without_background(old, new):
    now = {0: 0.99, 1: old - 0.05, 2: old + 0.05, 3: new}
    assert harmonic_mean([{}, now], STEPS) == pytest.approx(1 / ((1 / old + 1 / new) / 2))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({0: 0.9, 1: 0.5, 2: 0.5}, None),  # step 0
        ({0: 0.9, 1: 0.5, 2: 0.5, 3: None}, None),  # no test image shows the new class
        ({0: 0.9, 1: None, 2: None, 3: 0.5}, None),
        ({0: 0.9, 1: 0.0, 2: 0.0, 3: 0.5}, 0.0),
        ({0: 0.9, 1: 0.5, 2: 0.5, 3: 0.0}, 0.0),
        ({0: 0.9, 1: 0.0, 2: 0.0, 3: 0.0}, 0.0),
    ],
)
def test_what_is_unknown_stays_so_and_nothing_is_nothing(now, expected):
    assert harmonic_mean([{}, now], STEPS) == expected
