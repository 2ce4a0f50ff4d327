"""The one reader of images and the one reader of masks: training, evaluation,
prediction and checks see the same pixels.

An image is read as a viewer shows it: turned as its EXIF data say, on white where it is transparent, deep
greys scaled to bytes, the first frame of an animation. Only the formats that are asked for are tried,
whatever a file is called: left to itself, Pillow hands a file that begins like PostScript to Ghostscript. A
file may be a record of a packed data set (`File`); a decoded one holds what was read here when it was packed.
"""

from __future__ import annotations

import io
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from data.dataset import DataError
from data.packs import DecodedRecord, File, Record

FORMATS = ("JPEG", "PNG")  # of the images of a data set
MASK_FORMATS = ("PNG",)  # one that keeps every value

# what a search through folders takes for an image of one's own, and the formats of these; Pillow decodes them
# itself
ANY_SUFFIXES = frozenset(
    (
        *(".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm"),
        *(".png", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
    )
)
ANY_FORMATS = (
    *FORMATS,
    "AVIF",
    "BMP",
    "GIF",
    "JPEG2000",
    "PPM",
    "TIFF",
    "WEBP",
    "TGA",
)  # TGA fits nearly all: last

_ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # how a whole file of each format ends
# what a PNG file that may be turned holds somewhere, even after its pixels
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")

# how some images are read
TURNED = "turned as their EXIF data say"
ON_WHITE = "on white, having an alpha channel"
SCALED = "with greys of 16 bits scaled to 8"


class Look(NamedTuple):
    """What the first and last bytes of an image's file tell."""

    size: tuple[int, int]  # width and height as the image is shown
    how: tuple[str, ...]  # in what it is not read as it is stored: TURNED, ON_WHITE, SCALED


def read_bytes(path: File) -> bytes:
    """Return the content of a file, or of its record in a pack; the errors are those of the readers."""
    with _as_data_errors(path):
        if isinstance(path, Path):
            _refuse_pipes(path)
        return path.read_bytes()


def read_pixels(record: DecodedRecord) -> np.ndarray:
    """Return what was decoded when the data set was packed."""
    with _as_data_errors(record):
        return record.pixels()


def read_image(path: File) -> np.ndarray:
    """Return the image of a data set as H x W x 3 bytes."""
    if isinstance(path, DecodedRecord):
        return read_pixels(path)
    return np.array(open_image(path)[0])


def open_image(path: File, formats: Sequence[str] = FORMATS) -> tuple[Image.Image, int]:
    """Return the image in RGB, and the number of frames in its file, of which it is the first."""
    if isinstance(path, DecodedRecord):
        return Image.fromarray(read_pixels(path)), 1
    with _opened(path, formats) as image:
        frames = getattr(image, "n_frames", 1)
        image.load()
        return _as_rgb(_upright(image)), frames


def _upright(image: Image.Image) -> Image.Image:
    return image if _orientation(image) == 1 else ImageOps.exif_transpose(image)


def _orientation(image: Image.Image) -> int:
    """1 is upright, above 4 width and height change places."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data say nothing
        return 1
    return value if value in range(1, 9) else 1


def _as_rgb(image: Image.Image) -> Image.Image:
    if _is_deep(image):
        image = Image.fromarray(_bytes(np.asarray(image)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _is_deep(image: Image.Image) -> bool:
    return image.mode.startswith(("I", "F"))


def _bytes(values: np.ndarray) -> np.ndarray:
    """Integers are taken for 16 bits if they can be; all else is stretched from
    the least to the greatest value.
    """
    whole = values.dtype.kind in "iu"
    values = np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0)
    low, high = values.min(), values.max()
    if whole and low >= 0 and high <= 65535:
        low, high = 0, 65535
    return ((values - low) * (255 / ((high - low) or 1))).round().astype(np.uint8)


def open_mask(path: File, content: bytes | None = None) -> Image.Image:
    """Return the decoded mask of a file, whose bytes may be given; its own bytes are class numbers."""
    if isinstance(path, DecodedRecord):
        return Image.fromarray(read_pixels(path))
    with _opened(path, MASK_FORMATS, content) as image:
        if image.tile and image.tile[0][3] in ("L;2", "L;4"):
            raise DataError(
                f"{path}: holds 2 or 4 bits of grey, which are shades and no class numbers; save it with 8 "
                "bits"
            )
        image.load()
        mask = _upright(image)
        if mask.mode in ("L", "P"):
            return mask
        values = np.asarray(mask)
        if values.ndim == 3:
            raise DataError(
                f"{path}: a colour mask ({image.mode}) where class numbers are wanted; "
                f"convert its folder: python -m scripts.convert_masks {shlex.quote(str(path.parent))}"
            )
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"{path}: holds the label {values.max()}; labels go up to 254, and 255 is void")
        return Image.fromarray(values.astype(np.uint8))


def read_mask(path: File) -> np.ndarray:
    """Return the mask as H x W bytes of class numbers."""
    if isinstance(path, DecodedRecord):
        return read_pixels(path)
    return np.asarray(open_mask(path))


def open_colour_mask(path: File) -> Image.Image:
    """Return the decoded mask as it is stored, in RGB if it has colours of its own."""
    with _opened(path, MASK_FORMATS) as image:
        image.load()
        if _is_deep(image):
            return open_mask(path)
        if image.mode not in ("RGB", "RGBA", "LA"):
            return _upright(image)
        if image.mode != "RGB" and (np.asarray(image.getchannel("A")) < 255).any():
            raise DataError(
                f"{path}: is transparent in places, which have no colour; save it without an alpha channel"
            )
        return _upright(image).convert("RGB")


def image_size(path: File) -> tuple[int, int]:
    """Return width and height as the image is shown, without decoding it."""
    if isinstance(path, DecodedRecord):
        return path.size
    with _opened(path, FORMATS) as image:
        return _shown_size(image, _stored_orientation(image, path))


def check_image(path: File, content: bytes) -> Look:
    """Return a look at the file, whose bytes are given; one that does not end as its format
    does is decoded, to be sure.
    """
    if isinstance(path, DecodedRecord):
        return Look(path.size, path.how)
    with _opened(path, FORMATS, content) as image:
        orientation = _stored_orientation(image, path, content)
        facts = {TURNED: orientation > 1, ON_WHITE: image.has_transparency_data, SCALED: _is_deep(image)}
        size, ending = _shown_size(image, orientation), _ENDINGS.get(image.format or "", b"")
    if not ending or not content.endswith(ending):
        read_image(path)
    return Look(size, tuple(text for text, holds in facts.items() if holds))


def _stored_orientation(image: Image.Image, path: File, content: bytes | None = None) -> int:
    """Return the orientation of an image that is not decoded,
    which Pillow would do to look behind the pixels of a PNG file.
    """
    if image.format == "PNG" and "exif" not in image.info:
        content = read_bytes(path) if content is None else content
        if not any(mark in content for mark in _PNG_ORIENTATION):
            return 1
    return _orientation(image)


def _shown_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    return (image.height, image.width) if orientation > 4 else image.size


@contextmanager
def _opened(
    path: File, formats: Sequence[str], content: bytes | None = None
) -> Iterator[ImageFile.ImageFile]:
    """The image of a file, or of its content where that is at hand; whatever fails inside is a DataError."""
    with _as_data_errors(path):
        source: Path | io.BytesIO
        if content is not None or isinstance(path, Record):
            source = io.BytesIO(path.read_bytes() if content is None else content)
        else:
            _refuse_pipes(path)
            source = path
        try:
            image = Image.open(source, formats=_at_hand(tuple(formats)))
        except UnidentifiedImageError as error:
            raise DataError(
                f"{path}: cannot be read: its first bytes are not those of {' or '.join(formats)}; "
                "fetch the file again, or save it in such a format"
            ) from error
        with image:
            yield image


@cache
def _at_hand(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the formats that this build of Pillow knows."""
    Image.preinit()
    if not Image.OPEN.keys() >= set(formats):
        Image.init()
    return tuple(name for name in formats if name in Image.OPEN)


@contextmanager
def _as_data_errors(path: File) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: the file is missing; put it back or remove it from its list") from error
    except Exception as error:  # decoders fail in many ways on damaged files
        raise DataError(f"{path}: cannot be read ({error}); fetch or make the file again") from error


def _refuse_pipes(path: Path) -> None:
    """Opening a pipe would wait for ever, and a device may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise DataError(f"{path}: cannot be read: it is {what}, not a file; put the file there")
