"""All that a config can combine: every method x every phase x every update rule, with a memory and without,
trains, or is refused with the keys that do not go together.

Nothing is sampled. Step 0 is made once for a method, of random weights, and handed on through the checkpoint
of the shipped functions; step 1 begins from it as in a run and is trained by the shipped loop, for a descent
and an ascent inside the phase. Whole runs from data to scores are in test_train.py, test_memory.py and
test_averages.py.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import mostly_slow

from configs import ConfigError
from engine.arguments import read_config
from engine.step import begin_step
from methods import METHODS, PHASES, UPDATES
from scripts.benchmarks.training import QUICK, STEPS, Trainee, begin_last_step, make_run

TINY = (*QUICK, "data.crop=32", "model.output_stride=8", "model.dilations=[1, 2, 3]", "optim.lr_later=0.001")
MEMORIES = (0, 4)
STAND_STILL = ("pause", "stop")


def refusal(method: str, memory: int) -> list[str]:
    """Return the keys that a message must name; none if the two go together. Nothing else is refused."""
    needs = {"mib_augm"}
    unused, absent = memory and METHODS[method].memory is None, not memory and method in needs
    return ["method.name", "method.memory", method] if unused or absent else []


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory) -> Callable[[str, tuple[str, ...]], Path]:
    """The checkpoint of step 0 by method, as they come to be needed."""
    made: dict[str, Path] = {}

    def of(method: str, overrides: tuple[str, ...]) -> Path:
        if method not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(method)
            begin_last_step(make_run(folder, STEPS, *overrides))
            made[method] = folder
        return made[method]

    return of


@pytest.mark.parametrize("method", mostly_slow(sorted(METHODS), fast=["mib", "ssul"]))
@pytest.mark.parametrize("memory", MEMORIES)
def test_every_phase_and_rule_trains_every_method_or_is_refused(method, memory, first_steps):
    refused = refusal(method, memory)
    for phase, update in product(PHASES, UPDATES):
        names = f"method.name={method}", f"phase.name={phase}", f"update.name={update}"
        overrides = (*names, f"method.memory={memory}", *TINY)
        if refused:
            with pytest.raises(ConfigError) as error:
                read_config(list(overrides))
            assert all(word in str(error.value) for word in refused), names
        else:
            trains(method, phase, overrides, first_steps(method, overrides))


def trains(method: str, phase: str, overrides: tuple[str, ...], folder: Path) -> None:
    torch.manual_seed(0)
    run = make_run(folder, STEPS, *overrides)
    trainee = Trainee(run, *begin_step(run, run.steps[-1]))
    before = [p.detach().clone() for p in trainee.model.parameters()]
    for _ in range(2):  # inside a phase: a descent and an ascent
        trainee.iterate()
    trainee.guard.check()
    assert all(p.isfinite().all() for p in trainee.model.parameters()), overrides
    still = all(torch.equal(p, b) for p, b in zip(trainee.model.parameters(), before, strict=True))
    assert still == (phase in STAND_STILL), overrides
    trainee.method.end_step(trainee.model)
    for statistic in trainee.method.state_dict().values():
        for tensor in statistic.values() if isinstance(statistic, dict) else [statistic]:
            assert torch.as_tensor(tensor).isfinite().all(), overrides
