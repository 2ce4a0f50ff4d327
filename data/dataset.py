"""What a data set is: class names and (image, mask) pairs. Knows nothing of steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from configs.errors import UserError
from configs.registry import Conflicts, Registry
from data.palette import palette_with

if TYPE_CHECKING:
    import numpy as np

    from data.packs import File

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".JPG", ".JPEG", ".png", ".PNG")
MASK_SUFFIXES = (".png", ".PNG")
SHOWN_PROBLEMS = 10


class DataError(UserError, ValueError):
    """Something about the user's data; the message says what, where, and what to do."""


class IncompleteError(DataError):
    """A data set that lacks a part, but not all of what it is recognised by."""


class Sample(NamedTuple):
    """An image of a data set and its mask, both on disk, and the name that its list calls it by."""

    name: str
    image: File
    mask: File
    meanings: bytes | None = None  # the class id of each mask value; None: they are ids (data/meanings.py)


@dataclass(frozen=True)
class Dataset:
    name: str
    class_names: tuple[str, ...]  # the index is the class id; [0] is the background
    train: list[Sample]
    test: list[Sample]
    train_list: str = "train"  # the name of the list of `train`; that of `test` is "val"
    problems: dict[str, list[str]] = field(default_factory=dict)  # by list: what is missing or cannot be used
    notices: list[str] = field(default_factory=list)  # what the user should know about this copy
    void_labels: frozenset[int] = frozenset()  # mask values beside 255 that evaluation ignores
    colours: tuple[tuple[int, int, int], ...] = ()  # of each class, if it has its own

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def palette(self) -> np.ndarray:
        """The colour of each label, (256, 3) bytes."""
        return palette_with(dict(enumerate(self.colours)))


class LoadDataset(Protocol):
    def __call__(self, root: str | Path | None, train_list: str) -> Dataset:
        """Return as much of the data set below `root` as is there; its `problems` say what is not."""


DATASETS: Registry[LoadDataset] = Registry("data.dataset", "data")
register = DATASETS.register


def one_train_list(config: Any) -> Conflicts:
    """Of a data set without a choice of training lists: data.train_list has no meaning there."""
    data = config.data
    if data.train_list != "auto":
        able = ", ".join(
            name for name in DATASETS if getattr(DATASETS[name], "conflicts", None) is not one_train_list
        )
        yield (
            "data.train_list",
            f"{data.train_list!r} exists for data.dataset {able} only; leave it at auto for {data.dataset}",
        )


def raise_problems(headline: str, problems: Sequence[str]) -> None:
    """One DataError for all problems, the first ten in full; nothing happens without problems."""
    if problems:
        lines = [f"{headline} ({len(problems):,} in all):", *problems[:SHOWN_PROBLEMS]]
        if len(problems) > SHOWN_PROBLEMS:
            lines.append(f"... and {len(problems) - SHOWN_PROBLEMS:,} more")
        raise DataError("\n  ".join(lines))


def find_base(root: str | Path | None, places: Iterable[str], needed: Sequence[str], what: str) -> Path:
    """Return the first of `places` below `root` that holds every folder or file of `needed`."""
    if root is None:
        raise DataError(f"the place of {what} is not given; set data.root=<folder>")
    root = Path(root).expanduser()
    if not root.is_dir():
        reason = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"data.root={root} {reason}; set it to the folder that holds {what}")
    bases = [root / place for place in places]
    missing = {base: [entry for entry in needed if not (base / entry).exists()] for base in bases}
    nearest = min(bases, key=lambda base: len(missing[base]))
    if not missing[nearest]:
        return nearest
    if len(missing[nearest]) < len(needed):
        raise IncompleteError(
            f"{what} is not complete: {nearest} lacks {' and '.join(missing[nearest])}; add what is missing, "
            f"or set data.root to a folder that holds {' and '.join(needed)}"
        )
    raise DataError(
        f"{what} is not below data.root={root}: looked for {' and '.join(needed)} in "
        f"{', '.join(str(base) for base in bases)}; set data.root to the folder that holds them"
    )


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file without surrounding blanks; empty ones at the end are left out."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise OSError("it is no file")
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error}); make the file again") from error
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{path}: the file is empty; write one entry per line")
    return lines


class FolderListing:
    """Which files there are. Lists a folder once instead of asking the disk for every name."""

    def __init__(self) -> None:
        self._files: dict[str, set[str]] = {}

    def files(self, folder: str) -> set[str]:
        if folder not in self._files:
            try:
                self._files[folder] = set(os.listdir(folder))
            except (OSError, ValueError):  # not there, or no possible name of a folder
                self._files[folder] = set()
        return self._files[folder]

    def find(self, folders: Sequence[str], name: str, suffixes: Sequence[str]) -> Path | None:
        """Return the first of folder/name + suffix that exists; `name` may hold folders itself."""
        inner, _, tail = name.rpartition("/")
        for folder in folders:
            head = f"{folder}/{inner}" if inner else folder
            files = self.files(head)
            for suffix in suffixes:
                if tail + suffix in files:
                    return Path(f"{head}/{tail}{suffix}")
        return None


def read_list(
    list_file: Path, base: Path, image_folders: Sequence[str], mask_folders: Sequence[str]
) -> tuple[list[Sample], list[str]]:
    """Return the images of a list file, and what is wrong with its other lines.

    They come in ascending order of their names, so that the order of the lines is no matter.

    A line holds either a name, looked for in the given folders of `base`, or the paths of an image and its
    mask below `base` (`/JPEGImages/x.jpg /SegmentationClassAug/x.png`, the leading slash means `base`).
    """
    listing = FolderListing()
    absolute = base.absolute().as_posix()
    image_folders = [str(base / folder) for folder in image_folders]
    mask_folders = [str(base / folder) for folder in mask_folders]
    samples: dict[str, Sample] = {}
    images: set[Path] = set()
    problems = []
    try:
        lines = read_lines(list_file)
    except DataError as error:
        return [], [str(error)]
    for number, line in enumerate(lines, start=1):
        where = f"{list_file}, line {number}"
        given = line.split()
        entries = [path for entry in given if (path := _below(absolute, entry)) is not None]
        if len(given) not in (1, 2):
            problems.append(
                f"{where}: write one name, or an image and its mask, without blanks in them: {line!r}"
            )
            continue
        if len(entries) < len(given):
            problems.append(f"{where}: {line!r} leaves the data root; write paths below {base}")
            continue
        if len(entries) == 1:
            name = _without_suffix(entries[0])
            image = listing.find(image_folders, name, IMAGE_SUFFIXES)
            mask = listing.find(mask_folders, name, MASK_SUFFIXES)
            wanted = image_folders[0], mask_folders[0]
        else:
            # JPEGImages/x.jpg and the name x are the same image
            name = _without_suffix(entries[0]).split("/", maxsplit=1)[-1]
            image, mask = (listing.find([str(base)], entry, [""]) for entry in entries)
            wanted = str(base / entries[0]), str(base / entries[1])
        if image is None or mask is None:
            missing = [
                f"its {kind} ({place})"
                for kind, path, place in zip(("image", "mask"), (image, mask), wanted, strict=True)
                if path is None
            ]
            problems.append(f"{where}: {name} lacks {' and '.join(missing)}; add the file or remove the line")
        elif name in samples or image in images:  # `a` and `./a` are one image
            problems.append(f"{where}: {name} is listed twice; remove one of the lines")
        else:
            samples[name] = Sample(name, image, mask)
            images.add(image)
    return [samples[name] for name in sorted(samples)], problems


def _below(base: str, entry: str) -> str | None:
    """Return a path of a list as a path relative to `base`; None when it would leave it."""
    if "\0" in entry or ".." in entry.split("/"):
        return None
    return entry.removeprefix(base + "/").lstrip("/")


def _without_suffix(entry: str) -> str:
    stem, suffix = os.path.splitext(entry)
    return stem if suffix in IMAGE_SUFFIXES else entry
