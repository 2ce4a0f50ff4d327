"""The embedded data set: small images of textured shapes in the layout of PASCAL VOC.

    python -m data.shapes <root>

A class is a shape with a texture: class k has shape k mod 5 and texture k mod 4. As 5 and 4 are coprime the
20 classes are all 20 pairs, and any five classes in a row hold every shape and every texture: classes learned
late share both with classes learned early. Colours are random and tell nothing about the class.

Which classes meet in an image follows train_aug of VOC 2012 as the 15-1 protocol sees it: class 15 ("person")
is the frequent companion, and about half of the images of a class 16..20 also show a class 1..15. Old objects
are therefore seen, unlabelled, in later steps just as rarely as on VOC, unless --old-beside-new says
otherwise.

The layout is VOC's, so its reader calls class 1 "aeroplane" and so on; the names mean nothing here.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from data.dataset import DataError
from data.palette import palette_image
from data.protocols import BACKGROUND, IGNORE_INDEX

VERSION = 1  # of the images: raise it whenever the same arguments would draw others
MANIFEST = "shapes.json"
NUM_CLASSES = 20
COMPANION = 15  # VOC's person
NEW = range(16, 21)  # the classes of the later steps of 15-1

# How often an image shows a second class, as measured on train_aug of VOC 2012.
PERSON_RATE = 0.30  # class 15 beside another class
OLD_BESIDE_NEW = 0.34  # one of 1..14 beside one of 16..20
OLD_BESIDE_OLD = 0.13  # one of 1..14 beside another one of 1..14
NEW_BESIDE_NEW = 0.08  # one of 16..20 beside another one of 16..20
TWIN_RATE = 0.25  # a second object of the only class (chosen, not measured)
MAX_OBJECTS = 3
SILENT = {"old_beside_new": OLD_BESIDE_NEW}  # what a manifest means that does not say

RADIUS = (0.24, 0.40)  # of an object, as part of the image's side
PERIOD = (0.15, 0.18)  # of a texture, likewise
TILT = 0.3  # the most an object leans to a side, in radians
BORDER = 0.012  # half the width of the void border, likewise

# Signed distance to the outline of a shape of radius about one, negative inside.
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda x, y: np.hypot(x, y) - 0.85,
    "bar": lambda x, y: np.maximum(np.abs(x) - 1.1, np.abs(y) - 0.45),
    "triangle": lambda x, y: np.maximum(y, np.abs(x) * 0.75**0.5 - y * 0.5) - 0.6,
    "cross": lambda x, y: np.minimum(
        np.maximum(abs(x) - 1, abs(y) - 0.36), np.maximum(abs(x) - 0.36, abs(y) - 1)
    ),
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.72) - 0.28,
}
# Share of the second colour at a point; one turn (2 pi) is a period.
TEXTURES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "plain": lambda x, y: np.zeros_like(x),
    "stripes": lambda x, y: _step(np.sin(x)),
    "checks": lambda x, y: _step(2 * np.sin(x / 2) * np.sin(y / 2)),
    "dots": lambda x, y: _step(np.cos(x) + np.cos(y) - 0.7),
}


def _step(wave: np.ndarray) -> np.ndarray:
    """Return a soft threshold at zero, so that textures do not alias."""
    return np.clip(0.5 + 1.5 * wave, 0, 1)


def class_parts(k: int) -> tuple[str, str]:
    """Return the shape and the texture of class k in 1..20."""
    return list(SHAPES)[k % len(SHAPES)], list(TEXTURES)[k % len(TEXTURES)]


def choose_classes(main: int, rng: np.random.Generator, old_beside_new: float = OLD_BESIDE_NEW) -> list[int]:
    """Return the class of each object of an image built around class `main`, which comes first."""

    def sometimes(rate: float, candidates: Iterable[int]) -> list[int]:
        others = [k for k in candidates if k != main]
        return [int(rng.choice(others))] if rng.random() < rate else []

    if main == COMPANION:  # images of it with another class are built around the other
        classes = [main]
    else:
        classes = [main, *sometimes(PERSON_RATE, [COMPANION])]
        classes += sometimes(old_beside_new if main in NEW else OLD_BESIDE_OLD, range(1, COMPANION))
        classes += sometimes(NEW_BESIDE_NEW if main in NEW else 0.0, NEW)
    if len(classes) == 1:
        classes += [main] * int(rng.random() < TWIN_RATE)
    return classes[:MAX_OBJECTS]


def draw(
    main: int, size: int, rng: np.random.Generator, old_beside_new: float = OLD_BESIDE_NEW
) -> tuple[np.ndarray, np.ndarray]:
    """Return one image around class `main`: uint8 colours (size, size, 3) and uint8 labels (size, size)."""
    image = _background(size, rng)
    labels = np.full((size, size), BACKGROUND, np.uint8)
    placed: list[tuple[float, float, float]] = []
    for k in choose_classes(main, rng, old_beside_new):
        placed.append(_place(placed, size, rng))
        *centre, radius = placed[-1]
        shape, texture = class_parts(k)
        x, y = _turned(centre, rng.uniform(-TILT, TILT), size)
        distance = SHAPES[shape](x / radius, y / radius) * radius
        image = _paint(image, distance, _textured(texture, x, y, size, rng))
        labels[distance < 0] = k
        labels[np.abs(distance) < BORDER * size] = IGNORE_INDEX
    image += rng.normal(0, 4, image.shape)
    return image.clip(0, 255).astype(np.uint8), labels


def _place(
    placed: list[tuple[float, float, float]], size: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return centre and radius of a further object: of some random places the one that hides the least."""
    shrink = 1.0 if not placed else 0.8  # companions are smaller
    radius = size * shrink * rng.uniform(*RADIUS)
    places = rng.uniform(0.8 * radius, size - 0.8 * radius, (20, 2))
    gaps = np.zeros(len(places))  # negative: overlap with the nearest object so far
    for x, y, r in placed:
        gaps = np.minimum(gaps, np.hypot(places[:, 0] - x, places[:, 1] - y) - radius - r)
    x, y = places[gaps.argmax()]
    return x, y, radius


def _turned(centre: Iterable[float], turn: float, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates of every pixel in a frame that is turned around a centre."""
    (centre_x, centre_y), steps = centre, np.arange(size) + 0.5
    x, y = steps[None, :] - centre_x, steps[:, None] - centre_y
    return x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)


def _textured(texture: str, x: np.ndarray, y: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a texture in two random colours that differ clearly."""
    first, second = rng.uniform(0, 255, (2, 3))
    while np.abs(first - second).sum() < 200:
        second = rng.uniform(0, 255, 3)
    turns = 2 * np.pi / (size * rng.uniform(*PERIOD))
    share = TEXTURES[texture](x * turns, y * turns)[..., None]
    return first + share * (second - first)


def _background(size: int, rng: np.random.Generator) -> np.ndarray:
    """Soft patches of dull colours crossed by streaks of any colour."""
    cells = int(rng.integers(2, 6))
    greys = rng.uniform(40, 216, (cells, cells, 1))
    patches = Image.fromarray((greys + rng.uniform(-40, 40, (cells, cells, 3))).astype(np.uint8))
    image = np.asarray(patches.resize((size, size), Image.Resampling.BICUBIC), np.float64)
    for _ in range(rng.integers(2, 6)):
        length, width = size * rng.uniform(0.05, 0.4), size * rng.uniform(0.008, 0.03)
        x, y = _turned(rng.uniform(0, size, 2), rng.uniform(0, np.pi), size)
        distance = np.maximum(np.abs(x) - length, np.abs(y) - width)
        image = _paint(image, distance, rng.uniform(0, 255, 3))
    return image


def _paint(image: np.ndarray, distance: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """Return the image with the colour wherever the distance is negative; the outline is smooth."""
    cover = np.clip(0.5 - distance, 0, 1)[..., None]
    return image + cover * (colour - image)


def _write(job: tuple[str, int], folder: Path, seed: int, size: int, old_beside_new: float) -> None:
    split, i = job
    # A generator of its own for every image: neither their number nor the workers change what it shows.
    rng = np.random.default_rng([seed, int(split == "val"), i])
    image, labels = draw(i % NUM_CLASSES + 1, size, rng, old_beside_new)
    Image.fromarray(image).save(folder / "JPEGImages" / f"{_name(split, i)}.jpg", quality=95)
    palette_image(labels).save(folder / "SegmentationClassAug" / f"{_name(split, i)}.png")


def _name(split: str, i: int) -> str:
    return f"{split}_{i:06d}"


def generate(
    root: str | Path,
    seed: int = 0,
    train: int = 3000,
    val: int = 400,
    size: int = 64,
    old_beside_new: float = OLD_BESIDE_NEW,
    workers: int = 2,
    progress: bool = True,
) -> bool:
    """Write the data set to `root`; True if it was written, False if `root` already held just this one."""
    root = Path(root)
    manifest = {
        "version": VERSION,
        "seed": seed,
        "train": train,
        "val": val,
        "size": size,
        "old_beside_new": old_beside_new,
    }
    if min(train, val) < NUM_CLASSES or size < 32 or seed < 0 or workers < 1:
        raise DataError(
            f"shapes: seed {seed}, train {train}, val {val}, size {size}, workers {workers}: need a seed >= "
            f"0, at least {NUM_CLASSES} images (one a class) for train and val, a size >= 32 and at least "
            "one worker"
        )
    if not 0 <= old_beside_new <= 1:
        raise DataError(f"shapes: old_beside_new {old_beside_new} is a share of images: give 0 to 1")
    if _holds(root, manifest):
        return False

    root.parent.mkdir(parents=True, exist_ok=True)
    folder = root.parent / f".{root.name}.{os.getpid()}"
    try:
        for part in ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation"):
            (folder / part).mkdir(parents=True)
        jobs = [("train", i) for i in range(train)] + [("val", i) for i in range(val)]
        write = partial(_write, folder=folder, seed=seed, size=size, old_beside_new=old_beside_new)
        with Pool(workers) as pool, tqdm(total=len(jobs), desc="shapes", disable=not progress) as bar:
            for _ in pool.imap_unordered(write, jobs, chunksize=32):
                bar.update()
        # As in VOC, `train` is about a seventh of `train_aug`.
        lists = {
            "train_aug": ("train", train),
            "train": ("train", max(NUM_CLASSES, train // 7)),
            "val": ("val", val),
        }
        for list_name, (split, count) in lists.items():
            names = "".join(f"{_name(split, i)}\n" for i in range(count))
            (folder / "ImageSets" / "Segmentation" / f"{list_name}.txt").write_text(names)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(folder, root)
    except OSError:
        if _holds(root, manifest):  # another process was faster
            return False
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _holds(root: Path, manifest: dict[str, float]) -> bool:
    """Return whether `root` holds the data set of this manifest;
    refuses a `root` that holds anything else.
    """
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return False
    try:
        found = SILENT | json.loads((root / MANIFEST).read_text())
    except (OSError, ValueError, TypeError):
        raise DataError(
            f"{root} is not empty and has no readable {MANIFEST}: choose another folder"
        ) from None
    differences = [
        f"{key} {found.get(key)} there, {value} asked"
        for key, value in manifest.items()
        if found.get(key) != value
    ]
    if differences:
        raise DataError(
            f"{root} holds other shapes ({'; '.join(differences)}): delete it or choose another folder"
        )
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data.shapes", description="Write the embedded data set.")
    parser.add_argument(
        "root", type=Path, help="folder to write, in the layout of VOC (read it with data.dataset: voc)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="other seeds give other images (default: %(default)s)"
    )
    parser.add_argument("--train", type=int, default=3000, help="training images (default: %(default)s)")
    parser.add_argument("--val", type=int, default=400, help="test images (default: %(default)s)")
    parser.add_argument(
        "--size", type=int, default=64, help="side of an image in pixels (default: %(default)s)"
    )
    parser.add_argument(
        "--old-beside-new",
        type=float,
        default=OLD_BESIDE_NEW,
        metavar="RATE",
        help="share of the images of a class 16..20 that also show one of 1..14 (default: %(default)s, as on "
        "VOC)",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        written = generate(**vars(arguments))
    except DataError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{arguments.root}: {'written' if written else 'already there'}")


if __name__ == "__main__":
    main()
