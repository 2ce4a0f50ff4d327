"""What mask values mean where they are not class ids themselves: data.labels and data.background."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from data.dataset import DataError
from data.protocols import BACKGROUND, IGNORE_INDEX

VOID = "void"


def mask_meanings(
    class_names: Sequence[str], labels: Sequence[int | str | None] | None, background: bool
) -> bytes | None:
    """Return the class id of each of the 256 mask values, 255 for void;
    None where every value is its own id.

    Position v of `labels` says what the value v is. A value that has no name gets the first number behind
    the classes, so that whoever looks for values without a name finds it there.
    """
    if labels is None and background:
        return None
    nameless = len(class_names)
    known: list[int | None] = [*range(nameless)] if labels is None else [_id(x, class_names) for x in labels]
    if labels is not None and not background and BACKGROUND in known:
        raise DataError(
            f"data.labels: value {known.index(BACKGROUND)} is background, but data.background is false: the "
            "masks have none; name a class or void, or set data.background=true"
        )
    if labels is None:
        known[BACKGROUND] = None
    table = [nameless if c is None else c for c in known]
    table += [nameless] * (IGNORE_INDEX - len(table)) + [IGNORE_INDEX] * (len(table) <= IGNORE_INDEX)
    if nameless == IGNORE_INDEX and (None in known or len(known) < IGNORE_INDEX):
        raise DataError(
            "data.labels and data.background=false leave no number for what has no name, with "
            f"{nameless - 1} classes; merge some"
        )
    return bytes(table)


def _id(entry: int | str | None, class_names: Sequence[str]) -> int | None:
    """Return the class id of an entry of data.labels."""
    if entry is None:
        return None
    if entry == VOID:
        if VOID in class_names:
            raise DataError(
                "data.labels: 'void' is both a class and what is not labelled; give the class another name "
                "or leave it out of the class names"
            )
        return IGNORE_INDEX
    if entry == "background":
        return BACKGROUND
    if isinstance(entry, int):
        if entry < len(class_names) or entry == IGNORE_INDEX:
            return entry
        raise DataError(
            f"data.labels: class id {entry} is outside 0..{len(class_names) - 1}, and 255 is void"
        )
    if entry in class_names:
        return class_names.index(entry)
    close = get_close_matches(entry, [*class_names, VOID], n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the classes are {', '.join(class_names[1:])}"
    raise DataError(f"data.labels: no class is named {entry!r}; {hint}")


def unnamed_values(values: Iterable[int], num_classes: int, meanings: bytes | None = None) -> list[int]:
    """Return the mask values that are neither a class nor void."""
    return [v for v in values if num_classes <= (v if meanings is None else meanings[v]) < IGNORE_INDEX]
