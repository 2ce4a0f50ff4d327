"""Data sets, the steps they are learned in, and the way from files to batches."""

from __future__ import annotations

import shlex
from pathlib import Path

from data.dataset import DATASETS, DataError, Dataset, Sample, raise_problems
from data.official import LISTS
from data.packs import load_pack

__all__ = ["DATASETS", "DataError", "Dataset", "Sample", "find_dataset", "find_lists", "load_dataset"]

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
