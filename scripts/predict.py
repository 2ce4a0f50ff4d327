"""What a trained network sees in images of your own, after the last step, after any step,
or after each of them.

    python -m scripts.predict runs/mib holiday.jpg photos --out seen    # <name>_mask.png, <name>_overlay.png
    python -m scripts.predict runs/mib photos --out seen --all-steps    # and <name>_steps.png
    python -m scripts.predict runs/mib/step_0.pt photos --out seen --size 512 --flip --probabilities

Folders are searched for images, and what is in them too; a file that is named is tried whatever its name.
Images are taken as a viewer shows them: turned as EXIF says, transparency on white, the first frame of an
animation. What cannot be read is named and left out. Files of an earlier call are replaced, images that are
given never are.

Exit codes: 0 all done, 1 some were skipped, 2 bad arguments, run or checkpoint, or the results cannot be
written.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm

from data import DataError
from data.images import ANY_FORMATS, open_image
from data.palette import palette_image
from data.protocols import BACKGROUND
from engine.checkpoint import CheckpointError
from engine.prediction import (
    ENDINGS,
    MEGAPIXELS,
    Network,
    Sight,
    choose_device,
    find_checkpoints,
    find_images,
    output_names,
    refuse_to_replace,
    with_ending,
    write_png,
    write_results,
)
from engine.run_folder import RunError
from engine.terminal import exit_with
from tracking.overlays import Panel, panel_size, percentage, resized, shares, strip
from tracking.text import printable

NAMED = 5  # classes that a line of output names


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        device = choose_device(options.device)
        checkpoints = find_checkpoints(options.run, options.step, options.all_steps)
        images, problems = find_images(options.pictures, options.out)
        names = output_names(images)
        refuse_to_replace(images, names, options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        for path, why in problems.items():
            say_skipped(path, why)
        num_skipped = len(problems) + predict_all(checkpoints, names, device, options)
    except (RunError, DataError, CheckpointError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    if num_skipped:
        print(f"{num_skipped} skipped, {len(images) + len(problems) - num_skipped} done", file=sys.stderr)
    return 1 if num_skipped else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="a run's folder (its last step is taken), one step_<i>.pt, or an export")
    add("pictures", nargs="+", type=Path, help="images, and folders with images somewhere below them")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the network after this step, counted from 0")
    which.add_argument("--all-steps", action="store_true", help="also a strip: what is seen after every step")
    add("--probabilities", action="store_true", help="also the probability of every class at every pixel")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--size", type=int, metavar="N", help="shorter side shown to the network (default: as it is)")
    add("--flip", action="store_true", help="average with the flipped image")
    add(
        "--megapixels",
        type=float,
        default=MEGAPIXELS,
        metavar="M",
        help="larger images are shown to the network reduced to this (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    if options.size is not None and options.size < 1:
        parser.error("--size: the shorter side has at least one pixel")
    if not 0 < options.megapixels < math.inf:
        parser.error("--megapixels: a positive number is wanted")
    return options


def predict_all(
    checkpoints: Sequence[Path], names: Mapping[Path, str], device: torch.device, options: argparse.Namespace
) -> int:
    """Show every image to the network of every checkpoint, one network at a time.

    Returns how many were skipped.
    """
    strips: dict[Path, list[Panel]] = {path: [] for path in names}
    shown = {"size": options.size, "megapixels": options.megapixels, "flip": options.flip}
    for file in checkpoints:
        network, is_last = Network(file, device, **shown), file == checkpoints[-1]
        # disable=None: no bar where stderr is a file
        for path in tqdm(list(strips), f"step {network.step}", unit="image", disable=None):
            try:
                image, num_frames = open_image(path, ANY_FORMATS)
                sight = network.look(image, with_probabilities=options.probabilities and is_last)
            except (DataError, torch.OutOfMemoryError) as error:
                say_skipped(path, str(error).removeprefix(f"{path}: "))
                del strips[path]
                continue
            if options.all_steps:
                mask = resized(palette_image(sight.labels, network.palette), panel_size(image))
                strips[path].append(Panel(network.title, mask))
            if is_last:
                place = options.out / names[path]
                write_results(place, image, sight, network)
                if options.all_steps:
                    write_png(with_ending(place, "_steps.png"), strip(image, strips[path], network.names))
                tqdm.write(printable(report(path, place, image, sight, num_frames, network.names)))
    return len(names) - len(strips)


# ----------------------------------------------------------------------------------------- what is said of it


def report(
    path: Path, place: Path, image: Image.Image, sight: Sight, num_frames: int, names: Mapping[int, str]
) -> str:
    """Return the line about an image that was done."""
    seen = [f"{names[c]} {percentage(share)}" for c, share in shares(sight.labels).items() if c != BACKGROUND]
    more = [f"{len(seen) - NAMED} more"] if len(seen) > NAMED else []
    notes = ["{} x {}".format(*image.size)]
    height, width = sight.labels.shape
    if (width, height) != image.size:
        notes.append(f"shown to the network at {width} x {height}")
    if num_frames > 1:
        notes.append(f"the first of {num_frames} frames")
    what = ", ".join(seen[:NAMED] + more) or "background alone"
    return f"{path} -> {with_ending(place, ENDINGS[0])}: {what} ({', '.join(notes)})"


def say_skipped(path: Path, why: str) -> None:
    tqdm.write(printable(f"skipped {path}: {why}"), file=sys.stderr)


if __name__ == "__main__":
    exit_with(main)
