"""What a trained network sees in pictures of your own, after the last step, after any step, or after each of them.

    python -m scripts.predict runs/mib holiday.jpg photos --out seen         # <name>_mask.png, <name>_overlay.png
    python -m scripts.predict runs/mib photos --out seen --all-steps         # and <name>_steps.png: watch it forget
    python -m scripts.predict runs/mib/step_0.pt photos --out seen --size 512 --flip --probabilities

Folders are searched for pictures, and what is in them too; a file that is named is tried whatever its name. Pictures are
taken as a viewer shows them: turned as EXIF says, transparency on white, the first frame of an animation. What cannot be
read is named and left out. Files of an earlier call are replaced, pictures that are given never are.

Exit codes: 0 all done, 1 some were skipped, 2 bad arguments, run or checkpoint, or the results cannot be written.
"""

import argparse
import io
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from data import DataError
from data.files import PICTURE_SUFFIXES, open_picture, write_atomically
from data.palette import palette_image, voc_palette
from data.protocols import BACKGROUND
from data.transforms import normalise
from engine import checkpoint
from engine.inference import predict
from engine.run_folder import RunError
from engine.terminal import exit_with

LONGEST_NAME = (
    200  # bytes: with an ending, and while it is written, a name must stay below the 255 of most file systems
)
ENDINGS = ("_mask.png", "_overlay.png", "_steps.png", "_probabilities.npz")
MEGAPIXELS = 2.0  # shown to the network at once; with 150 classes their scores take 1.2 GB
# How much light and shade of the picture an overlay shows. The palette's colours are 64 apart: up to 1/4, each pixel stays
# nearest to the colour of its own class.
SHADING = 0.24
NAMED = 5  # classes that a line of output names
PANEL = 240  # longer side of a picture in the strip of steps
LEAST_OVERLAY = 320  # longer side of an overlay: smaller pictures are enlarged


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        device = choose_device(options.device)
        checkpoints = find_checkpoints(options.run, options.step, options.all_steps)
        pictures, problems = find_pictures(options.pictures, options.out)
        names = output_names(pictures)
        refuse_to_replace(pictures, names, options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        for path, why in problems.items():
            say_skipped(path, why)
        num_skipped = len(problems) + predict_all(checkpoints, names, device, options)
    except (RunError, DataError, checkpoint.CheckpointError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    if num_skipped:
        print(f"{num_skipped} skipped, {len(pictures) + len(problems) - num_skipped} done", file=sys.stderr)
    return 1 if num_skipped else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, help="a run's folder (its last step is taken), or one step_<i>.pt")
    add("pictures", nargs="+", type=Path, help="pictures, and folders with pictures somewhere below them")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the results go")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the network after this step, counted from 0")
    which.add_argument("--all-steps", action="store_true", help="also a strip: what is seen after every step")
    add("--probabilities", action="store_true", help="also the probability of every class at every pixel")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--size", type=int, metavar="N", help="shorter side shown to the network (default: as it is)")
    add("--flip", action="store_true", help="average with the flipped picture")
    add(
        "--megapixels",
        type=float,
        default=MEGAPIXELS,
        metavar="M",
        help="larger pictures are shown to the network reduced to this (default: %(default)g)",
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
    """Show every picture to the network of every checkpoint, one network at a time. Returns how many were skipped."""
    strips: dict[Path, list[Panel]] = {picture: [] for picture in names}
    for file in checkpoints:
        network, is_last = Network(file, device, options), file == checkpoints[-1]
        # disable=None: no bar where stderr is a file
        for path in tqdm(list(strips), f"step {network.step}", unit="picture", disable=None):
            try:
                picture, num_frames = open_picture(path)
                sight = network.look(picture, with_probabilities=options.probabilities and is_last)
            except (DataError, torch.OutOfMemoryError) as error:
                say_skipped(path, str(error).removeprefix(f"{path}: "))
                del strips[path]
                continue
            if options.all_steps:
                mask = resized(palette_image(sight.labels), panel_size(picture))
                strips[path].append(Panel(network.title, mask))
            if is_last:
                place = options.out / names[path]
                write_results(place, picture, sight, network, options)
                if options.all_steps:
                    write_png(with_ending(place, "_steps.png"), strip(picture, strips[path], network.names))
                tqdm.write(printable(report(path, place, picture, sight, num_frames, network.names)))
    return len(names) - len(strips)


# ------------------------------------------------------------------------------------------------------------ the network


class Sight(NamedTuple):
    """What a network sees in a picture, at the size the network was shown."""

    labels: np.ndarray  # H x W class ids of the data set
    probabilities: np.ndarray | None  # C x H x W


class Network:
    """The model of a step checkpoint, and how it is shown pictures."""

    def __init__(self, path: Path, device: torch.device, options: argparse.Namespace):
        model, state = checkpoint.load_segmenter(path, device)
        self.model, self.device, self.options = model.eval(), device, options
        self.step: int = state["step"]
        self.class_ids = np.array(state["class_ids"], np.uint8)
        self.names = dict(zip(state["class_ids"], state["classes"], strict=True))
        self.new = state["classes"][-state["network"]["classifiers"][-1] :]

    @property
    def title(self) -> tuple[str, str]:
        if self.step == 0:
            return "step 0", f"{len(self.new) - 1} classes"  # the background is not counted
        return f"step {self.step}", f"+ {self.new[0]}" if len(self.new) == 1 else f"+ {len(self.new)} classes"

    def look(self, picture: Image.Image, with_probabilities: bool = False) -> Sight:
        shown = picture.resize(
            shown_size(picture.size, self.options.size, self.options.megapixels), Image.Resampling.BILINEAR
        )
        batch = torch.from_numpy(np.array(shown)).permute(2, 0, 1)[None].to(self.device)
        scores = predict(self.model, normalise(batch), flip=self.options.flip)[0]
        labels = self.class_ids[scores.argmax(dim=0).cpu().numpy()]
        probabilities = None
        if with_probabilities:  # with a flip the scores are probabilities already
            probabilities = (scores if self.options.flip else scores.softmax(dim=0)).half().cpu().numpy()
        return Sight(labels, probabilities)


def shown_size(size: tuple[int, int], shorter: int | None, megapixels: float) -> tuple[int, int]:
    """Width and height for the network: the shorter side as asked for, if any, and never too many pixels."""
    limit = max(1, round(megapixels * 1e6))
    scale = min(shorter / min(size) if shorter else 1.0, math.sqrt(limit / math.prod(size)))
    width, height = (min(limit, max(1, round(side * scale))) for side in size)
    return width, height


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch sees no GPU; check the driver and the torch build, or use cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def find_checkpoints(run: Path, step: int | None, all_steps: bool) -> list[Path]:
    if run.is_file():
        if step is not None or all_steps:
            raise RunError(f"{run} is one step: with --step and --all-steps name the run's folder")
        return [run]
    numbers = {path: path.stem.removeprefix("step_") for path in run.glob("step_*.pt")}
    saved = {int(number): path for path, number in numbers.items() if number.isdecimal()}
    if not saved:
        why = "no step_<i>.pt in this folder" if run.is_dir() else "no such run folder or checkpoint"
        raise RunError(f"{run}: {why}; name the folder of a run that has finished a step")
    if all_steps:
        return [saved[i] for i in sorted(saved)]
    wanted = max(saved) if step is None else step
    if wanted not in saved:
        raise RunError(f"{run}: no step {wanted}; it has {', '.join(map(str, sorted(saved)))}")
    return [saved[wanted]]


# ----------------------------------------------------------------------------------------------- from pictures to files


def find_pictures(given: Sequence[Path], out: Path) -> tuple[list[Path], dict[Path, str]]:
    """Each picture once, and why others cannot be had. The results in `out` are no pictures of a folder around it."""
    pictures: dict[str, Path] = {}
    problems: dict[Path, str] = {}
    for path in given:
        if os.path.isdir(path):
            found = list(pictures_below(path, out))
            if not found:
                problems[path] = "there is no picture in this folder"
        else:
            found = [path]
        for picture in found:
            if why := why_not_a_file(picture):
                problems[picture] = why
            else:
                pictures.setdefault(os.path.abspath(picture), picture)
    return list(pictures.values()), problems


def pictures_below(folder: Path, out: Path) -> Iterator[Path]:
    if folder.resolve() == out.resolve():
        raise RunError(f"--out {out}: the pictures are looked for in this folder; choose another")
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if Path(here, f).resolve() != out.resolve())
        yield from (
            Path(here, file) for file in sorted(files) if Path(file).suffix.lower() in PICTURE_SUFFIXES
        )


def why_not_a_file(path: Path) -> str | None:
    try:
        status = path.stat()
    except OSError as error:
        return "no such file" if isinstance(error, FileNotFoundError) else error.strerror
    if not stat.S_ISREG(status.st_mode):
        return "neither a file nor a folder"  # opening a pipe would wait for ever
    return None if status.st_size else "the file is empty"


def output_names(pictures: Sequence[Path]) -> dict[Path, str]:
    """The stem, where several pictures share it with the folder before it, and a number if that is not enough."""
    stems = Counter(picture.stem.casefold() for picture in pictures)
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for picture in pictures:
        shared = stems[picture.stem.casefold()] > 1
        first = cut(f"{picture.absolute().parent.name}-{picture.stem}" if shared else picture.stem)
        name, number = first, 1
        while name.casefold() in taken:
            number += 1
            name = f"{first}-{number}"
        taken.add(name.casefold())
        names[picture] = name
    return names


def cut(name: str) -> str:
    """No longer than a file's name can be."""
    content = os.fsencode(name)
    return name if len(content) <= LONGEST_NAME else content[:LONGEST_NAME].decode(errors="ignore")


def refuse_to_replace(pictures: Sequence[Path], names: Mapping[Path, str], out: Path) -> None:
    results = {out.resolve() / f"{name}{ending}" for name in names.values() for ending in ENDINGS}
    for picture in pictures:
        if picture.parent.resolve() / picture.name in results:
            raise RunError(f"--out {out}: {picture} would be replaced by a result; choose another folder")


def write_results(
    place: Path, picture: Image.Image, sight: Sight, network: Network, options: argparse.Namespace
) -> None:
    mask = palette_image(sight.labels).resize(picture.size, Image.Resampling.NEAREST)
    write_png(with_ending(place, "_mask.png"), mask)
    write_png(with_ending(place, "_overlay.png"), overlay(picture, mask, network.names, options.megapixels))
    if sight.probabilities is not None:
        content = io.BytesIO()
        np.savez_compressed(
            content,
            probabilities=sight.probabilities,
            class_ids=network.class_ids,
            class_names=list(network.names.values()),
        )
        write_atomically(with_ending(place, "_probabilities.npz"), content.getvalue())


def with_ending(place: Path, ending: str) -> Path:
    return place.with_name(place.name + ending)


def write_png(path: Path, image: Image.Image) -> None:
    content = io.BytesIO()
    image.save(content, "PNG")
    write_atomically(path, content.getvalue())


def report(
    path: Path, place: Path, picture: Image.Image, sight: Sight, num_frames: int, names: Mapping[int, str]
) -> str:
    """The line about a picture that was done."""
    seen = [f"{names[c]} {percentage(share)}" for c, share in shares(sight.labels).items() if c != BACKGROUND]
    more = [f"{len(seen) - NAMED} more"] if len(seen) > NAMED else []
    notes = ["{} x {}".format(*picture.size)]
    height, width = sight.labels.shape
    if (width, height) != picture.size:
        notes.append(f"shown to the network at {width} x {height}")
    if num_frames > 1:
        notes.append(f"the first of {num_frames} frames")
    what = ", ".join(seen[:NAMED] + more) or "background alone"
    return f"{path} -> {with_ending(place, ENDINGS[0])}: {what} ({', '.join(notes)})"


def say_skipped(path: Path, why: str) -> None:
    tqdm.write(printable(f"skipped {path}: {why}"), file=sys.stderr)


def printable(line: str) -> str:
    """Names of files may hold line breaks, and bytes that are no text."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


# ---------------------------------------------------------------------------------------------------------------- drawing


class Panel(NamedTuple):
    """What is seen after one step, small."""

    title: tuple[str, str]
    mask: Image.Image


def shares(labels: np.ndarray) -> dict[int, float]:
    """Class id -> its share of the pixels, the largest first."""
    counts = np.bincount(labels.ravel(), minlength=256) / labels.size
    return {int(c): float(counts[c]) for c in np.argsort(-counts, kind="stable") if counts[c]}


def percentage(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "< 1%"


def overlay(
    picture: Image.Image, mask: Image.Image, names: Mapping[int, str], megapixels: float
) -> Image.Image:
    """The mask's colours over the grey picture, beside them the classes that occur and their shares."""
    entries = [(c, f"{names[c]}  {percentage(share)}") for c, share in shares(np.asarray(mask)).items()]
    size = shown_size(picture.size, None, megapixels)
    factor = math.ceil(LEAST_OVERLAY / max(size))
    size = size[0] * factor, size[1] * factor
    tinted = tint(resized(picture, size), mask.resize(size, Image.Resampling.NEAREST))
    return side_by_side(
        [tinted, legend(entries, tinted.height, text_size=max(14, min(max(size) // 48, min(size) // 8)))]
    )


def strip(picture: Image.Image, panels: Sequence[Panel], names: Mapping[int, str]) -> Image.Image:
    """The picture and what is seen in it after each step, with titles; beside them every class that ever occurs."""
    small = resized(picture, panel_size(picture))
    cells = [titled(("picture", ""), small)]
    cells += [titled(panel.title, tint(small, panel.mask)) for panel in panels]
    entries = [(c, names[c]) for c in shares(np.stack([np.asarray(panel.mask) for panel in panels]))]
    return side_by_side([*cells, legend(entries, cells[0].height, text_size=14)])


def tint(picture: Image.Image, mask: Image.Image) -> Image.Image:
    """The picture in the colours of its classes, with white lines between them. The rest is grey: no colour but a class's."""
    labels, grey = np.asarray(mask), np.asarray(picture.convert("L"), np.float32)[..., None]
    shaded = (voc_palette()[labels] + SHADING * (grey - 128)).clip(0, 255)
    tinted = np.where(labels[..., None] == BACKGROUND, grey, shaded).astype(np.uint8)
    tinted[:, 1:][labels[:, 1:] != labels[:, :-1]] = 255
    tinted[1:][labels[1:] != labels[:-1]] = 255
    return Image.fromarray(tinted)


def panel_size(picture: Image.Image) -> tuple[int, int]:
    width, height = (max(1, round(side * PANEL / max(picture.size))) for side in picture.size)
    return width, height


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Masks and what is enlarged keep their hard edges."""
    smooth = image.mode == "RGB" and size[0] * size[1] < image.width * image.height
    return image.resize(size, Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST)


def legend(entries: Sequence[tuple[int, str]], height: int, text_size: int) -> Image.Image:
    """A coloured square and a text for each class, in as many columns as it takes to stay near the height."""
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
            colour = "silver" if class_id == BACKGROUND else tuple(map(int, voc_palette()[class_id]))
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
            shortened(line, canvas.width, size),
            "black",
            font(size),
            anchor="lm",
        )
    canvas.paste(image, (0, 3 * size))
    return canvas


def shortened(text: str, width: int, size: int) -> str:
    if font(size).getlength(text) <= width:
        return text
    while text and font(size).getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def side_by_side(images: Sequence[Image.Image], gap: int = 6) -> Image.Image:
    width = sum(image.width for image in images) + gap * (len(images) + 1)
    canvas = Image.new("RGB", (width, max(image.height for image in images) + 2 * gap), "white")
    left = gap
    for image in images:
        canvas.paste(image, (left, gap))
        left += image.width + gap
    return canvas


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Matplotlib brings a font with more letters than Pillow's own."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)


if __name__ == "__main__":
    exit_with(main)
