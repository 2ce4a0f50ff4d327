"""A data set in one file, which `data.root` takes in place of a folder;
`python -m scripts.pack_data` writes it.

A header of fixed size says where the index is. Between them are the records, one after the other: the bytes
of each file, or its pixels. The index is JSON: the lists of the data set and, for every file, its record and
what the scan and the digests of a run would know of the file itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import DataError, Dataset, Sample
from data.files import replacing

MAGIC = b"AlterSGD pack"
VERSION = 1
_HEADER = struct.Struct("<16sIQQ16s")  # magic, version, start and length of the index, its digest
_AGAIN = "make it again with python -m scripts.pack_data"


@dataclass(frozen=True)
class Pack:
    """A file of records.

    Every process opens it for itself, once; forked ones may share it, as nothing moves a position.
    """

    path: Path
    digest: bytes  # of its index, which knows the content of all records

    def read(self, start: int, length: int) -> np.ndarray:
        # not a memory map: where a disk fails or a file shrinks, that ends the process without a message
        content = np.empty(length, np.uint8)
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [content[done:].data], start + done)
            if count == 0:
                raise DataError(f"{self.path}: ends before its last record; {_AGAIN}")
            done += count
        return content

    @cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        if not os.pread(descriptor, _HEADER.size, 0).endswith(self.digest):
            os.close(descriptor)
            raise DataError(f"{self.path}: was packed anew since this run began; start it again")
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "digest": self.digest}  # a process that is spawned opens the file itself

    def __del__(self) -> None:
        if "_descriptor" in self.__dict__:
            os.close(self._descriptor)


@dataclass(frozen=True)
class Record:
    """An image or a mask in a pack, where a data set in a folder has the path of a file.

    Here: the bytes of that file.
    """

    pack: Pack
    path: str  # of the file, below the folder that was packed
    file_size: int
    content: str  # a digest of the file
    start: int
    length: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.path} in {self.pack.path}"

    @property
    def parent(self) -> Path:
        """The folder of the file."""
        return Path(self.path).parent

    def read_bytes(self) -> bytes:
        """Return the record as it was written; a DataError if it is not."""
        content = self.pack.read(self.start, self.length).tobytes()
        if zlib.crc32(content) != self.checksum:
            raise DataError(f"{self}: is damaged; {_AGAIN}")
        return content


@dataclass(frozen=True)
class DecodedRecord(Record):
    """The pixels of the file."""

    shape: tuple[int, ...]  # H x W x 3, or H x W of a mask
    how: tuple[str, ...]  # in what the image was not read as it is stored

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.shape[1], self.shape[0]

    def pixels(self) -> np.ndarray:
        """Unchecked: the scan before a run reads and checks every record."""
        return self.pack.read(self.start, self.length).reshape(self.shape)


File = Path | Record  # of an image or a mask


def load_pack(path: Path, name: str, train_list: str = "auto") -> Dataset:
    """Return the data set of a pack; `name` and `train_list` are those of the config and have to fit."""
    pack, index = _open(path)
    if index["dataset"] != name:
        raise DataError(
            f"data.root={path} holds {index['dataset']}, not {name}; set data.dataset={index['dataset']} or "
            "name another file"
        )
    files = [_record(pack, entry) for entry in index["files"]]
    lists = {
        key: [Sample(line[0], files[line[1]], files[line[2]]) for line in lines]
        for key, lines in index["lists"].items()
    }
    used = index["train_list"] if train_list == "auto" else train_list
    if used not in lists:
        raise DataError(
            f"data.train_list={train_list}: {path} holds {' and '.join(sorted(lists))}; pack a folder that "
            f"has {used} too"
        )
    return Dataset(
        name,
        tuple(index["class_names"]),
        lists[used],
        lists["val"],
        used,
        {used: [], "val": []},
        index["notices"] if train_list == "auto" else [],
        frozenset(index["void_labels"]),
        tuple((r, g, b) for r, g, b in index.get("colours", ())),
    )


def _record(pack: Pack, entry: dict[str, Any]) -> Record:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return DecodedRecord(pack, **fields) if "shape" in fields else Record(pack, **fields)


def _open(path: Path) -> tuple[Pack, dict[str, Any]]:
    """Return the file and its index, checked."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if not header.startswith(MAGIC):
                raise DataError(
                    f"data.root={path} is not a folder, and no file of python -m scripts.pack_data: it "
                    "begins otherwise; name the folder that holds the data set, or the file that was packed "
                    "from it"
                )
            if len(header) < _HEADER.size:
                raise DataError(f"data.root={path} is cut off in its header; copy it once more, or {_AGAIN}")
            _, version, start, length, digest = _HEADER.unpack(header)
            if version != VERSION:
                raise DataError(
                    f"data.root={path} is packed in version {version}, but this code reads version "
                    f"{VERSION}; {_AGAIN}"
                )
            if start + length != size:
                raise DataError(
                    f"data.root={path} is cut off or has grown: it has {size:,} bytes where "
                    f"{start + length:,} were written; copy it once more, or {_AGAIN}"
                )
            file.seek(start)
            index = file.read(length)
    except OSError as error:
        raise DataError(f"data.root={path} cannot be read ({error}); {_AGAIN}") from error
    if _digest(index) != digest:
        raise DataError(f"data.root={path}: its index is damaged; copy it once more, or {_AGAIN}")
    return Pack(path, digest), json.loads(index)


def write_pack(
    path: Path,
    dataset: Dataset,
    lists: Mapping[str, Sequence[tuple[str, int, int]]],
    files: Iterable[tuple[dict[str, Any], bytes]],
) -> int:
    """All of the pack or nothing; returns its size. A line of a list is a name and
    the numbers of two of the files.

    Of each file come what its Record tells of it and the content of the record.
    """
    with replacing(path) as target:
        target.write(bytes(_HEADER.size))
        start, entries = _HEADER.size, []
        for facts, content in files:
            length = target.write(content)
            entries.append({**facts, "start": start, "length": length, "checksum": zlib.crc32(content)})
            start += length
        index = json.dumps(
            {
                "dataset": dataset.name,
                "class_names": dataset.class_names,
                "void_labels": sorted(dataset.void_labels),
                "colours": dataset.colours,
                "train_list": dataset.train_list,  # what "auto" finds, and what it has to say about that
                "notices": dataset.notices,
                "lists": lists,
                "files": entries,
            }
        ).encode()
        target.write(index)
        target.seek(0)
        target.write(_HEADER.pack(MAGIC, VERSION, start, len(index), _digest(index)))
    return start + len(index)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
