"""Writing files whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """All of the file or nothing, whatever happens meanwhile; cheaply without `sync`, when a power cut may lose it."""
    temporary = path.with_name(
        f".{path.name}.{secrets.token_hex(4)}.tmp"
    )  # not mkstemp, which ignores the umask
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
