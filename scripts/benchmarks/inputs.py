"""From files to batches: label tables, images per second of one process, and the class index."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count as count_up
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data import Dataset, Sample, load_dataset
from data.incremental import train_table
from data.index import build_index
from data.loaders import StepDataset, relabel
from data.protocols import protocol_steps
from data.transforms import MEAN, STD, Draw, normalise, train_transform
from scripts.benchmarks.measure import (
    Measurement,
    Options,
    Skipped,
    Target,
    interleave,
    ratio,
    say,
    summary,
    timed,
    torch_threads,
)
from scripts.pack_data import pack

STEP = protocol_steps("voc", "15-1")[0]
FLIP = 0.5


# ----------------------------------------------------------------------------------------------------- labels


def labels(options: Options) -> list[Measurement]:
    """Mask values to labels by the table of 256 entries, against a mapping asked pixel by pixel."""
    side = 64 if options.quick else 512
    table = train_table(STEP, "disjoint", "background")
    mask = np.random.default_rng(0).integers(0, 21, (side, side), dtype=np.uint8)
    mapping = dict(enumerate(table.tolist()))
    variants = {
        "pixel by pixel": lambda: torch.from_numpy(mask.copy()).apply_(lambda value: mapping[value]),
        "table": lambda: torch.from_numpy(relabel(mask, table)),
    }
    assert torch.equal(*(remap() for remap in variants.values()))
    samples = interleave({name: timed(remap) for name, remap in variants.items()}, options.times(25))
    what = f"table faster than pixel by pixel, {side}x{side}"
    return [ratio(what, samples, "pixel by pixel", "table", Target(low=100))]


# ---------------------------------------------------------------------------------------------------- loading


def loading(options: Options) -> list[Measurement]:
    """Training images of one loader process, against the usual pipeline over PIL
    images with the same crops.
    """
    dataset = given(options.fullres, "--fullres")
    crop, count = (64, min(8, len(dataset.train))) if options.quick else (512, len(dataset.train))
    table = train_table(STEP, "disjoint", "background")

    def step_of(dataset: Dataset) -> StepDataset:
        return StepDataset(dataset.train[:count], table, train_transform(crop, flip=FLIP))

    def load(data: StepDataset) -> None:
        for position in range(count):
            data[0, position]

    def load_and_normalise(data: StepDataset) -> None:
        for position in range(count):
            normalise(data[0, position][0][None])

    def load_by_pil() -> None:
        for item, draw in zip(ours.samples, draws, strict=True):
            pil_example(item, draw, crop, table)

    with tempfile.TemporaryDirectory() as folder, torch_threads(1):  # as in a loader process
        ours, packed = step_of(dataset), step_of(packed_copy(options.fullres, Path(folder)))
        draws = crops_of(ours)
        variants: dict[str, Callable[[], None]] = {
            "pil": load_by_pil,
            "ours": partial(load, ours),
            "ours, normalised": partial(load_and_normalise, ours),
            "packed": partial(load, packed),
            "packed, normalised": partial(load_and_normalise, packed),
        }
        samples = interleave({name: timed(run) for name, run in variants.items()}, options.times(7))
    speeds = [
        summary(f"{name}, crop {crop}", [count / s for s in samples[name]], unit="images/s")
        for name in variants
    ]
    what = f"faster than pil, crop {crop}"
    return [
        *speeds,
        ratio(f"ours {what}", samples, "pil", "ours", Target(low=2)),
        ratio(f"ours {what}, floats made here too", samples, "pil", "ours, normalised"),
        ratio(f"packed {what}", samples, "pil", "packed", Target(low=2.5)),
        ratio(f"packed {what}, floats made here too", samples, "pil", "packed, normalised"),
    ]


def packed_copy(root: Path | None, folder: Path) -> Dataset:
    """Return the data set decoded into one file."""
    assert root is not None
    say(f"  {pack(root, folder / 'pack', 'voc', decoded=True)}")
    return load_dataset("voc", folder / "pack")


def given(root: Path | None, option: str) -> Dataset:
    if root is None:
        raise Skipped(f"needs {option} FOLDER, a data set in VOC's layout")
    return load_dataset("voc", root)


def crops_of(dataset: StepDataset) -> list[Draw]:
    """Return what the transform of a data set draws for each image in epoch 0."""
    transform: Any = dataset.transform
    draws: list[Draw] = []

    def draw(image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        draws.append(transform.draw(image))
        return image, mask

    recorder = StepDataset(dataset.samples, dataset.table, draw, dataset.seed)
    for position in range(len(recorder)):
        recorder[0, position]
    return draws


def pil_example(item: Sample, draw: Draw, crop: int, table: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return normalised floats (3, H, W) and labels (H, W), by PIL as far as it goes."""
    box = (draw.left, draw.top, draw.left + draw.width, draw.top + draw.height)
    with Image.open(str(item.image), formats=["JPEG"]) as file:
        image = file.convert("RGB").resize((crop, crop), Image.Resampling.BILINEAR, box)
    with Image.open(str(item.mask), formats=["PNG"]) as file:
        mask = file.resize((crop, crop), Image.Resampling.NEAREST, box)
    if draw.flipped:
        image, mask = (part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for part in (image, mask))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return pixels.sub_(mean).div_(std), torch.from_numpy(table[np.array(mask)])


# ------------------------------------------------------------------------------------------------------ index


def index(options: Options) -> list[Measurement]:
    """The class index of the training and the test list: made, and read back by later starts."""
    dataset = given(options.voc192, "--voc192")
    lists = [dataset.train[:40], dataset.test[:40]] if options.quick else [dataset.train, dataset.test]
    say(f"  {' + '.join(str(len(items)) for items in lists)} images")
    with tempfile.TemporaryDirectory() as folder:
        empty = (Path(folder) / f"empty-{number}" for number in count_up())
        kept = Path(folder) / "kept"
        variants = {
            "first": timed(lambda: index_of(lists, dataset.num_classes, next(empty))),
            "later": timed(lambda: index_of(lists, dataset.num_classes, kept)),
        }
        samples = interleave(variants, options.times(5))
    # The warm-up has read every file, so the disk has no part in this.
    first = summary("first scan, files in memory", samples["first"], Target(high=5), unit="s")
    return [first, summary("later start", samples["later"], Target(high=0.5), unit="s")]


def index_of(lists: Sequence[Sequence[Sample]], num_classes: int, cache: Path) -> None:
    for items in lists:
        build_index("voc", items, num_classes, cache, progress=False)
