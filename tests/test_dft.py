"""DFT*: everything learned is frozen, the future is known."""

from itertools import pairwise

import torch
from conftest import TINY_NETWORK

import train
from data.protocols import steps_from_lists
from engine import checkpoint
from methods import METHODS, make_method
from models.segmenter import build_segmenter

STEPS = steps_from_lists([[1, 2], [3], [4, 5]])


def test_classifiers_of_all_steps_exist_from_step_0_on_and_learn_as_negatives():
    model, method = build_segmenter(**TINY_NETWORK), make_method("dft")
    method.protocol = STEPS
    method.add_classifier(model, STEPS[0])
    assert [c.out_channels for c in model.classifiers] == [3, 1, 2]
    method.begin_step(model, STEPS[0])
    logits = model(torch.randn(2, 3, 32, 32)).logits
    labels = torch.randint(3, (2, 32, 32))
    loss = method.segmentation_loss(logits, labels)
    slow = -logits.log_softmax(dim=1).gather(1, labels[:, None]).mean()
    assert torch.allclose(loss, slow)
    loss.backward()
    assert all(c.bias.grad.abs().min() > 0 for c in model.classifiers)  # of future classes too


def test_later_steps_move_the_new_classifier_and_those_to_come_alone(toy_arguments, tmp_path):
    steps = ("data.steps=[[1], [2], [3]]", "data.mode=overlapped", "train.batch_size=2")
    quick = ("train.epochs=1", "train.epochs_later=2", "run.pictures=0", "run.tracker=none")
    assert train.main(toy_arguments("method.name=dft", *steps, *quick)) == 0
    states = [checkpoint.load(tmp_path / "runs" / "run" / f"step_{i}.pt")["model"] for i in range(3)]
    for step, (before, after) in enumerate(pairwise(states), start=1):
        moved = {name.rpartition(".")[0] for name in after if not torch.equal(before[name], after[name])}
        assert moved == {f"classifiers.{i}" for i in range(step, 3)}


def test_only_seen_classes_are_predicted():
    scores = METHODS["dft"].rule(2)(torch.tensor([[[[1.0]], [[2.0]], [[9.0]]]]))
    assert scores.shape[1] == 2 and torch.allclose(scores.sum(), torch.tensor(1.0))


def test_what_is_frozen_is_nothing_to_fuse(toy_arguments, capsys):
    assert train.main(toy_arguments("method.name=dft", "average.name=ewf")) == 2
    assert "has nothing to fuse" in capsys.readouterr().err
