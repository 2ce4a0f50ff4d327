"""Your own data: classes.txt, images/, masks/, train.txt and val.txt in one folder.

classes.txt names one class per line. The first line may be `background` (mask value 0); otherwise the first
line is mask value 1. A colour may follow each name, `road 128 64 128` or `road #804080`. Masks are PNG files
of class numbers (grey or palette), 255 is void. The lists hold one name per line, or the paths of an image
and its mask below the folder; then images/ and masks/ need not be there.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from data.dataset import DataError, Dataset, find_base, one_train_list, read_lines, read_list, register
from data.protocols import IGNORE_INDEX

UNPRINTABLE = ("Cc", "Zl", "Zp")  # control characters and breaks between lines
NEEDED = ("classes.txt", "train.txt", "val.txt")
COLOURED = re.compile(r"(.*\S)\s+(?:#([0-9a-fA-F]{6})|(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3}))")
Colour = tuple[int, int, int]


@register("folder", conflicts=one_train_list)
def load_folder(root: str | Path | None, train_list: str = "auto") -> Dataset:
    base = find_base(root, [""], NEEDED, "a data set of your own")
    class_names, colours = read_classes(base / "classes.txt")
    (train, train_problems), (test, test_problems) = (
        read_list(base / f"{split}.txt", base, ["images"], ["masks"]) for split in ("train", "val")
    )
    problems = {"train": train_problems, "val": test_problems}
    return Dataset("folder", class_names, train, test, problems=problems, colours=colours)


def read_classes(path: Path) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """Return class names and colours by id, the background put first where the file leaves it out."""
    lines = [_name_and_colour(line, path) for line in read_lines(path)]
    if lines[0][0].lower() != "background":
        lines.insert(0, ("background", None))
    names = [name for name, _ in lines]
    _check_names(names, path)
    given = [colour for _, colour in lines[1:]]
    if not any(colour for _, colour in lines):
        return tuple(names), ()
    if None in given:
        raise DataError(
            f"{path}: the class {names[1 + given.index(None)]!r} has no colour, but others do; give every "
            "class one, or none"
        )
    colours = [colour or (0, 0, 0) for _, colour in lines]
    for position, colour in enumerate(colours):
        if colour in colours[:position]:
            other = names[colours.index(colour)]
            advice = "; background is black unless its own line says otherwise" * (other == names[0])
            raise DataError(
                f"{path}: {names[position]!r} has the colour of {other!r}; give each its own{advice}"
            )
    return tuple(names), tuple(colours)


def _name_and_colour(line: str, path: Path) -> tuple[str, Colour | None]:
    match = COLOURED.fullmatch(line)
    if match is None:
        return line, None
    parts = bytes.fromhex(match[2]) if match[2] else [int(part) for part in match.groups()[2:]]
    red, green, blue = parts
    if max(parts) > 255:
        raise DataError(f"{path}: {line!r}: a colour is three numbers from 0 to 255, or # and six digits")
    return match[1], (red, green, blue)


def _check_names(names: list[str], path: Path) -> None:
    """Raise a DataError for names that classes cannot have."""
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
