"""The memory of old images: who is in it, and that nothing but the seed and the steps decides."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from test_registry import add_file, error_of  # noqa: F401 (a fixture)
from test_resume import stop_and_go

import train
from data.dataset import DataError
from data.loaders import train_loader
from data.memory import Kept, choose_memory
from data.protocols import steps_from_lists
from engine import checkpoint
from methods import METHODS, make_method

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


# ---- batches -----------------------------------------------------------------------------------------------


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


# ---- training ----------------------------------------------------------------------------------------------

SHORT = ("train.epochs=1", "run.pictures=0", "train.batch_size=4")


def test_a_memory_that_a_method_does_not_use_is_refused():
    said = error_of("data.root=x", "method.name=mib", "method.memory=5")
    who = ", ".join(name for name in METHODS if METHODS[name].memory)
    assert f"method.memory: 5 images are kept, but method.name mib uses none; those that do: {who}" in said


def test_a_method_that_needs_a_memory_says_so():
    assert "method.memory: 0 leaves method.name mib_augm nothing" in error_of("method.name=mib_augm")


def test_the_loss_of_remembered_images_against_a_loop_over_pixels():
    method = make_method("mib_augm")
    method.num_old = 3
    logits, labels = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randint(5, (2, 3, 4))
    labels[0, 0, 0] = 255
    probabilities, total = logits.softmax(dim=1), 0.0
    for b, y, x in ((b, y, x) for b in range(2) for y in range(3) for x in range(4)):
        p, label = probabilities[b, :, y, x], int(labels[b, y, x])
        if label != 255:
            total -= float(p[label].log() if label in (1, 2) else (p[0] + p[3:].sum()).log())
    assert method.memory_loss(logits, labels).item() == pytest.approx(total / 24, abs=1e-12)


@pytest.mark.parametrize("losses", ["plain", "fused"])
def test_both_halves_of_a_batch_weigh_the_same(losses, toy_arguments, tmp_path, monkeypatch):
    """In the first iteration of step 1 the loss is the mean of MiB's on new
    images and of memory_loss on old ones.
    """
    seen = []

    def note(hook):
        original = getattr(METHODS["mib_augm"], hook)

        def spy(self, logits, labels):
            loss = original(self, logits, labels)
            seen.append((hook, len(labels), loss.item()))
            return loss

        monkeypatch.setattr(METHODS["mib_augm"], hook, spy)

    note("memory_loss")
    note("segmentation_loss")
    arguments = ("method.name=mib_augm", "method.memory=4", f"train.losses={losses}", *SHORT)
    assert train.main(toy_arguments(*arguments, "train.epochs_later=1", "run.tracker=[jsonl]")) == 0
    (hook, new, one), (other_hook, old, other) = seen[-2:]
    assert (hook, new, other_hook, old) == ("segmentation_loss", 2, "memory_loss", 2)
    lines = [json.loads(line) for line in (tmp_path / "runs/run/scalars.jsonl").read_text().splitlines()]
    logged = [line["loss/seg"] for line in lines if "loss/seg" in line]
    assert logged[-1] == pytest.approx((one + other) / 2, rel=1e-5)


def weights(folder: Path) -> dict:
    return checkpoint.load(folder / "step_1.pt")["model"]


def test_a_resumed_run_with_a_memory_ends_with_the_same_bits(toy_arguments, tmp_path):
    settings = ("method.name=mib_augm", "method.memory=4", *SHORT)
    assert train.main(toy_arguments(*settings, name="whole")) == 0
    assert stop_and_go(toy_arguments(*settings, name="parts"), 2) > 1
    whole, parts = (weights(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("memory", ["half", "concatenated"])
def test_experience_replay_is_the_few_lines_of_the_document(
    memory,
    toy_arguments,
    tmp_path,
    add_file,  # noqa: F811
    capsys,
):
    text = (Path(train.__file__).parent / "docs/adding-a-method.md").read_text(encoding="utf-8")
    (source,) = re.findall(
        r"^```python\n(# methods/experience_replay.py\n.*?)^```$", text, re.DOTALL | re.MULTILINE
    )
    assert len(source.splitlines()) <= 30
    add_file(METHODS, source.replace('memory = "half"', f'memory = "{memory}"'), "experience_replay")
    assert train.main(toy_arguments("method.name=er", "method.memory=4", *SHORT)) == 0
    assert ": er, strength 10, memory 4\n" in capsys.readouterr().out
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert results["config"]["method"]["memory"] == 4
    # Step 1 has 4 images: an epoch is one batch of 4, or two with the memory's 4 beside them.
    assert results["steps"][1]["iterations"] == {"half": 4, "concatenated": 8}[memory]
