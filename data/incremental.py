"""What a step sees: which images, and which label each mask value becomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.dataset import DataError
from data.loaders import seed_of
from data.protocols import BACKGROUND, IGNORE_INDEX, Step

MODES = ("disjoint", "overlapped", "sequential", "partitioned")


def images_of_steps(
    classes_per_image: Sequence[frozenset[int]],
    names: Sequence[str],
    steps: Sequence[Step],
    mode: str,
    split_seed: int = 0,
) -> list[list[int]]:
    """Return the positions of the training images of each step.

    partitioned: each image goes to the step that learns one of its classes, drawn by the seed; else as
    `select_train` says.
    """
    if mode != "partitioned":
        return [select_train(classes_per_image, step, mode) for step in steps]
    learned = {c for step in steps for c in step.new}
    drawn = [
        draw_class(classes & learned, name, split_seed)
        for classes, name in zip(classes_per_image, names, strict=True)
    ]
    return [[position for position, c in enumerate(drawn) if c in step.new] for step in steps]


def draw_class(classes: frozenset[int], name: str, split_seed: int) -> int | None:
    """Return one of the classes that an image shows, each as probable; None if there is none.

    A pure function of the seed, the image's name and its classes: the order of images, ranks and workers have
    no part in it. Each class has a number of its own, the smallest wins: leaving a class out moves only the
    images that went to it.
    """
    return min(classes, key=lambda c: seed_of("partition", split_seed, c, name), default=None)


def select_train(classes_per_image: Sequence[frozenset[int]], step: Step, mode: str) -> list[int]:
    """Return the positions of the training images of a step, in the modes that need not know the other steps.

    With overlapped an image shows any pixel of a new class; with disjoint and sequential it also shows none
    of a future class.
    """
    _check_choice("mode", mode, [known for known in MODES if known != "partitioned"])
    new, seen = set(step.new), set(step.seen)
    return [
        position
        for position, classes in enumerate(classes_per_image)
        if classes & new and (mode == "overlapped" or classes <= seen)
    ]


def select_test(classes_per_image: Sequence[frozenset[int]], step: Step) -> list[int]:
    """Return the positions of the test images with any pixel of a foreground class seen so far."""
    seen = {*step.old, *step.new}
    return [position for position, classes in enumerate(classes_per_image) if classes & seen]


def check_steps(
    class_names: Sequence[str],
    classes_per_image: Sequence[frozenset[int]],
    steps: Sequence[Step],
    chosen: Sequence[Sequence[int]],
    mode: str,
) -> None:
    """Raise a DataError if a step has a class that the data set does not know or
    that no image of the step shows.

    `chosen` are the positions of each step's images (`images_of_steps`).
    """
    for step, positions in zip(steps, chosen, strict=True):
        unknown = [class_id for class_id in step.new if class_id >= len(class_names)]
        if unknown:
            raise DataError(
                f"step {step.index} learns class {unknown[0]}, but the data set has the classes "
                f"1 to {len(class_names) - 1}; correct data.protocol or data.steps"
            )
        shown = frozenset().union(*(classes_per_image[position] for position in positions))
        missing = [f"{class_names[class_id]} ({class_id})" for class_id in step.new if class_id not in shown]
        if missing:
            raise DataError(
                f"step {step.index} learns {', '.join(missing)}, but none of its {len(positions):,} training "
                f"images ({mode}) shows that; add images, leave the class out or change data.mode"
            )


def train_table(step: Step, mode: str, void: str, num_classes: int = IGNORE_INDEX) -> np.ndarray:
    """Return the label of each mask value for training.

    Old and future classes become background; sequential keeps the old.

    Values from `num_classes` on have no name: where they are not refused (data.unnamed), they are void.
    """
    _check_choice("mode", mode, MODES)
    _check_choice("void", void, ("background", "ignore"))
    table = np.full(256, BACKGROUND, np.uint8)
    kept = step.seen if mode == "sequential" else step.new
    for class_id in kept:
        table[class_id] = step.seen.index(class_id)
    table[num_classes:] = IGNORE_INDEX if void == "ignore" else BACKGROUND
    return table


def test_table(
    step: Step, unseen: str, void_labels: frozenset[int] = frozenset(), num_classes: int = IGNORE_INDEX
) -> np.ndarray:
    """Return the label of each mask value for evaluation.

    Unseen classes are ignored or become background. Void and values from `num_classes` on, which have no
    name, are ignored.
    """
    _check_choice("unseen", unseen, ("ignore", "background"))
    table = np.full(256, IGNORE_INDEX if unseen == "ignore" else BACKGROUND, np.uint8)
    for label, class_id in enumerate(step.seen):
        table[class_id] = label
    table[[*range(num_classes, 256), *void_labels]] = IGNORE_INDEX
    return table


test_table.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for a test


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"no {what} {value!r}; choose from {', '.join(choices)}")
