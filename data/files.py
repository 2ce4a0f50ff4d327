"""Writing files whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when all is written, or leaves no trace."""
    temporary = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}.tmp"
    )  # not mkstemp, which ignores the umask
    try:
        with open(temporary, "xb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """All of the file or nothing, whatever happens meanwhile; cheaply without `sync`,
    when a power cut may lose it.
    """
    with replacing(path, sync=sync) as file:
        file.write(content)
