"""Scoring: the confusion matrix, and whether images are loaded while the network is busy."""

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import load_dataset, shapes
from data.incremental import test_table
from data.loaders import StepDataset, test_loader
from data.protocols import IGNORE_INDEX, protocol_steps
from data.transforms import normalise, test_transform
from engine.inference import predict
from metrics.confusion import ConfusionMatrix
from models.segmenter import Segmenter, build_segmenter
from scripts.benchmarks.measure import (
    Measurement,
    Options,
    Target,
    channels_last,
    interleave,
    ratio,
    summary,
    timed,
    torch_threads,
)

NUM_CLASSES = 21
BATCH = 8


def evaluation(options: Options) -> list[Measurement]:
    return [*confusion(options), overlap(options)]


def confusion(options: Options) -> list[Measurement]:
    """The matrix of a batch at once, against numpy image by image."""
    shape = (4, 64, 64) if options.quick else (32, 512, 512)
    sizes = "x".join(map(str, shape))
    measurements = []
    for kind, (truth, guess) in {"": random_labels(*shape), ", in regions": regions(*shape)}.items():
        matrix = ConfusionMatrix(NUM_CLASSES)
        variants = {
            "numpy by image": timed(partial(counts_by_image, truth, guess)),
            "ours": timed(partial(matrix.update, truth, guess)),
        }
        samples = interleave(variants, options.times(9))
        what = f"confusion matrix faster than numpy by image, {sizes}{kind}"
        measurements.append(ratio(what, samples, "numpy by image", "ours", Target(low=5)))
    return measurements


def random_labels(*shape: int) -> tuple[Tensor, Tensor]:
    """Return labels as the loader gives them, some void, and predictions as argmax gives them."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(NUM_CLASSES, shape, dtype=torch.uint8, generator=generator)
    truth[torch.rand(shape, generator=generator) < 0.05] = IGNORE_INDEX
    return truth, torch.randint(NUM_CLASSES, shape, generator=generator)


def regions(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the same in squares of 32 pixels, of which the predictions are some pixels off:
    neighbours are alike.
    """
    squares, _ = random_labels(count, height // 32, width // 32)
    truth = squares.repeat_interleave(32, 1).repeat_interleave(32, 2)
    return truth, truth.clamp(max=NUM_CLASSES - 1).roll((5, 7), (1, 2)).long()


def counts_by_image(truth: Tensor, guess: Tensor) -> np.ndarray:
    counts = np.zeros((NUM_CLASSES, NUM_CLASSES), np.int64)
    for t, g in zip(truth.numpy(), guess.numpy(), strict=True):
        valid = t != IGNORE_INDEX
        pairs = NUM_CLASSES * t[valid].astype(np.int64) + g[valid]
        counts += np.bincount(pairs, minlength=NUM_CLASSES**2).reshape(NUM_CLASSES, NUM_CLASSES)
    return counts


def overlap(options: Options) -> Measurement:
    """Scoring with one loader process against the slower of loading and predicting alone."""
    # Images much larger than what is scored: loading and predicting then take about as long as each other.
    images, size, side = (20, 64, 64) if options.quick else (160, 512, 128)
    model = build_segmenter("resnet_tiny", head_channels=64)
    model.add_classes(NUM_CLASSES)
    model = channels_last(model).eval()
    step = protocol_steps("voc", "offline")[0]
    with tempfile.TemporaryDirectory() as folder, torch_threads(max(1, torch.get_num_threads() - 1)):
        root = Path(folder) / "shapes"
        shapes.generate(root, train=20, val=images, size=size, progress=False)
        test = load_dataset("voc", root).test
        data = StepDataset(test, test_table(step, "ignore"), test_transform(side))
        loader = test_loader(data, batch_size=BATCH, workers=1)
        ready = list(loader)
        variants = {
            "loading": timed(lambda: list(loader)),
            "predicting": timed(lambda: score(model, ready)),
            "both": timed(lambda: score(model, loader)),
        }
        samples = interleave(variants, options.times(7))
    alone = zip(samples["loading"], samples["predicting"], strict=True)
    ratios = [both / max(pair) for both, pair in zip(samples["both"], alone, strict=True)]
    what = "scoring / the slower of loading and predicting alone"
    return summary(what, ratios, Target(high=1.2), raw=samples)


def score(model: Segmenter, batches: Iterable) -> None:
    """The loop of train.py's evaluate."""
    matrix = ConfusionMatrix(NUM_CLASSES)
    for images, labels in batches:
        images = normalise(images).to(memory_format=torch.channels_last)
        matrix.update(labels, predict(model, images).argmax(dim=1))
