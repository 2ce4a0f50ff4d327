"""Which classes occur in which picture: one parallel scan that also checks every file, then a cached file."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.dataset import DataError, Picture, raise_problems
from data.files import check_image, open_mask, read_image, write_atomically
from data.protocols import BACKGROUND, IGNORE_INDEX
from data.workers import outlive_signals

DEFAULT_CACHE = Path("~/.cache/altersgd")
VERSION = 1  # of what the cache holds and of what the scan checks
MOST_WORKERS = 16  # beyond, the disk is the limit
CHUNK = 64  # pictures a process takes at once


def build_index(
    dataset_name: str,
    pictures: Sequence[Picture],
    num_classes: int,
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> list[frozenset[int]]:
    """The classes of each picture, void and background left out.

    The result lives in a file of the folder `cache` and holds as long as no picture or mask changes. `workers`
    processes scan (None: one per core, up to 16); every problem found is part of one DataError.
    """
    fingerprint = _fingerprint(pictures)
    paths = _digest(f"{picture.image}\0{picture.mask}" for picture in pictures)
    folder = Path(cache or DEFAULT_CACHE).expanduser()
    file = folder / f"index-{dataset_name}-{num_classes}-{paths[:16]}.json"
    index = _read(file, fingerprint, num_classes, len(pictures))
    if index is None:
        findings = scan(dataset_name, pictures, num_classes, workers, progress)
        problems = [finding.problem for finding in findings if finding.problem]
        raise_problems(f"files of {dataset_name} cannot be used", problems)
        index = [finding.classes for finding in findings]
        content = {"version": VERSION, "fingerprint": fingerprint, "classes": [sorted(row) for row in index]}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, json.dumps(content).encode())
        except OSError as error:
            warnings.warn(
                f"the class index cannot be kept in {folder} ({error}), so the next start scans again; "
                "set data.cache to a folder that can be written",
                stacklevel=2,
            )
    return index


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _fingerprint(pictures: Sequence[Picture]) -> str:
    """Changes with any name, size or time of change of a picture or mask."""

    def describe(path: Path) -> str:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(
                f"{path}: the file is missing ({error}); put it back or remove it from its list"
            ) from None
        return f"{status.st_size} {status.st_mtime_ns}"

    return _digest(f"{name} {describe(image)} {describe(mask)}" for name, image, mask in pictures)


def content_digest(pictures: Sequence[Picture], classes: Sequence[frozenset[int]]) -> str:
    """What a run's figures depend on: names, classes and sizes of the files, but neither their place nor their age."""
    return _digest(
        f"{picture.name} {sorted(shown)} {os.path.getsize(picture.image)} {os.path.getsize(picture.mask)}"
        for picture, shown in zip(pictures, classes, strict=True)
    )[:32]


def _read(file: Path, fingerprint: str, num_classes: int, count: int) -> list[frozenset[int]] | None:
    """The cached index; None when there is none, it is damaged or the data has changed."""
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != VERSION or content["fingerprint"] != fingerprint:
            return None
        index = [frozenset(row) for row in content["classes"]]
        return (
            index if len(index) == count and frozenset().union(*index) <= set(range(1, num_classes)) else None
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


class Finding(NamedTuple):
    """What the scan learned about a picture."""

    classes: frozenset[int]  # void and background left out
    problem: str  # empty if picture and mask can be used


class _Scan(torch.utils.data.Dataset):
    """As a data set the scan runs in the same processes, and as safely, as the loading of batches later on."""

    def __init__(self, pictures: Sequence[Picture], num_classes: int, decode: bool):
        self.pictures, self.num_classes, self.decode = pictures, num_classes, decode

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, position: int) -> Finding:
        try:
            return Finding(_classes_of(self.pictures[position], self.num_classes, self.decode), "")
        except DataError as error:
            return Finding(frozenset(), str(error))


def _classes_of(picture: Picture, num_classes: int, decode: bool) -> frozenset[int]:
    mask = open_mask(picture.mask)
    labels = [label for label, count in enumerate(mask.histogram()) if count]
    unknown = [label for label in labels if label >= num_classes and label != IGNORE_INDEX]
    if unknown:
        raise DataError(
            f"{picture.mask}: holds the label{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown[:5]))}, but classes "
            f"go from 0 to {num_classes - 1} and 255 is void; correct the mask or the class names"
        )
    if decode:
        height, width, _ = read_image(picture.image).shape
        size = width, height
    else:
        size = check_image(picture.image)
    if size != mask.size:
        raise DataError(
            f"{picture.mask}: is {mask.width} x {mask.height} but its picture {size[0]} x {size[1]}; "
            "make both the same size (masks by nearest neighbour)"
        )
    return frozenset(labels) - {BACKGROUND, IGNORE_INDEX}


def _as_is(rows: list) -> list:
    return rows


def scan(
    dataset_name: str,
    pictures: Sequence[Picture],
    num_classes: int,
    workers: int | None = None,
    progress: bool = True,
    decode: bool = False,
) -> list[Finding]:
    """Look at every picture and mask; `decode` reads pictures to the last pixel, not just their first and last bytes."""
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(cores, MOST_WORKERS)
    if len(pictures) < 8 * CHUNK:
        workers = 0  # done before the processes have started
    loader = DataLoader(
        _Scan(pictures, num_classes, decode),
        batch_size=CHUNK,
        num_workers=workers,
        collate_fn=_as_is,
        generator=torch.Generator(),  # or it would draw from the caller's
        worker_init_fn=outlive_signals,
    )
    findings: list[Finding] = []
    # disable=None: no bar where stderr is a file
    with tqdm(
        total=len(pictures), desc=f"scanning {dataset_name}", disable=None if progress else True
    ) as bar:
        for chunk in loader:
            findings += chunk
            bar.update(len(chunk))
    return findings
