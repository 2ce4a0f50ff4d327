"""The colours in which masks are stored and shown: VOC's, or those of a data set of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from PIL import Image


@cache
def voc_palette() -> np.ndarray:
    """Return the colour of each label, (256, 3) bytes: its bits are dealt to red, green,
    blue from the top bit down.
    """
    labels = np.arange(256)
    palette = np.zeros((256, 3), np.uint8)
    for bit in range(8):
        palette[:, bit % 3] |= ((labels >> bit & 1) << (7 - bit // 3)).astype(np.uint8)
    palette.setflags(write=False)  # everybody gets the same one
    return palette


def palette_with(colours: Mapping[int, tuple[int, int, int]]) -> np.ndarray:
    """Return VOC's palette with other colours for some labels."""
    palette = voc_palette().copy()
    for label, colour in colours.items():
        palette[label] = colour
    return palette


def palette_image(labels: np.ndarray, palette: np.ndarray | None = None) -> Image.Image:
    """H x W bytes of labels as VOC stores them: the values are the labels,
    the palette gives their colours.
    """
    image = Image.fromarray(labels)
    image.putpalette((voc_palette() if palette is None else palette).tobytes())
    return image
