"""Data sets, the steps they are learned in, and the way from files to batches."""

from __future__ import annotations

import shlex
from pathlib import Path

from data.ade import load_ade
from data.dataset import DataError, Dataset, Picture, raise_problems
from data.folder import load_folder
from data.voc import load_voc

DATASETS = ("voc", "ade", "folder")

__all__ = ["DATASETS", "DataError", "Dataset", "Picture", "find_dataset", "load_dataset"]


def load_dataset(name: str, root: str | Path | None, train_list: str = "auto") -> Dataset:
    """The data set `name` found below `root`, or a DataError naming all that is missing.

    `train_list` concerns VOC alone.
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
    match name:
        case "voc":
            return load_voc(root, train_list)
        case "ade":
            return load_ade(root)
        case "folder":
            return load_folder(root)
    raise DataError(f"no data set {name!r}; choose from {', '.join(DATASETS)}")
