"""What the complete data sets hold and what the protocols make of them, as published. Plain data.

The counts per step and class are those of VOC's train_aug and val; three public code bases agree on all of
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

# data set -> list -> images
LISTS = {
    "voc": {"train": 1464, "train_aug": 10582, "val": 1449},
    "ade": {"train": 20210, "val": 2000},
}

# sha256 of the sorted names, one per line; for the other lists the count has to do
NAMES_SHA256 = {
    ("voc", "train_aug"): "855dff350b7f447bf43cb98ea626a32e0d0b3b7c5786e03b2712a21355b635bf",
    ("voc", "val"): "6f8edc37993764f6e212237d39546fb595246244147e8a050813c520aac0ade1",
}

# (data set, list) -> images that show class 1, 2, ...
IMAGES_PER_CLASS = {
    ("voc", "train_aug"): (
        *(586, 486, 698, 461, 654, 385, 1086, 1000, 1081, 264),
        *(528, 1177, 444, 482, 3898, 487, 299, 491, 500, 548),
    ),
}

# (data set, list, protocol, mode) -> images of each step; "test" stands for the mode of the test images
STEP_SIZES = {
    ("voc", "train_aug", "15-1", "disjoint"): (8437, 378, 299, 420, 500, 548),
    ("voc", "train_aug", "15-1", "overlapped"): (9568, 487, 299, 491, 500, 548),
    ("voc", "val", "15-1", "test"): (1240, 1277, 1329, 1353, 1421, 1449),
    ("voc", "train_aug", "15-5", "disjoint"): (8437, 2145),
    ("voc", "train_aug", "15-5", "overlapped"): (9568, 2145),
    ("voc", "val", "15-5", "test"): (1240, 1449),
    ("voc", "train_aug", "19-1", "disjoint"): (10034, 548),
    ("voc", "train_aug", "19-1", "overlapped"): (10410, 548),
    ("voc", "val", "19-1", "test"): (1421, 1449),
}


def names_digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode("utf-8", "surrogateescape")).hexdigest()


def is_official(dataset: str, list_name: str, names: Iterable[str]) -> bool:
    """Return whether these are the images of the official list: by their names where those are known,
    else by their number.
    """
    names = list(names)
    if (dataset, list_name) in NAMES_SHA256:
        return names_digest(names) == NAMES_SHA256[dataset, list_name]
    return len(names) == LISTS.get(dataset, {}).get(list_name)
