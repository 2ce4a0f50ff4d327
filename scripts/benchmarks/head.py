"""The loss head, the folded teacher, and the iteration they are part of, against what was there before them.

One thread, and seconds of the process: what else runs on the machine does not count. Several threads, the
part `threads`, are measured by the clock.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from data.protocols import IGNORE_INDEX, protocol_steps
from methods.losses import fused, plain
from models.segmenter import Segmenter, build_segmenter
from models.upsample import Enlarged, Maps, enlarge
from scripts.benchmarks import former
from scripts.benchmarks.losses import KEEP
from scripts.benchmarks.measure import (
    Measurement,
    Options,
    Samples,
    Target,
    channels_last,
    interleave,
    peak_bytes,
    ratio,
    timed,
    torch_threads,
)
from scripts.benchmarks.training import QUICK, Trainee, begin

STRIDE = 16
# Images, classes, side; how much faster it shall be.
SIZES = ((8, 21, 256, 2.0), (2, 21, 512, 2.0), (4, 151, 512, 1.3))
# With several threads: images, classes, side, stride of the quickstart, the CPU recipe and the paper's crop.
SIZES_FOR_THREADS = ((16, 21, 64, 8), (12, 21, 128, 16), (2, 21, 512, 16))
STEPS = protocol_steps("voc", "15-1")[:2]


def head(options: Options) -> list[Measurement]:
    with torch_threads(1):
        return [*losses(options), *teacher(options), *recipe(options)]


def process_seconds(action: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.process_time()
        action()
        return time.process_time() - started

    return measure


# ----------------------------------------------------------------------------------------------------- losses


def example(images: int, classes: int, side: int, stride: int = STRIDE) -> tuple[Tensor, Tensor, Tensor]:
    """Small logits of student and teacher, and labels: background, the new class, some void."""
    generator = torch.Generator().manual_seed(0)
    small = side // stride
    logits = torch.randn(images, classes, small, small, generator=generator).requires_grad_()
    teacher = torch.randn(images, classes - 1, small, small, generator=generator)
    values = torch.tensor([0, 0, 0, classes - 1, classes - 1, IGNORE_INDEX])
    return logits, teacher, values[torch.randint(6, (images, side, side), generator=generator)]


def gradient_before(small: Tensor, small_teacher: Tensor, labels: Tensor) -> Tensor:
    size, num_old = (labels.shape[1], labels.shape[2]), small_teacher.shape[1]
    logits, teacher = former.enlarge(small, size), former.enlarge(small_teacher, size)
    segmentation = former.unbiased_cross_entropy(logits, labels, num_old)
    loss = segmentation + KEEP * former.unbiased_distillation(logits, teacher)
    return torch.autograd.grad(loss, small)[0]


def gradient_now(small: Tensor, small_teacher: Tensor, labels: Tensor) -> Tensor:
    size, num_old = (labels.shape[1], labels.shape[2]), small_teacher.shape[1]
    logits, teacher = Enlarged(small, size), Enlarged(small_teacher, size)
    segmentation = fused.unbiased_cross_entropy(logits, labels, num_old)  # type: ignore[arg-type]  # as good as a tensor
    loss = segmentation + KEEP * fused.unbiased_distillation(logits, teacher)  # type: ignore[arg-type]
    return torch.autograd.grad(loss.tensor, small)[0]  # type: ignore[attr-defined]


def gradient_of_whole(losses: Any, small: Tensor, small_teacher: Tensor, labels: Tensor) -> Tensor:
    """The same from logits of full size, whose operators all threads share."""
    size, num_old = (labels.shape[1], labels.shape[2]), small_teacher.shape[1]
    logits, teacher = enlarge(small, size), enlarge(small_teacher, size)
    with mock.patch.object(Maps, "walk", piece_by_piece):
        segmentation = losses.unbiased_cross_entropy(logits, labels, num_old)
        loss = segmentation + KEEP * losses.unbiased_distillation(logits, teacher)
        return torch.autograd.grad(loss, small)[0]


def piece_by_piece(scores: Maps, visit: Callable[[slice, slice], Tensor]) -> list[Tensor]:
    return [visit(*piece) for piece in scores.pieces()]


def threads(options: Options) -> list[Measurement]:
    """MiB's two terms with as many threads as torch has been given: in the head each works on pieces of its
    own.
    """
    measurements = []
    for images, classes, side, stride in ((1, 5, 32, 16),) if options.quick else SIZES_FOR_THREADS:
        tensors = example(images, classes, side, stride)
        actions = {
            "fused": partial(gradient_of_whole, fused, *tensors),
            "plain": partial(gradient_of_whole, plain, *tensors),
            "head": partial(gradient_now, *tensors),
        }
        samples = interleave({name: timed(a) for name, a in actions.items()}, options.times(31))
        what = f"{torch.get_num_threads()} threads, {images}x{classes}x{side}x{side}: head faster than"
        measurements += [
            ratio(f"{what} fused losses of whole logits", samples, "fused", "head", Target(low=1.0)),
            ratio(f"{what} plain losses", samples, "plain", "head", Target(low=1.0)),
        ]
    return measurements


def losses(options: Options) -> list[Measurement]:
    """MiB's two terms from small logits to the gradient of small logits."""
    measurements = []
    for images, classes, side, faster in ((1, 5, 32, 1.0),) if options.quick else SIZES:
        tensors = example(images, classes, side)
        actions = {"before": partial(gradient_before, *tensors), "head": partial(gradient_now, *tensors)}
        repeats = options.times(15 if classes < 100 else 7)
        samples = interleave({name: process_seconds(a) for name, a in actions.items()}, repeats)
        peaks: Samples = {name: [peak_bytes(action)] for name, action in actions.items()}
        what = f"{images}x{classes}x{side}x{side}: "
        measurements += [
            ratio(f"{what}losses faster than before", samples, "before", "head", Target(low=faster)),
            ratio(
                f"{what}peak memory / before", peaks, "head", "before", Target(high=0.25), raw_unit="bytes"
            ),
        ]
    return measurements


# ----------------------------------------------------------------------------------------- teacher, iteration


def teacher(options: Options) -> list[Measurement]:
    """Return a pass of the teacher."""
    bodies = ("resnet_tiny",) if options.quick else ("mobilenet_v2", "resnet50")
    measurements = []
    for body in bodies:
        now, before = build_segmenter(body), network_as_before(body)
        for network in (now, before):
            network.add_classes(16)
        images = torch.randn(12, 3, 128, 128).contiguous(memory_format=torch.channels_last)
        variants = {"before": before.frozen_copy(), "folded": now.teacher()}
        actions = {name: partial(channels_last(model), images, False) for name, model in variants.items()}
        samples = interleave({name: process_seconds(a) for name, a in actions.items()}, options.times(25))
        target = Target(low=1.25) if body == "mobilenet_v2" else None
        measurements.append(
            ratio(f"{body}: teacher's pass faster than before", samples, "before", "folded", target)
        )
    return measurements


def plain_convolutions():
    return mock.patch("models.segmenter.use_pointwise", lambda network: None)


def network_as_before(body: str) -> Segmenter:
    with plain_convolutions():
        return build_segmenter(body)


def recipe(options: Options) -> list[Measurement]:
    """Return an iteration of MiB on the sizes of the CPU recipe."""
    overrides = (*QUICK,) if options.quick else (options.recipe, "model.pretrained=null")
    with tempfile.TemporaryDirectory() as folder:
        now = begin(folder, *overrides, "method.name=mib", steps=STEPS)
        with mock.patch.object(Segmenter, "teacher", Segmenter.frozen_copy), plain_convolutions():
            before = begin(folder, *overrides, "method.name=mib", "train.losses=plain", steps=STEPS)
    before.method.losses = former  # plain is what takes logits of full size
    actions: dict[str, Callable[[], object]] = {
        "before": partial(iterate_as_before, before),
        "now": now.iterate,
    }
    samples = interleave({name: process_seconds(a) for name, a in actions.items()}, options.times(15))
    return [
        ratio(
            "an iteration of the CPU recipe faster than before, mib",
            samples,
            "before",
            "now",
            Target(low=1.2),
        )
    ]


def iterate_as_before(trainee: Trainee) -> None:
    with mock.patch("models.segmenter.enlarge", former.enlarge):
        trainee.iterate()
