"""The images of a step as a data set, and which of them make which batch.

Everything follows from the seed and the numbers of epoch, iteration and rank.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from data.dataset import DataError, Sample
from data.images import image_size, read_image, read_mask
from data.protocols import BACKGROUND, SALIENT
from data.workers import outlive_signals

Items = list[tuple[int, int]]  # (epoch, position) of each image of a batch


def relabel(mask: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the table's entry for each mask value; `translate` is the fastest
    look-up in a table of 256 bytes.
    """
    return np.frombuffer(bytearray(mask.tobytes()).translate(table.tobytes()), np.uint8).reshape(mask.shape)


def read_labels(sample: Sample) -> np.ndarray:
    """Return the class id of each pixel of a sample's mask, 255 where it is void."""
    mask = read_mask(sample.mask)
    return mask if sample.meanings is None else relabel(mask, np.frombuffer(sample.meanings, np.uint8))


class StepDataset(torch.utils.data.Dataset):
    """Images with the labels of one step, taken by (epoch, position).

    What `transform` draws at random depends on the seed, the epoch and the image's name, and on nothing else:
    not on the number of workers or ranks, nor on what was loaded before. Without a transform images stay as
    they are. `saliency` is a folder of maps <name of the image>.png: background where such a map is not 0 is
    labelled SALIENT.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        table: np.ndarray,
        transform: Callable | None = None,
        seed: int = 0,
        saliency: str | None = None,
    ):
        assert table.shape == (256,) and table.dtype == np.uint8
        self.samples, self.table, self.transform, self.seed = samples, table, transform, seed
        self.saliency = saliency

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return a uint8 image (3, H, W) and its uint8 labels (H, W)."""
        epoch, position = item
        sample = self.samples[position]
        pixels, mask = read_image(sample.image), read_mask(sample.mask)
        if pixels.shape[:2] != mask.shape:
            raise DataError(f"{sample.mask}: is of another size than {sample.image}; make both the same size")
        table = (
            self.table if sample.meanings is None else self.table[np.frombuffer(sample.meanings, np.uint8)]
        )
        labelled = relabel(mask, table)
        if self.saliency is not None:
            labelled = mark_salient(labelled, Path(self.saliency, f"{sample.name}.png"))
        image, labels = torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(labelled)
        if self.transform is not None:
            with torch.random.fork_rng(devices=[]):
                # not torch.manual_seed, which would reach the generators of the GPUs as well
                torch.default_generator.manual_seed(seed_of(self.seed, epoch, sample.name))
                image, labels = self.transform(image, labels)
        return image.contiguous(), labels.contiguous()


def mark_salient(labels: np.ndarray, path: Path) -> np.ndarray:
    """Return labels in which background that the saliency map shows as an object is SALIENT."""
    if not path.is_file():
        raise DataError(f"{path}: no such saliency map; every training image needs one of its own size")
    salient = read_mask(path)
    if salient.shape != labels.shape:
        raise DataError(f"{path}: is of another size than the mask of its image; make both the same size")
    return np.where((labels == BACKGROUND) & (salient > 0), np.uint8(SALIENT), labels)


def seed_of(*facts: int | str) -> int:
    text = " ".join(map(str, facts))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class ReplayDataset(torch.utils.data.Dataset):
    """The images of a step and, behind them, those of its memory;
    each item says whether it is from the memory.
    """

    def __init__(self, current: StepDataset, memory: Sequence[StepDataset]):
        self.parts = [current, *memory]  # the memory's by the step whose labels they have
        self.samples = [sample for part in self.parts for sample in part.samples]
        self.places = [(part, position) for part in self.parts for position in range(len(part))]
        self.num_current = len(current)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, Tensor, bool]:
        epoch, position = item
        part, place = self.places[position]
        return *part[epoch, place], position >= self.num_current


def iterations_per_epoch(num_images: int, batch_size: int, step: int | None = None) -> int:
    """Return the number of full batches of one pass; the remaining images wait for the next permutation."""
    iterations = num_images // batch_size
    if iterations == 0:
        where = "the training set" if step is None else f"step {step}"
        raise DataError(
            f"{where} has {num_images} training images, fewer than one batch of {batch_size}; "
            "lower train.batch_size or add images"
        )
    return iterations


def micro_batch_size(batch_size: int, world: int, accumulate: int) -> int:
    """Return how many images a rank sees at once."""
    size, rest = divmod(batch_size, world * accumulate)
    if rest:
        raise DataError(
            f"train.batch_size {batch_size} is the total over ranks: it cannot be cut into {world} ranks x "
            f"train.accumulate {accumulate}; make it a multiple of {world * accumulate}"
        )
    return size


class _TrainBatches:
    """The micro-batches of one rank, in order."""

    def __init__(self, count, batch_size, accumulate, iterations, batch_of, seed, rank, world, memory=0):
        self.count, self.batch_size, self.accumulate = count, batch_size, accumulate
        self.memory = memory  # so many images behind the `count`, of which half of every micro-batch is
        self.iterations, self.batch_of, self.seed = iterations, batch_of, seed
        self.rank, self.world = rank, world
        self.part = micro_batch_size(batch_size, world, accumulate)
        self.epoch, self.order = None, []  # the permutation in use

    def __len__(self) -> int:
        return len(self.iterations) * self.accumulate

    def __iter__(self) -> Iterator[Items]:
        for iteration in self.iterations:
            yield from self.micro_batches(iteration)

    def micro_batches(self, iteration: int) -> list[Items]:
        """Return what this rank trains on in one iteration, whenever asked."""
        epoch, batch = divmod(self.batch_of(iteration) - 1, iterations_per_epoch(self.count, self.batch_size))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, _permutation(self.count, self.seed, epoch)
        first = batch * self.batch_size
        half = self.part // 2 if self.memory else 0
        own = self.part - half
        parts = []
        for micro in range(self.accumulate):
            number = micro * self.world + self.rank
            start = first + number * own
            items = [(epoch, position) for position in self.order[start : start + own]]
            parts.append(items + self._replayed(self.batch_of(iteration) - 1, number, half))
        return parts

    def _replayed(self, batch: int, number: int, half: int) -> Items:
        """Return what the memory adds to a part of a batch; it is gone through in permutations of its own."""
        first = (batch * self.accumulate * self.world + number) * half
        places = [divmod(draw, self.memory) for draw in range(first, first + half)]
        orders = {epoch: _permutation(self.memory, self.seed + 1, epoch) for epoch, _ in places}
        return [(epoch, self.count + orders[epoch][place]) for epoch, place in places]


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    # The mixing keeps (seed, epoch) and (seed + 1, epoch - 1) apart.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator).tolist()


def _identity(iteration: int) -> int:
    return iteration


def train_loader(
    dataset: StepDataset | ReplayDataset,
    *,
    batch_size: int,
    accumulate: int = 1,
    iterations: Sequence[int],
    batch_of: Callable[[int], int] = _identity,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    pin: bool = False,
    memory: int = 0,
) -> DataLoader:
    """Return a loader of all batches still to come in a step:
    `accumulate` micro-batches for each of `iterations` (counted from 1).

    Iteration t uses the global batch number batch_of(t), also counted from 1; an epoch is a permutation of
    the images. The global batch of `batch_size` images is cut into equal contiguous parts, one per rank and
    micro-batch. The last `memory` images of the data set, if any, are no part of an epoch: they make half of
    every micro-batch.
    """
    count = len(dataset) - memory
    iterations_per_epoch(count, batch_size)  # complains here rather than at the first batch
    batches = _TrainBatches(count, batch_size, accumulate, iterations, batch_of, seed, rank, world, memory)
    if memory and batches.part < 2:
        raise DataError(
            "half of every micro-batch comes from the memory, but a micro-batch has one image; raise "
            "train.batch_size or lower train.accumulate"
        )
    return _loader(dataset, batches, workers, pin)


def test_loader(
    dataset: StepDataset,
    *,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    pin: bool = False,
) -> DataLoader:
    """Return a loader that gives every image once over all ranks.

    Nothing is padded, so ranks may differ by one image, or have none at all.

    Without a transform images differ in size: those of one size then make batches together.
    """
    groups = defaultdict(list)
    for position in range(rank, len(dataset), world):
        size = None if dataset.transform is not None else image_size(dataset.samples[position].image)
        groups[size].append((0, position))
    batches = [
        group[start : start + batch_size]
        for group in groups.values()
        for start in range(0, len(group), batch_size)
    ]
    return _loader(dataset, batches, workers, pin)


test_loader.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for a test


def _loader(
    dataset: StepDataset | ReplayDataset, batches: Iterable[Items], workers: int, pin: bool
) -> DataLoader:
    # Workers run torch with one thread (PyTorch sees to that). A generator of its own, or the loader would
    # draw the workers' seeds, which nothing here uses, from the caller's.
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=pin,
        generator=torch.Generator(),
        worker_init_fn=outlive_signals,
    )
