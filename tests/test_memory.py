"""The memory of old images: who is in it, and that nothing but the seed and the steps decides."""

import random

import pytest
import torch

from data.dataset import DataError
from data.loaders import train_loader
from data.memory import Kept, choose_memory
from data.protocols import steps_from_lists

STEPS = steps_from_lists([[1, 2, 3], [4], [5], [6]])
RNG = random.Random(0)
CLASSES = [frozenset({RNG.randint(1, 6), RNG.randint(1, 6)} | {0}) for _ in range(300)]
IMAGES = [
    [i for i, classes in enumerate(CLASSES) if classes & set(step.new) and classes <= set(step.seen)]
    for step in STEPS
]


def memory(step: int, size: int = 12, seed: int = 1) -> list[Kept]:
    return choose_memory(CLASSES, IMAGES, STEPS, STEPS[step], size, seed)


def labelled(kept: Kept) -> frozenset[int]:
    return CLASSES[kept.position] & set(STEPS[kept.step].new)


def test_step_0_remembers_nothing():
    assert memory(0) == []


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_old_class_has_its_share(step):
    chosen = memory(step)
    assert len(chosen) == len({kept.position for kept in chosen}) == 12
    shown = {c: sum(c in labelled(kept) for kept in chosen) for c in STEPS[step].old}
    assert min(shown.values()) >= 12 // len(shown)


def test_an_image_has_the_labels_of_the_step_that_saw_it():
    assert all(kept.position in IMAGES[kept.step] and labelled(kept) for kept in memory(3))


@pytest.mark.parametrize("step", [2, 3])
def test_what_was_given_up_does_not_come_back(step):
    before = set(memory(step - 1))
    assert {kept for kept in memory(step) if kept.step < step - 1} <= before


def test_a_memory_larger_than_the_past_is_the_past():
    assert {kept.position for kept in memory(2, size=10_000)} == {*IMAGES[0], *IMAGES[1]}


def test_another_seed_remembers_others():
    assert memory(3) == memory(3)
    assert set(memory(3)) != set(memory(3, seed=2))


# ---- batches ----------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """20 images of a step and 6 of its memory."""

    def __len__(self):
        return 26

    def __getitem__(self, item):
        return torch.tensor(item)


def batches(
    world: int = 1, accumulate: int = 1, iterations=range(1, 11)
) -> list[list[list[tuple[int, int]]]]:
    """Of each rank: its micro-batches."""
    return [
        list(
            train_loader(
                Numbers(),
                batch_size=8,
                accumulate=accumulate,
                iterations=iterations,
                seed=3,
                rank=rank,
                world=world,
                memory=6,
            ).batch_sampler
        )
        for rank in range(world)
    ]


def test_half_of_every_micro_batch_is_remembered():
    for (items,) in zip(*batches(), strict=True):
        assert [position >= 20 for _, position in items] == 4 * [False] + 4 * [True]


def test_the_memory_is_gone_through_evenly_and_with_new_crops():
    items = [item for part in batches(iterations=range(1, 7))[0] for item in part[4:]]
    assert sorted(items) == [(epoch, place) for epoch in range(4) for place in range(20, 26)]


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_micro_batches_share_the_memory(world, accumulate):
    items = [item for rank in batches(world, accumulate, range(1, 4)) for part in rank for item in part]
    assert sorted(items) == sorted(item for part in batches(iterations=range(1, 4))[0] for item in part)
    assert len(items) == len(set(items)) == 24
    assert sorted(i for i in items if i[1] >= 20) == [(e, p) for e in range(2) for p in range(20, 26)]


def test_a_resumed_step_draws_the_same():
    assert batches(iterations=range(5, 11))[0] == batches()[0][4:]


def test_a_micro_batch_of_one_image_has_no_half():
    with pytest.raises(DataError, match="a micro-batch has one image"):
        batches(world=4, accumulate=2)
