"""Step checkpoints of DKD and STAR, as their authors publish them: a ResNet-101 of torchvision, the head
`aspp`, and classifiers of the foreground alone. DKD's first classifier is its auxiliary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from models.pretrained import (
    Report,
    State,
    WeightsError,
    check_fits,
    counters,
    nested,
    read,
    shapes,
    tensors_of,
)
from models.segmenter import Segmenter

PARTS = {"backbone": "body", "aspp": "head"}
AUXILIARY = "auxiliary"  # what methods/dkd.py calls that classifier


def is_sigmoid_step(path: Path) -> bool:
    """Return whether a file is laid out as those of DKD and STAR."""
    names = tensors_of(nested(read(path)))
    return any(name.startswith("backbone.") for name in names) and "cls.0.weight" in names


def import_sigmoid_step(path: Path, segmenter: Segmenter, foreground: Sequence[int]) -> Report:
    """Fill backbone, head and classifiers of a segmenter without classifiers, which it is given here.

    `foreground` is how many classes each step of the protocol brings, the background not counted.
    """
    found = tensors_of(nested(read(path)))
    if "backbone.mod1.conv1.weight" in found:
        raise WeightsError(
            f"{path}: was trained with norm_act iabn_sync; what can be read is bn_sync, the default of its "
            "authors"
        )
    sizes: list[int] = []
    while (weight := found.get(f"cls.{len(sizes)}.weight")) is not None:
        sizes.append(len(weight))
    is_dkd = sizes[:1] == [1] and sizes[1:] == list(foreground[: len(sizes) - 1])
    if not is_dkd and sizes != list(foreground[: len(sizes)]):
        raise WeightsError(
            f"{path}: its classifiers have {sizes} classes; with this protocol those of STAR have "
            f"{list(foreground)}, and DKD has 1 more before them: give the protocol of the checkpoint"
        )
    state: State = {}
    for name, tensor in found.items():
        part, _, rest = name.partition(".")
        number, _, what = rest.partition(".")
        if part != "cls":
            state[f"{PARTS.get(part, part)}.{rest}"] = tensor
        elif is_dkd and number == "0":
            state[f"further.{AUXILIARY}.{what}"] = tensor
        else:
            state[f"classifiers.{int(number) - is_dkd}.{what}"] = tensor
    wanted = shapes(segmenter)
    channels = segmenter.head.out_channels
    places = [f"classifiers.{number - is_dkd}" for number in range(len(sizes))]
    if is_dkd:
        places[0] = f"further.{AUXILIARY}"
    for place, size in zip(places, sizes, strict=True):
        wanted |= {f"{place}.weight": (size, channels, 1, 1), f"{place}.bias": (size,)}
    state = counters(segmenter) | state
    check_fits(path, "DKD" if is_dkd else "STAR", state, wanted)

    if is_dkd:
        segmenter.add_further(AUXILIARY, 1)
    for size in sizes[is_dkd:]:
        segmenter.add_classes(size)
    segmenter.load_state_dict(state)
    return Report(str(path), "DKD" if is_dkd else "STAR", list(state), [], [])
