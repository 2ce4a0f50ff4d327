"""fp16 with a gradient scaler, rehearsed on a CPU: real half precision,
and an update that the scaler skips.
"""

import copy
import math

import pytest
import torch
from conftest import walk_until
from torch import Tensor

import train
from engine import checkpoint, step
from engine.ranks import StoppedBySignal

FIRST_SCALE = 2.0**16


class OverflowsAtFirst(torch.amp.GradScaler):
    """The loss overflows as long as the scale is the first one:
    what a resumed run meets depends on what it saved.
    """

    def scale(self, outputs: Tensor) -> Tensor:
        return super().scale(outputs) * (math.inf if self.get_scale() == FIRST_SCALE else 1.0)


@pytest.fixture
def updates(monkeypatch):
    """What each update of a run finds and leaves, with the scale before and after."""
    seen = []
    apply_update = step.apply_update

    def state(model, optimizer, method):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return copy.deepcopy((parameters, optimizer.state_dict()["state"], method.state_dict()))

    def observed(model, optimizer, scaler, method, *others):
        before, scale = state(model, optimizer, method), scaler.get_scale()
        terms = apply_update(model, optimizer, scaler, method, *others)
        seen.append((before, state(model, optimizer, method), scale, scaler.get_scale()))
        return terms

    monkeypatch.setattr(torch.amp, "GradScaler", OverflowsAtFirst)
    monkeypatch.setattr(step, "apply_update", observed)
    return seen


def same(one, other) -> bool:
    """Without a momentum is as good as with one of None."""
    if isinstance(one, dict):
        keys = {key for side in (one, other) for key in side if side[key] not in (None, {})}
        return all(same(one.get(key), other.get(key)) for key in keys)
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


@pytest.mark.parametrize("method", ["mib", "ewc", "pi"])
def test_a_skipped_update_changes_nothing_but_the_scale(method, toy_arguments, updates):
    assert train.main(toy_arguments("train.amp=fp16", f"method.name={method}", "train.last_step=0")) == 0
    (*skipped, scale, halved), *others = updates
    assert (scale, halved) == (FIRST_SCALE, FIRST_SCALE / 2)
    assert all(same(before, after) for before, after in zip(*skipped, strict=True))
    assert others
    for before, after, *scales in others:
        assert scales == [halved, halved] and not same(before[0], after[0])
        assert all(p.isfinite().all() for p in after[0].values())


def test_a_run_stopped_after_a_skipped_update_ends_with_the_same_bits(toy_arguments, tmp_path, updates):
    options = ("train.amp=fp16", "method.name=pi", "train.last_step=0")
    assert train.main(toy_arguments(*options, name="whole")) == 0
    with pytest.raises(StoppedBySignal):
        walk_until(toy_arguments(*options, name="parts"), 1)
    done = len(updates)
    assert train.main(toy_arguments(*options, name="parts")) == 0
    resumed = updates[done]
    assert resumed[2] == FIRST_SCALE / 2  # the halved scale was saved: no second overflow
    one, other = (checkpoint.load(tmp_path / f"runs/{name}/step_0.pt") for name in ("whole", "parts"))
    assert same(one["model"], other["model"]) and same(one["methods"], other["methods"])
