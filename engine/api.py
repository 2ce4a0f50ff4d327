"""Trained networks in Python: `load_segmenter(path).predict(images)`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data.images import ANY_FORMATS, open_image
from engine.prediction import MEGAPIXELS, Network, choose_device, find_checkpoints

Picture = str | Path | Image.Image | np.ndarray


class LoadedSegmenter(Network):
    """The network of a step: `names` are its classes by id, `model` is the module itself."""

    def predict(self, images: Picture | Sequence[Picture]) -> list[np.ndarray]:
        """Return for each image what is seen at every pixel of it: H x W class ids of the data set, uint8.

        An image is a path, an image of Pillow, or an array H x W x 3 of bytes.
        """
        several = [images] if isinstance(images, str | Path | Image.Image | np.ndarray) else images
        return [self._mask(as_image(image)) for image in several]

    def _mask(self, image: Image.Image) -> np.ndarray:
        seen = Image.fromarray(self.look(image).labels)
        return np.asarray(seen.resize(image.size, Image.Resampling.NEAREST))


def load_segmenter(
    path: str | Path,
    device: str | torch.device = "auto",
    *,
    step: int | None = None,
    size: int | None = None,
    megapixels: float = MEGAPIXELS,
    flip: bool = False,
) -> LoadedSegmenter:
    """Return the network of a run's folder (its last step, or `step`), of a step_<i>.pt or of an export.

    `size`, `megapixels` and `flip` are those of scripts.predict.
    """
    (file,) = find_checkpoints(Path(path), step, all_steps=False)
    place = choose_device(device) if isinstance(device, str) else device
    return LoadedSegmenter(file, place, size=size, megapixels=megapixels, flip=flip)


def as_image(image: Picture) -> Image.Image:
    """Return an image as a viewer would show it, in RGB."""
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"an image is H x W x 3 bytes, not {image.shape} of {image.dtype}")
        return Image.fromarray(image)
    return open_image(Path(image), ANY_FORMATS)[0]
