"""Your own data: classes.txt, images/, masks/, train.txt and val.txt in one folder.

classes.txt names one class per line. The first line may be `background` (mask value 0); otherwise the first
line is mask value 1. Masks are PNG files of class numbers (grey or palette), 255 is void. The lists hold one
name per line.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

from data.dataset import DataError, Dataset, find_base, one_train_list, read_lines, read_list, register
from data.protocols import IGNORE_INDEX

UNPRINTABLE = ("Cc", "Zl", "Zp")  # control characters and breaks between lines
NEEDED = ("classes.txt", "images", "masks", "train.txt", "val.txt")


@register("folder", conflicts=one_train_list)
def load_folder(root: str | Path | None, train_list: str = "auto") -> Dataset:
    base = find_base(root, [""], NEEDED, "a data set of your own")
    class_names = read_class_names(base / "classes.txt")
    (train, train_problems), (test, test_problems) = (
        read_list(base / f"{split}.txt", base, ["images"], ["masks"]) for split in ("train", "val")
    )
    return Dataset(
        "folder", class_names, train, test, problems={"train": train_problems, "val": test_problems}
    )


def read_class_names(path: Path) -> tuple[str, ...]:
    """Return class names by id, the background put first where the file leaves it out."""
    names = read_lines(path)
    if names[0].lower() != "background":
        names.insert(0, "background")
    for position, name in enumerate(names):
        if not name:
            raise DataError(
                f"{path}: an empty line between the names; remove it, as its line gives a class its id"
            )
        if any(unicodedata.category(char) in UNPRINTABLE and char != "\t" for char in name):
            raise DataError(
                f"{path}: the class {name!r} holds a control character; write its name in letters that can "
                "be printed"
            )
        if name in names[:position]:
            raise DataError(f"{path}: the class {name!r} is named twice; give every class its own name")
    if len(names) == 1:
        raise DataError(f"{path}: only the background is named; name at least one class")
    if len(names) > IGNORE_INDEX:
        raise DataError(
            f"{path}: {len(names) - 1} classes, but masks have room for {IGNORE_INDEX - 1}; merge some"
        )
    return tuple(names)
