"""Reading pictures and masks, writing files whole."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from data.dataset import DataError

# what a search through folders takes for a picture
PICTURE_SUFFIXES = frozenset(
    (
        ".avif",
        ".bmp",
        ".gif",
        ".jp2",
        ".jpeg",
        ".jpg",
        ".pbm",
        ".pgm",
        ".png",
        ".ppm",
        ".tga",
        ".tif",
        ".tiff",
        ".webp",
    )
)

# how a whole file of each format ends
_ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: the file is missing; put it back or remove it from its list") from error
    except Exception as error:  # decoders fail in many ways on damaged files
        raise DataError(f"{path}: cannot be read ({error}); fetch or make the file again") from error


def read_image(path: Path) -> np.ndarray:
    """The picture as H x W x 3 bytes."""
    with _reading(path), Image.open(path) as image:
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def open_picture(path: Path) -> tuple[Image.Image, int]:
    """Any picture in RGB as a viewer shows it, and the number of frames in its file, of which it is the first.

    It is turned as its EXIF data say, lies on white where it is transparent, and deep greys become bytes.
    """
    with _reading(path), Image.open(path) as image:
        frames = getattr(image, "n_frames", 1)
        image.load()
        return _as_rgb(ImageOps.exif_transpose(image)), frames


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_bytes(np.asarray(image)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _bytes(values: np.ndarray) -> np.ndarray:
    """Integers are taken for 16 bits if they can be; all else is stretched from the least to the greatest value."""
    whole = values.dtype.kind in "iu"
    values = np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0)
    low, high = values.min(), values.max()
    if whole and low >= 0 and high <= 65535:
        low, high = 0, 65535
    return ((values - low) * (255 / ((high - low) or 1))).round().astype(np.uint8)


def open_mask(path: Path) -> Image.Image:
    """The decoded mask; its bytes are class numbers."""
    with _reading(path), Image.open(path) as image:
        image.load()
        if image.mode in ("L", "P"):
            return image
        values = np.asarray(image)
        if values.ndim == 3:
            raise DataError(
                f"{path}: a colour mask ({image.mode}) where class numbers are wanted; "
                f"convert its folder: python -m scripts.convert_masks {shlex.quote(str(path.parent))}"
            )
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"{path}: holds the label {values.max()}; labels go up to 254, and 255 is void")
        return Image.fromarray(values.astype(np.uint8))


def read_mask(path: Path) -> np.ndarray:
    """The mask as H x W bytes of class numbers."""
    return np.asarray(open_mask(path))


def image_size(path: Path) -> tuple[int, int]:
    """Width and height from the header alone."""
    with _reading(path), Image.open(path) as image:
        return image.size


def check_image(path: Path) -> tuple[int, int]:
    """Width and height; a file whose last bytes are not its format's ending is decoded, to be sure."""
    with _reading(path), path.open("rb") as file:
        image = Image.open(file)
        size = image.size
        ending = _ENDINGS.get(image.format or "", b"")
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(ending)))
        if not ending or file.read() != ending:
            read_image(path)
        return size


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
