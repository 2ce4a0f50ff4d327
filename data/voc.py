"""PASCAL VOC 2012 with or without the extra masks of SBD (SegmentationClassAug), in every usual layout."""

from __future__ import annotations

from pathlib import Path

from data.dataset import DataError, Dataset, Sample, find_base, read_list, register

CLASS_NAMES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *(
        "diningtable",
        "dog",
        "horse",
        "motorbike",
        "person",
        "pottedplant",
        "sheep",
        "sofa",
        "train",
        "tvmonitor",
    ),
)
PLACES = ("", "VOCdevkit/VOC2012", "VOC2012", "PascalVOC12")  # the last one is MiB's
LIST_FOLDERS = ("ImageSets/Segmentation", "splits")  # the second one is MiB's
LIST_NAMES = {"train_aug": ("train_aug.txt", "trainaug.txt"), "train": ("train.txt",), "val": ("val.txt",)}
AUGMENTED = "SegmentationClassAug"
MASK_FOLDERS = (AUGMENTED, "SegmentationClass")

TRAIN_NOTICE = (
    "train_aug is not in {base} (it needs the folder SegmentationClassAug and the list train_aug.txt): "
    "training on the {count:,} images of train. Published numbers use the 10,582 images of train_aug; expect "
    "lower ones."
)


@register("voc")
def load_voc(root: str | Path | None, train_list: str = "auto") -> Dataset:
    """VOC below `root`; `train_list` is "train", "train_aug" or "auto" (train_aug where it is at hand)."""
    base = find_base(root, PLACES, ["JPEGImages"], "PASCAL VOC 2012")
    if train_list not in ("auto", "train", "train_aug"):
        raise DataError(f"no train_list {train_list!r}; choose from auto, train, train_aug")

    augmented = (base / AUGMENTED).is_dir() and _find_list(base, "train_aug") is not None
    if train_list == "train_aug" and not augmented:
        raise DataError(
            f"data.train_list=train_aug needs the folder {AUGMENTED} and the list train_aug.txt (in "
            f"{' or '.join(LIST_FOLDERS)}) in {base}; add them or set data.train_list=train"
        )
    used = "train_aug" if augmented and train_list != "train" else "train"
    train, train_problems = _read(base, used)
    test, test_problems = _read(base, "val")
    notices = []
    if train_list == "auto" and used == "train":
        notices.append(TRAIN_NOTICE.format(base=base, count=len(train)))
    problems = {used: train_problems, "val": test_problems}
    return Dataset("voc", CLASS_NAMES, train, test, used, problems, notices)


def _read(base: Path, split: str) -> tuple[list[Sample], list[str]]:
    list_file = _find_list(base, split)
    if list_file is None:
        folders = " or ".join(str(base / folder) for folder in LIST_FOLDERS)
        return [], [f"the list {LIST_NAMES[split][0]} is missing; put it into {folders}"]
    return read_list(list_file, base, ["JPEGImages"], MASK_FOLDERS)


def _find_list(base: Path, split: str) -> Path | None:
    paths = (base / folder / name for folder in LIST_FOLDERS for name in LIST_NAMES[split])
    return next((path for path in paths if path.is_file()), None)
