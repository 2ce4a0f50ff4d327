"""Colour masks -> masks of class numbers, which training reads.

    python -m scripts.convert_masks VOC2012/SegmentationClass    # writes VOC2012/SegmentationClass-labels
    python -m scripts.convert_masks masks --colours colours.txt --in-place

Colours are VOC's unless a file gives others: one `red green blue` per line, class 0 first. A line may name
its label itself, `255: 224 224 192` for example, which is how void is given. With a file every mask is
converted by its colours, grey ones and those with a palette, too: `1: 0 0 0` makes class 1 of the grey 0.
Without one these hold class numbers already.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from data.dataset import DataError, read_lines
from data.files import write_atomically
from data.images import open_colour_mask, open_mask
from data.palette import voc_palette


def read_colours(path: Path) -> dict[int, tuple[int, int, int]]:
    """Label -> colour from a file of `red green blue` lines; `label: red green
    blue` names its label itself.
    """
    colours: dict[int, tuple[int, int, int]] = {}
    for number, line in enumerate(read_lines(path)):
        label, _, values = line.rpartition(":")
        try:
            red, green, blue = (int(value) for value in values.split())
            key = int(label) if label else number
        except ValueError:
            raise DataError(f"{path}, line {number + 1}: write `red green blue`, not {line!r}") from None
        if not all(0 <= value <= 255 for value in (key, red, green, blue)):
            raise DataError(f"{path}, line {number + 1}: numbers go from 0 to 255, not as in {line!r}")
        if key in colours or (red, green, blue) in colours.values():
            raise DataError(
                f"{path}, line {number + 1}: the label or the colour stands there twice: {line!r}"
            )
        colours[key] = (red, green, blue)
    return colours


def convert(mask: Image.Image, colours: dict[int, tuple[int, int, int]], source: Path) -> Image.Image:
    """Return the mask with palette and class numbers. DataError for a colour that is no class."""
    red, green, blue = (
        channel.astype(np.int32) for channel in np.moveaxis(np.asarray(mask.convert("RGB")), -1, 0)
    )
    codes = red << 16 | green << 8 | blue
    labels = np.array(sorted(colours), np.uint8)
    known = np.array([(r << 16) + (g << 8) + b for r, g, b in (colours[int(label)] for label in labels)])
    order = np.argsort(known)
    found = order[np.searchsorted(known, codes, sorter=order).clip(max=len(known) - 1)]
    strange = codes[known[found] != codes]
    if strange.size:
        code = int(strange[0])
        hint = "" if mask.mode == "RGB" else ", or leave that out if the masks hold class numbers already"
        raise DataError(
            f"{source}: {strange.size:,} pixels have colours of no class, such as "
            f"({code >> 16}, {code >> 8 & 255}, {code & 255}); give the right ones with --colours{hint}"
        )
    converted = Image.fromarray(labels[found])
    converted.putpalette([value for label in range(256) for value in colours.get(label, (0, 0, 0))])
    return converted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.convert_masks",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of colour masks (PNG)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--output", type=Path, help="folder to write (default: <folder>-labels)")
    place.add_argument("--in-place", action="store_true", help="replace the colour masks")
    parser.add_argument(
        "--colours", type=Path, help="text file of colours, one class per line (default: VOC's)"
    )
    options = parser.parse_args(arguments)
    try:
        print(run(options.folder, options.output, options.in_place, options.colours))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(folder: Path, output: Path | None, in_place: bool, colours_file: Path | None) -> str:
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() == ".png")
    if not paths:
        raise DataError(f"{folder}: holds no PNG files; give the folder of the masks")
    if colours_file:
        colours = read_colours(colours_file)
    else:
        colours = {label: (int(r), int(g), int(b)) for label, (r, g, b) in enumerate(voc_palette())}
    target = folder if in_place else output or folder.with_name(f"{folder.name}-labels")
    if target.resolve() == folder.resolve() and not in_place:
        raise DataError(f"{target}: is the folder of the colour masks itself; say --in-place to replace them")
    target.mkdir(parents=True, exist_ok=True)

    converted = 0
    for path in tqdm(paths, desc="converting", disable=None):
        mask = open_colour_mask(path)
        if mask.mode != "RGB" and not colours_file:  # already class numbers
            if in_place:
                continue
            result = open_mask(path)
        else:
            result = convert(mask, colours, path)
            converted += 1
        destination = target / path.name
        if destination.exists() and not in_place:
            raise DataError(f"{destination}: is there already; delete the folder or choose another --output")
        content = io.BytesIO()
        result.save(content, "PNG", optimize=True)
        write_atomically(destination, content.getvalue())
    same = len(paths) - converted
    if not converted:
        return (
            f"{target}: nothing was converted: all {same:,} masks hold class numbers already (they are grey "
            "or have a palette). If these are shades or colours after all, say with --colours which classes "
            "they mean"
        )
    return f"{target}: {converted:,} masks converted, {same:,} held class numbers already"


if __name__ == "__main__":
    sys.exit(main())
