"""VOC 2012 + SBD -> SegmentationClassAug and train_aug.txt, which published numbers are trained on.

    python -m scripts.merge_sbd VOCdevkit/VOC2012 benchmark_RELEASE/dataset

SBD's masks (cls/*.mat) become PNG files with VOC's palette; where VOC has a mask of its own, that one is
taken. train_aug = VOC's train and SBD's train and val, without VOC's val: 10,582 names. Needs scipy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.dataset import DataError, raise_problems, read_lines
from data.files import write_atomically
from data.official import LISTS
from data.palette import palette_image
from data.voc import AUGMENTED, LIST_FOLDERS

OWN_MASKS = "SegmentationClass"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.merge_sbd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("voc", type=Path, help="the folder VOC2012, which holds JPEGImages; written to")
    parser.add_argument(
        "sbd", type=Path, help="SBD's folder `dataset`, which holds cls, train.txt and val.txt"
    )
    options = parser.parse_args(arguments)
    try:
        count = merge(options.voc, options.sbd, mat_reader())
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    official = LISTS["voc"]["train_aug"]
    print(f"{options.voc / AUGMENTED}: train_aug has {count:,} images, officially {official:,}")
    return 0


def mat_reader() -> Callable[[Path], np.ndarray]:
    """Reads the class mask of an SBD file."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError(
            f"SBD's masks are MATLAB files, which scipy reads; install it: {sys.executable} -m pip install "
            "scipy"
        ) from None

    def read(path: Path) -> np.ndarray:
        try:
            return loadmat(path, variable_names=["GTcls"])["GTcls"]["Segmentation"][0, 0].astype(np.uint8)
        except Exception as error:  # damaged files fail in many ways
            raise DataError(f"{path}: cannot be read ({error}); unpack SBD again") from error

    return read


def merge(voc: Path, sbd: Path, read_mat: Callable[[Path], np.ndarray]) -> int:
    """Write the list and the masks; returns the length of the list. The folder appears last, and whole."""
    lists = voc / LIST_FOLDERS[0]
    train, val = (set(read_lines(lists / f"{split}.txt")) for split in ("train", "val"))
    extra = {name for split in ("train", "val") for name in read_lines(sbd / f"{split}.txt")}
    target = voc / AUGMENTED
    if target.exists():
        raise DataError(f"{target}: is there already; delete it to have it made again")
    own = {path.stem: path for path in (voc / OWN_MASKS).glob("*.png")}
    mats = {name: sbd / "cls" / f"{name}.mat" for name in sorted(extra - own.keys())}
    missing = [f"{path}: is missing; unpack SBD again" for path in mats.values() if not path.is_file()]
    missing += [
        f"{voc / OWN_MASKS / name}.png: is missing; unpack VOC again"
        for name in sorted((train | val) - own.keys())
    ]
    raise_problems("masks are missing", missing)

    folder = Path(tempfile.mkdtemp(prefix=f".{AUGMENTED}.", dir=voc))
    try:
        for path in own.values():
            shutil.copyfile(path, folder / path.name)
        for name, path in tqdm(mats.items(), desc="converting SBD", disable=None):
            palette_image(read_mat(path)).save(folder / f"{name}.png", optimize=True)
        names = sorted((train | extra) - val)
        write_atomically(lists / "train_aug.txt", "".join(f"{name}\n" for name in names).encode())
        os.chmod(folder, 0o755)  # mkdtemp makes folders for the owner alone
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return len(names)


if __name__ == "__main__":
    sys.exit(main())
