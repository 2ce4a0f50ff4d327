"""Which classes occur in which image: one parallel scan that also checks every file, then a cached file."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.dataset import DataError, Sample, raise_problems
from data.files import write_atomically
from data.images import TURNED, check_image, open_mask, read_bytes, read_image
from data.meanings import unnamed_values
from data.packs import File, Record
from data.protocols import BACKGROUND
from data.workers import outlive_signals

DEFAULT_CACHE = Path("~/.cache/altersgd")
VERSION = 2  # of what the cache holds and of what the scan checks
MOST_WORKERS = 16  # beyond, the disk is the limit
CHUNK = 64  # images a process takes at once


class Index(NamedTuple):
    """What a run knows of a list of images before it reads them."""

    classes: list[frozenset[int]]  # of each image, void and background left out
    content: str  # a digest of names and bytes of all images and masks, wherever and however old they are
    notes: list[str]  # what in them is not read as it is stored


def build_index(
    dataset_name: str,
    samples: Sequence[Sample],
    num_classes: int,
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
    unnamed: str = "refuse",
) -> list[frozenset[int]]:
    """Return the classes of each image, void and background left out: what most of an Index is asked for."""
    return read_index(dataset_name, samples, num_classes, cache, workers, progress, unnamed).classes


def read_index(
    dataset_name: str,
    samples: Sequence[Sample],
    num_classes: int,
    cache: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
    unnamed: str = "refuse",
    between: Callable[[], object] | None = None,
) -> Index:
    """Return the index of the images, from its file in the folder `cache` as long as
    no image or mask has changed.

    `workers` processes scan (None: one per core, up to 16); every problem found is part of one DataError. A
    mask value that is no class is a problem, too, unless `unnamed` is "void". `between` is called again and
    again meanwhile, and may raise to end the scan.
    """
    fingerprint = f"{unnamed} {_fingerprint(samples)}"
    read_as = _read_as(samples)
    paths = _digest([*(f"{sample.image}\0{sample.mask}" for sample in samples), *read_as])
    folder = Path(cache or DEFAULT_CACHE).expanduser()
    file = folder / f"index-{dataset_name}-{num_classes}-{paths[:16]}.json"
    index = _read(file, fingerprint, num_classes, len(samples))
    if index is None:
        findings = scan(
            dataset_name, samples, num_classes, workers, progress, unnamed=unnamed, between=between
        )
        problems = [finding.problem for finding in findings if finding.problem]
        raise_problems(f"files of {dataset_name} cannot be used", problems)
        contents = [f"{p.name} {f.content}" for p, f in zip(samples, findings, strict=True)]
        index = Index(
            [finding.classes for finding in findings],
            _digest([*contents, *read_as])[:32],
            list(notes_on(samples, findings, num_classes)),
        )
        content = {"version": VERSION, "fingerprint": fingerprint, **index._asdict()}
        content["classes"] = [sorted(row) for row in index.classes]
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


def _fingerprint(samples: Sequence[Sample]) -> str:
    """Changes with any name, size or time of change of an image or mask,
    and where a file is replaced by one as old.
    """

    def describe(path: File) -> str:
        record = f" {path.start}" if isinstance(path, Record) else ""
        try:
            status = os.stat(path.pack.path if isinstance(path, Record) else path)
        except OSError as error:
            raise DataError(
                f"{path}: the file is missing ({error}); put it back or remove it from its list"
            ) from None
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}{record}"

    lines = (f"{sample.name} {describe(sample.image)} {describe(sample.mask)}" for sample in samples)
    return _digest([*lines, *_read_as(samples)])


def _read_as(samples: Sequence[Sample]) -> list[str]:
    """Return the ways in which mask values are read, none where they are ids: the same files, read
    otherwise, are another data set.
    """
    return sorted({sample.meanings.hex() for sample in samples if sample.meanings is not None})


def content_digest(samples: Sequence[Sample], classes: Sequence[frozenset[int]]) -> str:
    """Names, classes and sizes of the files, by which runs older than
    `Index.content` know their data again.
    """

    def size(path: File) -> int:
        return path.file_size if isinstance(path, Record) else os.path.getsize(path)

    return _digest(
        f"{sample.name} {sorted(shown)} {size(sample.image)} {size(sample.mask)}"
        for sample, shown in zip(samples, classes, strict=True)
    )[:32]


def _read(file: Path, fingerprint: str, num_classes: int, count: int) -> Index | None:
    """Return the cached index; None when there is none, it is damaged or of another version,
    or the data has changed.
    """
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != VERSION or content["fingerprint"] != fingerprint:
            return None
        index = Index(
            [frozenset(row) for row in content["classes"]], str(content["content"]), list(content["notes"])
        )
        is_whole = len(index.classes) == count and frozenset().union(*index.classes) <= set(
            range(1, num_classes)
        )
        return index if is_whole else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


class Finding(NamedTuple):
    """What the scan learned about an image."""

    classes: frozenset[int] = frozenset()  # void, background and what has no name left out
    problem: str = ""  # empty if image and mask can be used
    pixels: dict[int, int] = {}  # mask value -> their number
    how: tuple[str, ...] = ()  # in what the image is not read as it is stored
    content: str = ""  # a digest of both files


class _Scan(torch.utils.data.Dataset):
    """As a data set the scan runs in the same processes, and as safely,
    as the loading of batches later on.
    """

    def __init__(self, samples: Sequence[Sample], num_classes: int, decode: bool, unnamed: str):
        self.samples, self.num_classes, self.decode, self.unnamed = samples, num_classes, decode, unnamed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> Finding:
        try:
            finding = _look_at(self.samples[position], self.num_classes, self.decode)
        except DataError as error:
            return Finding(problem=str(error))
        sample = self.samples[position]
        strange = unnamed_values(finding.pixels, self.num_classes, sample.meanings)
        if not strange or self.unnamed == "void":
            return finding
        found = f"{'s' * (len(strange) > 1)} {', '.join(map(str, strange[:5]))}"
        return finding._replace(
            problem=f"{sample.mask}: holds the label{found}, but classes go from 0 to {self.num_classes - 1} "
            "and 255 is void; correct the mask or the class names, or set data.unnamed=void"
            if sample.meanings is None
            else f"{sample.mask}: holds the value{found}, which data.labels or data.background=false leave "
            "without a name; list it in data.labels, correct the mask, or set data.unnamed=void"
        )


def _look_at(sample: Sample, num_classes: int, decode: bool) -> Finding:
    image_bytes, mask_bytes = read_bytes(sample.image), read_bytes(sample.mask)
    mask = open_mask(sample.mask, mask_bytes)
    look = check_image(sample.image, image_bytes)
    if decode:
        read_image(sample.image)
    if look.size != mask.size:
        shown = "{} x {}".format(*look.size)
        if TURNED in look.how and look.size == mask.size[::-1]:
            raise DataError(
                f"{sample.mask}: is {mask.width} x {mask.height} as its image is stored, but that is shown "
                f"turned by its EXIF data, {shown}; turn the mask too, or take the orientation out of the "
                "image's EXIF data"
            )
        raise DataError(
            f"{sample.mask}: is {mask.width} x {mask.height} but its image {shown}; "
            "make both the same size (masks by nearest neighbour)"
        )
    pixels = {value: count for value, count in enumerate(mask.histogram()) if count}
    meant = pixels.keys() if sample.meanings is None else {sample.meanings[value] for value in pixels}
    classes = frozenset(value for value in meant if BACKGROUND < value < num_classes)
    content = f"{file_digest(sample.image, image_bytes)} {file_digest(sample.mask, mask_bytes)}"
    return Finding(classes, "", pixels, look.how, content)


def file_digest(path: File, content: bytes) -> str:
    """That of the file's bytes, which a record may no longer hold."""
    return path.content if isinstance(path, Record) else hashlib.blake2b(content, digest_size=16).hexdigest()


def notes_on(samples: Sequence[Sample], findings: Sequence[Finding], num_classes: int) -> Iterator[str]:
    """Yield what is not read as it is stored: how many files, and one of them."""
    found: dict[str, list[File]] = {}
    for sample, finding in zip(samples, findings, strict=True):
        for how in finding.how:
            found.setdefault(f"images are read {how}", []).append(sample.image)
        for value in unnamed_values(finding.pixels, num_classes, sample.meanings):
            found.setdefault(f"masks hold the value {value}, which has no name and is void", []).append(
                sample.mask
            )
    for what, paths in sorted(found.items()):
        yield f"{len(paths):,} {what}: {paths[0]} for example"


def _as_is(rows: list) -> list:
    return rows


def scan(
    dataset_name: str,
    samples: Sequence[Sample],
    num_classes: int,
    workers: int | None = None,
    progress: bool = True,
    decode: bool = False,
    unnamed: str = "refuse",
    between: Callable[[], object] | None = None,
) -> list[Finding]:
    """Look at every image and mask; `decode` reads images to the last pixel,
    not just their first and last bytes.
    """
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(cores, MOST_WORKERS)
    if len(samples) < 8 * CHUNK:
        workers = 0  # done before the processes have started
    loader = DataLoader(
        _Scan(samples, num_classes, decode, unnamed),
        batch_size=CHUNK,
        num_workers=workers,
        collate_fn=_as_is,
        generator=torch.Generator(),  # or it would draw from the caller's
        worker_init_fn=outlive_signals,
    )
    findings: list[Finding] = []
    # disable=None: no bar where stderr is a file
    with tqdm(total=len(samples), desc=f"scanning {dataset_name}", disable=None if progress else True) as bar:
        for chunk in loader:
            if between is not None:
                between()
            findings += chunk
            bar.update(len(chunk))
    return findings
