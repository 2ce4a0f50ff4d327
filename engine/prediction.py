"""What a run's networks see in images of your own: finding the images, showing them to a network,
and writing what it sees.
"""

import io
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from data.files import write_atomically
from data.images import ANY_SUFFIXES
from data.palette import palette_image, palette_with
from data.transforms import normalise
from engine import checkpoint
from engine.exported import is_export
from engine.inference import predict
from engine.run_folder import RunError, RunFolder
from tracking.overlays import overlay

# In bytes: with an ending, and while it is written, a name must stay below the 255 of most file systems.
LONGEST_NAME = 200
ENDINGS = ("_mask.png", "_overlay.png", "_steps.png", "_probabilities.npz")
MEGAPIXELS = 2.0  # shown to the network at once; with 150 classes their scores take 1.2 GB


# ------------------------------------------------------------------------------------------------ the network


class Sight(NamedTuple):
    """What a network sees in an image, at the size the network was shown."""

    labels: np.ndarray  # H x W class ids of the data set
    probabilities: np.ndarray | None  # C x H x W


class Network:
    """The model of a step checkpoint, and how it is shown images."""

    def __init__(self, path: Path, device: torch.device, *, size: int | None, megapixels: float, flip: bool):
        model, state = checkpoint.load_segmenter(path, device)
        self.model, self.device = model.eval(), device
        self.size, self.megapixels, self.flip = size, megapixels, flip
        self.step: int = state["step"]
        self.class_ids = np.array(state["class_ids"], np.uint8)
        self.names = dict(zip(state["class_ids"], state["classes"], strict=True))
        self.palette = palette_with(dict(zip(state["class_ids"], state.get("colours", ()), strict=False)))
        self.new = state["classes"][-checkpoint.num_new(state) :]

    @property
    def title(self) -> tuple[str, str]:
        """Two short lines: the step, and what it added."""
        if self.step == 0:
            return "step 0", f"{len(self.new) - 1} classes"  # the background is not counted
        return f"step {self.step}", f"+ {self.new[0]}" if len(self.new) == 1 else f"+ {len(self.new)} classes"

    def look(self, image: Image.Image, with_probabilities: bool = False) -> Sight:
        """Return what the network sees in an RGB image."""
        size = shown_size(image.size, self.size, self.megapixels)
        shown = image.resize(size, Image.Resampling.BILINEAR)
        batch = torch.from_numpy(np.array(shown)).permute(2, 0, 1)[None].to(self.device)
        scores = predict(self.model, normalise(batch, torch.float32, *self.model.colours), flip=self.flip)[0]
        labels = self.class_ids[scores.argmax(dim=0).cpu().numpy()]
        probabilities = None
        if with_probabilities:  # with a flip, or by a method's rule, the scores are probabilities already
            ready = self.flip or self.model.rule is not None
            probabilities = (scores if ready else scores.softmax(dim=0)).half().cpu().numpy()
        return Sight(labels, probabilities)


def shown_size(size: tuple[int, int], shorter: int | None, megapixels: float) -> tuple[int, int]:
    """Return width and height for the network: the shorter side as asked for, if any,
    and never too many pixels.
    """
    limit = max(1, round(megapixels * 1e6))
    scale = min(shorter / min(size) if shorter else 1.0, math.sqrt(limit / math.prod(size)))
    width, height = (min(limit, max(1, round(side * scale))) for side in size)
    return width, height


def choose_device(name: str) -> torch.device:
    """Return the device of --device: auto, cpu or cuda."""
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch sees no GPU; check the driver and the torch build, or use cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def find_checkpoints(run: Path, step: int | None, all_steps: bool) -> list[Path]:
    """Return the checkpoints of a run's folder that are wanted, in order, or the one that is named:
    a step_<i>.pt, or an export.
    """
    if run.is_file() or is_export(run):
        if step is not None or all_steps:
            raise RunError(f"{run} is one step: with --step and --all-steps name the run's folder")
        return [run]
    saved = RunFolder(run).saved_steps()
    if not saved:
        why = "no step_<i>.pt in this folder" if run.is_dir() else "no such run folder or checkpoint"
        raise RunError(f"{run}: {why}; name the folder of a run that has finished a step")
    if all_steps:
        return [saved[i] for i in sorted(saved)]
    wanted = max(saved) if step is None else step
    if wanted not in saved:
        raise RunError(f"{run}: no step {wanted}; it has {', '.join(map(str, sorted(saved)))}")
    return [saved[wanted]]


# --------------------------------------------------------------------------------------- from images to files


def find_images(given: Sequence[Path], out: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return each image once, and why others cannot be had.

    The results in `out` are no images of a folder around it.
    """
    images: dict[str, Path] = {}
    problems: dict[Path, str] = {}
    for path in given:
        if os.path.isdir(path):
            found = list(images_below(path, out))
            if not found:
                problems[path] = "there is no image in this folder"
        else:
            found = [path]
        for image in found:
            if why := why_not_a_file(image):
                problems[image] = why
            else:
                images.setdefault(os.path.abspath(image), image)
    return list(images.values()), problems


def images_below(folder: Path, out: Path) -> Iterator[Path]:
    """Yield every file somewhere below the folder that is named like an image, but for those in `out`."""
    if folder.resolve() == out.resolve():
        raise RunError(f"--out {out}: the images are looked for in this folder; choose another")
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if Path(here, f).resolve() != out.resolve())
        yield from (Path(here, file) for file in sorted(files) if Path(file).suffix.lower() in ANY_SUFFIXES)


def why_not_a_file(path: Path) -> str | None:
    """Return what keeps a path from being read, None if nothing is known to."""
    try:
        status = path.stat()
    except OSError as error:
        return "no such file" if isinstance(error, FileNotFoundError) else error.strerror
    if not stat.S_ISREG(status.st_mode):
        return "neither a file nor a folder"  # opening a pipe would wait for ever
    return None if status.st_size else "the file is empty"


def output_names(images: Sequence[Path]) -> dict[Path, str]:
    """Return the stem, where several images share it with the folder before it,
    and a number if that is not enough.
    """
    stems = Counter(image.stem.casefold() for image in images)
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for image in images:
        shared = stems[image.stem.casefold()] > 1
        first = cut(f"{image.absolute().parent.name}-{image.stem}" if shared else image.stem)
        name, number = first, 1
        while name.casefold() in taken:
            number += 1
            name = f"{first}-{number}"
        taken.add(name.casefold())
        names[image] = name
    return names


def cut(name: str) -> str:
    """Return the name, no longer than a file's can be."""
    content = os.fsencode(name)
    return name if len(content) <= LONGEST_NAME else content[:LONGEST_NAME].decode(errors="ignore")


def refuse_to_replace(images: Sequence[Path], names: Mapping[Path, str], out: Path) -> None:
    """RunError if an image that is given stands where a result would be written."""
    results = {out.resolve() / f"{name}{ending}" for name in names.values() for ending in ENDINGS}
    for image in images:
        if image.parent.resolve() / image.name in results:
            raise RunError(f"--out {out}: {image} would be replaced by a result; choose another folder")


def write_results(place: Path, image: Image.Image, sight: Sight, network: Network) -> None:
    """Write mask, overlay and, if they are known, probabilities; `place` is their path without its ending."""
    mask = palette_image(sight.labels, network.palette).resize(image.size, Image.Resampling.NEAREST)
    write_png(with_ending(place, "_mask.png"), mask)
    size = shown_size(image.size, None, network.megapixels)
    write_png(with_ending(place, "_overlay.png"), overlay(image, mask, network.names, size))
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
    """Return the path with something more at its end, which need not begin with a dot."""
    return place.with_name(place.name + ending)


def write_png(path: Path, image: Image.Image) -> None:
    """Write all of the file or nothing."""
    content = io.BytesIO()
    image.save(content, "PNG")
    write_atomically(path, content.getvalue())
