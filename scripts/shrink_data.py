"""VOC -> the small VOC of the CPU recipe, which two cores can train on:
every image with its shorter side at 192 pixels.

    python -m scripts.shrink_data /data/VOC2012 /data/VOC2012_192 --side 192

Images are resized by the bicubic filter and kept as JPEG of quality 88, masks by the nearest pixel. Every
list that is there is taken along: train_aug, train and val.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from data import DataError, Sample, find_dataset, find_lists
from data.dataset import raise_problems
from data.images import open_image, open_mask
from data.voc import AUGMENTED, LIST_FOLDERS, MASK_FOLDERS
from engine.terminal import command, exit_with

QUALITY = 88


@command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.shrink_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", type=Path, help="folder of VOC, as in data.root")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--side", type=int, default=192, help="shorter side in pixels (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.side < 1:
        parser.error(f"--side: {options.side} is less than 1")
    print(shrink(options.root.expanduser(), options.out.expanduser(), options.side))
    return 0


def shrink(root: Path, out: Path, side: int) -> str:
    """Write the folder, which appears whole; returns what to tell the user."""
    if out.exists():
        raise DataError(f"{out}: is there already; delete it or name another folder")
    dataset = find_dataset("voc", root)
    lists = find_lists(dataset, root)
    raise_problems("the lists of voc cannot be used", [line for _, group in lists.values() for line in group])
    samples = {sample.name: sample for group, _ in lists.values() for sample in group}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            masks = AUGMENTED if "train_aug" in lists else MASK_FOLDERS[-1]
            for inner in ("JPEGImages", masks, LIST_FOLDERS[0]):
                (folder / inner).mkdir(parents=True)
            for name, (group, _) in lists.items():
                (folder / LIST_FOLDERS[0] / f"{name}.txt").write_text("".join(f"{p.name}\n" for p in group))
            write = partial(write_small, images=folder / "JPEGImages", masks=folder / masks, side=side)
            with ThreadPoolExecutor(
                os.cpu_count()
            ) as threads:  # Pillow decodes, resizes and encodes beside Python
                written = threads.map(write, samples.values())
                problems = list(tqdm(written, desc="shrinking", total=len(samples), disable=None))
            raise_problems("files of voc cannot be used", [problem for problem in problems if problem])
            os.chmod(folder, 0o755)  # mkdtemp makes folders for the owner alone
            os.replace(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error}); make room or name another place") from error
    shown = ", ".join(f"{name} {len(group):,}" for name, (group, _) in lists.items())
    return f"{out}: {shown}; {len(samples):,} images with a shorter side of {side} pixels"


def write_small(sample: Sample, images: Path, masks: Path, side: int) -> str:
    """Both files of an image in their small size; returns why that is not possible, or nothing."""
    try:
        image, mask = open_image(sample.image)[0], open_mask(sample.mask)
    except DataError as error:
        return str(error)
    if image.size != mask.size:
        return f"{sample.mask}: is of another size than {sample.image}; make both the same size"
    size = small_size(image.size, side)
    for folder in (images, masks):
        (folder / sample.name).parent.mkdir(parents=True, exist_ok=True)  # a name may hold folders
    image.resize(size, Image.Resampling.BICUBIC).save(
        images / f"{sample.name}.jpg", quality=QUALITY, optimize=True
    )
    mask.resize(size, Image.Resampling.NEAREST).save(masks / f"{sample.name}.png", optimize=True)
    return ""


def small_size(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return width and height in the same proportion, the shorter one being `side`."""
    width, height = (round(length * side / min(size)) for length in size)
    return width, height


if __name__ == "__main__":
    exit_with(main)
