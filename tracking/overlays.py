"""What a network sees in an image, drawn: its classes over the image, a strip over the steps,
and a legend.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.protocols import BACKGROUND
from tracking.text import drawn

# How much light and shade of the image an overlay shows. VOC's colours are 64 apart: up to 1/4, each
# pixel stays nearest to the colour of its own class.
SHADING = 0.24
PANEL = 240  # longer side of an image in the strip of steps
LEAST_OVERLAY = 320  # longer side of an overlay: smaller images are enlarged


class Panel(NamedTuple):
    """What is seen after one step, small."""

    title: tuple[str, str]
    mask: Image.Image


def shares(labels: np.ndarray) -> dict[int, float]:
    """Return class id -> its share of the pixels, the largest first."""
    counts = np.bincount(labels.ravel(), minlength=256) / labels.size
    return {int(c): float(counts[c]) for c in np.argsort(-counts, kind="stable") if counts[c]}


def percentage(share: float) -> str:
    """Return a share in whole percent."""
    return f"{share:.0%}" if share >= 0.01 else "< 1%"


def overlay(
    image: Image.Image, mask: Image.Image, names: Mapping[int, str], size: tuple[int, int]
) -> Image.Image:
    """Return the mask's colours over the grey image at a size, enlarged if small;
    beside them the classes and their shares.
    """
    entries = [
        (c, f"{drawn(names[c])}  {percentage(share)}") for c, share in shares(np.asarray(mask)).items()
    ]
    factor = math.ceil(LEAST_OVERLAY / max(size))
    size = size[0] * factor, size[1] * factor
    tinted = tint(resized(image, size), mask.resize(size, Image.Resampling.NEAREST))
    return side_by_side(
        [
            tinted,
            legend(entries, colours_in(mask), tinted.height, max(14, min(max(size) // 48, min(size) // 8))),
        ]
    )


def strip(image: Image.Image, panels: Sequence[Panel], names: Mapping[int, str]) -> Image.Image:
    """Return the image and what is seen in it after each step, with titles;
    beside them every class that ever occurs.
    """
    small = resized(image, panel_size(image))
    cells = [titled(("image", ""), small)]
    cells += [titled(panel.title, tint(small, panel.mask)) for panel in panels]
    entries = [(c, drawn(names[c])) for c in shares(np.stack([np.asarray(panel.mask) for panel in panels]))]
    colours = colours_in(panels[-1].mask)
    return side_by_side([*cells, legend(entries, colours, cells[0].height, text_size=14)])


def colours_in(mask: Image.Image) -> np.ndarray:
    """Return the colours of a mask's palette, (256, 3) bytes."""
    return np.array(mask.getpalette("RGB"), np.uint8).reshape(-1, 3)


def tint(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Return the image in the colours of its classes, with white lines between them.

    The rest is grey: no colour but a class's.
    """
    labels, grey = np.asarray(mask), np.asarray(image.convert("L"), np.float32)[..., None]
    shaded = (colours_in(mask)[labels] + SHADING * (grey - 128)).clip(0, 255)
    tinted = np.where(labels[..., None] == BACKGROUND, grey, shaded).astype(np.uint8)
    tinted[:, 1:][labels[:, 1:] != labels[:, :-1]] = 255
    tinted[1:][labels[1:] != labels[:-1]] = 255
    return Image.fromarray(tinted)


def panel_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an image in the strip of steps."""
    width, height = (max(1, round(side * PANEL / max(image.size))) for side in image.size)
    return width, height


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return the image at a size; masks and what is enlarged keep their hard edges."""
    smooth = image.mode == "RGB" and size[0] * size[1] < image.width * image.height
    return image.resize(size, Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST)


def legend(
    entries: Sequence[tuple[int, str]], colours: np.ndarray, height: int, text_size: int
) -> Image.Image:
    """Return a coloured square and a text for each class, in as many columns as
    it takes to stay near the height.
    """
    row, writing = 3 * text_size // 2, font(text_size)
    rows = max(6, height // row)
    columns = [entries[i : i + rows] for i in range(0, len(entries), rows)]
    widths = [2 * row + math.ceil(max(writing.getlength(text) for _, text in column)) for column in columns]
    image = Image.new("RGB", (sum(widths), row * min(rows, len(entries))), "white")
    draw = ImageDraw.Draw(image)
    for number, column in enumerate(columns):
        left = sum(widths[:number]) + row // 2
        for line, (class_id, text) in enumerate(column):
            top, side = line * row + (row - text_size) // 2, text_size
            colour = "silver" if class_id == BACKGROUND else tuple(map(int, colours[class_id]))
            draw.rectangle((left, top, left + side, top + side), fill=colour, outline="grey")
            draw.text((left + row, top + side / 2), text, "black", writing, anchor="lm")
    return image


def titled(lines: tuple[str, str], image: Image.Image) -> Image.Image:
    """Two lines above the image, cut where they do not fit."""
    size = 14
    canvas = Image.new("RGB", (max(image.width, PANEL // 2), image.height + 3 * size), "white")
    draw = ImageDraw.Draw(canvas)
    for number, line in enumerate(lines):
        draw.text(
            (0, size * (0.7 + 1.3 * number)),
            shortened(drawn(line), canvas.width, size),
            "black",
            font(size),
            anchor="lm",
        )
    canvas.paste(image, (0, 3 * size))
    return canvas


def shortened(text: str, width: int, size: int) -> str:
    """Return as much of the text as fits into so many pixels."""
    if font(size).getlength(text) <= width:
        return text
    while text and font(size).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def side_by_side(images: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    """Return all images in one row, on white."""
    width = sum(image.width for image in images) + gap * (len(images) + 1)
    canvas = Image.new("RGB", (width, max(image.height for image in images) + 2 * gap), "white")
    left = gap
    for image in images:
        canvas.paste(image, (left, gap))
        left += image.width + gap
    return canvas


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font of matplotlib, which has more letters than Pillow's own."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
