"""Data sets, the steps they are learned in, and the way from files to batches."""

from __future__ import annotations

from pathlib import Path

from data.ade import load_ade
from data.dataset import DataError, Dataset, Picture
from data.folder import load_folder
from data.voc import load_voc

DATASETS = ("voc", "ade", "folder")

__all__ = ["DATASETS", "DataError", "Dataset", "Picture", "load_dataset"]


def load_dataset(name: str, root: str | Path | None, train_list: str = "auto") -> Dataset:
    """The data set `name` found below `root`; `train_list` concerns VOC alone."""
    match name:
        case "voc":
            return load_voc(root, train_list)
        case "ade":
            return load_ade(root)
        case "folder":
            return load_folder(root)
    raise DataError(f"no data set {name!r}; choose from {', '.join(DATASETS)}")
