"""Data sets, the steps they are learned in, and the way from files to batches."""

from __future__ import annotations

import shlex
from pathlib import Path

from data.dataset import DATASETS, DataError, Dataset, Picture, raise_problems

__all__ = ["DATASETS", "DataError", "Dataset", "Picture", "find_dataset", "load_dataset"]

DATASETS.discover()  # at once: a data set may bring protocols of its own


def load_dataset(name: str, root: str | Path | None, train_list: str = "auto") -> Dataset:
    """The data set `name` found below `root`, or a DataError naming all that is missing.

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
    """As much of the data set as is there; its `problems` say what is not."""
    if name not in DATASETS:
        raise DataError(f"data.dataset: {DATASETS.unknown(name)}")
    return DATASETS[name](root, train_list)
