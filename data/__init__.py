"""Data sets, the steps they are learned in, and the way from files to batches."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.dataset import DATASETS, DataError, Dataset, Sample, raise_problems
from data.meanings import mask_meanings
from data.official import LISTS
from data.packs import load_pack

__all__ = [
    *("DATASETS", "DataError", "Dataset", "Sample"),
    *("configured_dataset", "find_dataset", "find_lists", "load_dataset", "with_meanings"),
]

DATASETS.discover()  # at once: a data set may bring protocols of its own


def load_dataset(name: str, root: str | Path | None, train_list: str = "auto") -> Dataset:
    """Return the data set `name` found below `root`, or raise a DataError that names all that is missing.

    `train_list` is for data sets that have several, as VOC.
    """
    dataset = find_dataset(name, root, train_list)
    problems = [problem for group in dataset.problems.values() for problem in group]
    raise_problems(
        f"the lists of {name} cannot be used; see python -m scripts.check_data {shlex.quote(str(root))}",
        problems,
    )
    return dataset


def configured_dataset(data: Any) -> Dataset:
    """Return the data set that the section `data` of a config names, its masks read as the section says."""
    return with_meanings(load_dataset(data.dataset, data.root, data.train_list), data.labels, data.background)


def with_meanings(dataset: Dataset, labels: Sequence[int | str | None] | None, background: bool) -> Dataset:
    """Return the data set whose samples know what their mask values mean (data.labels, data.background)."""
    meanings = mask_meanings(dataset.class_names, labels, background)
    if meanings is None:
        return dataset
    train, test = (
        [sample._replace(meanings=meanings) for sample in group] for group in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test)


def find_dataset(name: str, root: str | Path | None, train_list: str = "auto") -> Dataset:
    """Return as much of the data set as is there; its `problems` say what is not."""
    if name not in DATASETS:
        raise DataError(f"data.dataset: {DATASETS.unknown(name)}")
    if root is not None and (file := Path(root).expanduser()).is_file():
        return load_pack(file, name, train_list)
    return DATASETS[name](root, train_list)


def find_lists(dataset: Dataset, root: str | Path) -> dict[str, tuple[list[Sample], list[str]]]:
    """Return every list of the data set at `root`, by name, and its problems:
    VOC has one more than a run uses.
    """
    used = {dataset.train_list: dataset.train, "val": dataset.test}
    lists = {name: (images, dataset.problems[name]) for name, images in used.items()}
    for other in LISTS.get(dataset.name, {}).keys() - used:
        try:
            alternative = find_dataset(dataset.name, root, other)
        except DataError:
            continue
        if alternative.train:
            lists[other] = alternative.train, alternative.problems[other]
    return dict(sorted(lists.items()))
