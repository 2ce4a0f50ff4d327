import multiprocessing
import os
import signal
import subprocess
import time
from itertools import chain, islice

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from data import DataError, Sample
from data.loaders import StepDataset, iterations_per_epoch, test_loader, train_loader
from data.transforms import normalise, test_transform, train_transform
from data.workers import outlive_signals

KEEP = np.arange(256, dtype=np.uint8)


def make_samples(folder, count, sizes=((40, 30),)):
    samples = []
    for i in range(count):
        width, height = sizes[i % len(sizes)]
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), np.uint8)
        sample = Sample(f"p{i}", folder / f"p{i}.png", folder / f"p{i}-mask.png")
        Image.fromarray(pixels).save(sample.image)
        Image.fromarray(np.full((height, width), i, np.uint8)).save(sample.mask)  # label = position
        samples.append(sample)
    return samples


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return make_samples(tmp_path_factory.mktemp("pictures"), 13)


@pytest.fixture
def dataset(samples):
    return StepDataset(samples, KEEP, train_transform(16), seed=3)


def positions(loader):
    """Positions of the images of each batch: their masks say them."""
    return [labels[:, 0, 0].tolist() for _, labels in loader]


# --- transforms ---------------------------------------------------------------------------------------------


def test_train_transform_moves_image_and_mask_together():
    # The mask is a channel of the image, in blocks so large that both filters agree inside them.
    blocks = (
        torch.arange(12, dtype=torch.uint8).view(3, 4).repeat_interleave(20, 0).repeat_interleave(20, 1) * 20
    )
    image = blocks.expand(3, -1, -1)
    transform = train_transform(64, scale=(0.5, 1.0))
    flips = set()
    for seed in range(8):
        torch.manual_seed(seed)
        moved, mask = transform(image, blocks)
        assert moved.shape == (3, 64, 64) and mask.shape == (64, 64)
        assert moved.dtype == mask.dtype == torch.uint8
        assert set(mask.unique().tolist()) <= set(blocks.unique().tolist())
        assert (moved[0] == mask).float().mean() > 0.85
        flips.add(bool(mask[32, 0] > mask[32, -1]))
    assert flips == {False, True}


@pytest.mark.parametrize("size", [20, 44, 64])  # sizes at which no sample lies just between two pixels
def test_masks_are_sampled_as_pillow_does(size):
    labels = np.random.default_rng(0).integers(0, 21, (30, 47), np.uint8)
    image = torch.zeros(3, 30, 47, dtype=torch.uint8)
    _, mask = test_transform(size)(image, torch.from_numpy(labels))
    width = int(size * 47 / 30)
    resized = np.asarray(Image.fromarray(labels).resize((width, size), Image.Resampling.NEAREST))
    left = round((width - size) / 2)
    assert mask.tolist() == resized[:, left : left + size].tolist()


def test_crop_cannot_exceed_the_image():
    """Crops of twice the area never fit: after ten tries the largest central one is taken."""
    image = torch.zeros(3, 30, 90, dtype=torch.uint8)
    mask = torch.zeros(30, 90, dtype=torch.uint8)
    mask[:, 25:65] = 1  # the central 4:3
    _, labels = train_transform(16, scale=(2.0, 2.0), flip=0.0)(image, mask)
    assert labels.eq(1).all()


def slow_scale_crop(image, labels, size, scale, flip):
    """With Pillow and a loop over the pixels of the square."""
    u, top, left, flipped = torch.rand(4).tolist()
    factor = scale[0] + (scale[1] - scale[0]) * u
    height, width = (max(1, int(side * factor)) for side in labels.shape)
    small = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))
    marks = np.asarray(Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST))
    first = [
        int(share * (side - size + 1)) if side >= size else -((size - side) // 2)
        for share, side in ((top, height), (left, width))
    ]
    square, void = np.empty((size, size, 3)), np.empty((size, size))
    for i, j in np.ndindex(size, size):
        y, x = first[0] + i, first[1] + (size - 1 - j if flipped < flip else j)
        inside = 0 <= y < height and 0 <= x < width
        square[i, j] = small[y, x] if inside else (124, 116, 104)
        void[i, j] = marks[y, x] if inside else 255
    return square, void


@pytest.mark.parametrize("scale", [(0.5, 2.0), (0.25, 0.25), (2.0, 2.0), (1.0, 1.0)])
@pytest.mark.parametrize("shape", [(30, 47), (24, 24), (60, 10)])
def test_scale_crop_is_what_pillow_does(shape, scale):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 21, shape, np.uint8)
    image = rng.integers(0, 256, (*shape, 3), np.uint8)
    transform = train_transform(24, scale, 0.5, "scale_crop")
    for seed in range(6):
        torch.manual_seed(seed)
        ours, mask = transform(torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(labels))
        torch.manual_seed(seed)
        theirs, marks = slow_scale_crop(image, labels, 24, scale, 0.5)
        assert ours.dtype == mask.dtype == torch.uint8 and ours.shape == (3, 24, 24)
        assert np.abs(ours.permute(1, 2, 0).numpy() - theirs).max() <= 1  # rounding
        assert (mask.numpy() == marks).mean() > 0.9  # a row just between two pixels may go either way
        padded = torch.from_numpy(marks == 255)
        assert torch.equal(mask == 255, padded)
        assert normalise(ours[None])[0][:, padded].abs().le(0.01).all()


def test_scale_crop_reaches_every_place():
    """Also the first and the last one, each as probable."""
    image, size = torch.zeros(3, 4, 6, dtype=torch.uint8), 4
    transform = train_transform(size, (1.0, 1.0), 0.0, "scale_crop")
    columns = torch.arange(6, dtype=torch.uint8).expand(4, 6)
    first = [int(transform(image, columns)[1][0, 0]) for _ in range(300)]
    assert min(first.count(place) for place in range(3)) > 60 and set(first) == {0, 1, 2}


def test_normalise():
    batch = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 2, 2)
    result = normalise(batch.contiguous(memory_format=torch.channels_last))
    assert result.dtype == torch.float32 and result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result[0, :, 0, 0], torch.tensor([-2.11790, -2.03571, -1.80444]))
    torch.testing.assert_close(result[1, :, 0, 0], torch.tensor([2.24891, 2.42857, 2.64000]))
    assert normalise(batch, torch.bfloat16).dtype == torch.bfloat16


# --- one image ----------------------------------------------------------------------------------------------


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("augment", ["resized_crop", "scale_crop"])
def test_augmentation_depends_on_seed_epoch_and_name_alone(samples, augment):
    dataset = StepDataset(samples, KEEP, train_transform(16, augment=augment), seed=3)
    torch.manual_seed(0)
    first = dataset[0, 5]
    dataset[0, 6]
    torch.manual_seed(1)
    assert same(first, dataset[0, 5])
    assert not same(first, dataset[1, 5])
    transform = dataset.transform
    assert not same(first, StepDataset(samples, KEEP, transform, seed=4)[0, 5])
    assert same(first, StepDataset(samples[5:], KEEP, transform, seed=3)[0, 0])


def test_the_callers_random_numbers_are_left_alone(dataset):
    state = torch.get_rng_state()
    dataset[0, 0]
    list(test_loader(dataset, batch_size=4))
    list(train_loader(dataset, batch_size=4, iterations=[1]))
    assert torch.equal(state, torch.get_rng_state())


def test_labels_go_through_the_table(samples):
    table = np.zeros(256, np.uint8)
    table[4] = 9
    image, labels = StepDataset(samples, table)[0, 4]
    assert labels.dtype == image.dtype == torch.uint8
    assert labels.shape == (30, 40) and labels.eq(9).all()
    assert np.array_equal(image.permute(1, 2, 0), np.asarray(Image.open(samples[4].image)))


# PyTorch waits five seconds for a worker that failed
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_image_spoilt_meanwhile_is_named(tmp_path, workers):
    samples = make_samples(tmp_path, 2)
    samples[1].image.write_bytes(samples[1].image.read_bytes()[:300])
    with pytest.raises(DataError, match=r"p1\.png: cannot be read"):
        list(test_loader(StepDataset(samples, KEEP, test_transform(16)), batch_size=1, workers=workers))


def test_a_mask_resized_meanwhile_is_named(tmp_path):
    samples = make_samples(tmp_path, 1)
    Image.new("L", (5, 5)).save(samples[0].mask)
    with pytest.raises(DataError, match=r"p0-mask\.png: is of another size"):
        StepDataset(samples, KEEP)[0, 0]


# --- training batches ---------------------------------------------------------------------------------------


def test_workers_change_nothing(dataset):
    runs = [list(train_loader(dataset, batch_size=4, iterations=range(1, 6), workers=n)) for n in (0, 1, 2)]
    assert len(runs[0]) == 5
    for run in runs[1:]:
        assert all(same(a, b) for a, b in zip(runs[0], run, strict=True))


class ProcessIds(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, position):
        return os.getpid()


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system cannot tell who sent a signal")
def test_a_worker_outlives_every_signal_but_that_of_its_own_run():
    answers = iter(DataLoader(ProcessIds(), batch_size=None, num_workers=1, worker_init_fn=outlive_signals))
    pid = next(answers)
    (worker,) = (child for child in multiprocessing.active_children() if child.pid == pid)
    for name in ("TERM", "INT"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    assert list(islice(answers, 10)) == [worker.pid] * 10
    time.sleep(0.5)  # a signal that comes while one of its kind is pending is lost
    worker.terminate()
    worker.join(timeout=30)
    assert worker.exitcode == 0


def test_an_epoch_is_a_permutation_and_each_is_another(dataset):
    batches = positions(train_loader(dataset, batch_size=4, iterations=range(1, 10), seed=5))
    epochs = [list(chain(*batches[start : start + 3])) for start in (0, 3, 6)]
    for epoch in epochs:
        assert len(set(epoch)) == 12
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert positions(train_loader(dataset, batch_size=4, iterations=range(1, 4), seed=6)) != batches[:3]


def test_a_resumed_run_sees_the_same_batches(dataset):
    whole = list(train_loader(dataset, batch_size=4, iterations=range(1, 8)))
    rest = list(train_loader(dataset, batch_size=4, iterations=range(5, 8)))
    assert all(same(a, b) for a, b in zip(whole[4:], rest, strict=True))


def test_a_batch_may_come_twice(dataset):
    loader = train_loader(dataset, batch_size=4, iterations=range(1, 5), batch_of=lambda t: (t + 1) // 2)
    first, again, second, _ = loader
    assert same(first, again) and not same(first, second)


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 3), (2, 3), (3, 2)])
def test_ranks_and_micro_batches_share_the_global_batch(dataset, world, accumulate):
    options = {"batch_size": 12, "iterations": range(1, 4)}
    whole = positions(train_loader(dataset, **options))
    ranks = [
        positions(train_loader(dataset, **options, accumulate=accumulate, rank=rank, world=world))
        for rank in range(world)
    ]
    for iteration, batch in enumerate(whole):
        micro = slice(iteration * accumulate, (iteration + 1) * accumulate)
        parts = [ranks[rank][micro][a] for a in range(accumulate) for rank in range(world)]
        assert list(chain(*parts)) == batch
        assert {len(part) for part in parts} == {12 // (world * accumulate)}


def test_length_counts_micro_batches(dataset):
    assert len(train_loader(dataset, batch_size=4, accumulate=2, iterations=range(3, 8))) == 10


def test_too_few_images():
    assert iterations_per_epoch(25, 12) == 2
    with pytest.raises(DataError, match=r"step 4 has 11 training images.*train\.batch_size"):
        iterations_per_epoch(11, 12, step=4)


def test_batch_that_cannot_be_cut(dataset):
    with pytest.raises(ValueError, match="multiple of 3"):
        train_loader(dataset, batch_size=4, iterations=[1], world=3)


# --- evaluation batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (4, 0), (16, 0), (2, 2)])
def test_evaluation_sees_every_image_once(samples, world, workers):
    dataset = StepDataset(samples, KEEP, test_transform(16))
    seen = [
        positions(test_loader(dataset, batch_size=3, rank=r, world=world, workers=workers))
        for r in range(world)
    ]
    assert sorted(position for rank in seen for batch in rank for position in batch) == list(range(13))


def test_whole_images_of_one_size_make_batches(samples):
    batches = list(test_loader(StepDataset(samples, KEEP), batch_size=8))
    assert [images.shape for images, _ in batches] == [(8, 3, 30, 40), (5, 3, 30, 40)]


def test_whole_images_of_different_sizes(tmp_path):
    dataset = StepDataset(make_samples(tmp_path, 7, sizes=((40, 30), (30, 40), (20, 20))), KEEP)
    batches = positions(test_loader(dataset, batch_size=2))
    assert batches == [[0, 3], [6], [1, 4], [2, 5]]
