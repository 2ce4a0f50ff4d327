"""The losses of MiB, from the logits to their gradient: what they take beside the
formulas as one would type them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from data.protocols import IGNORE_INDEX
from methods.losses import fused
from methods.losses import plain as plain
from scripts.benchmarks.measure import (
    Measurement,
    Options,
    Samples,
    Target,
    interleave,
    peak_bytes,
    ratio,
    say,
    timed,
)

NUM_OLD, NUM_CLASSES = 20, 21
SIZES = ((8, 256), (2, 512))  # images, side
KEEP = 10.0
Losses = tuple[Callable[..., Tensor], Callable[..., Tensor]]  # segmentation, retention


def typed_cross_entropy(logits: Tensor, labels: Tensor, num_old: int) -> Tensor:
    """MiB Eq. 5, line by line."""
    log_p = logits.log_softmax(dim=1)
    any_old = log_p[:, :num_old].logsumexp(dim=1, keepdim=True)
    merged = torch.where(labels == IGNORE_INDEX, labels, (labels - (num_old - 1)).clamp(min=0))
    log_p = torch.cat((any_old, log_p[:, num_old:]), dim=1)
    return F.nll_loss(log_p, merged, ignore_index=IGNORE_INDEX, reduction="none").mean()


def typed_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """MiB Eq. 8, line by line."""
    num_old = teacher.shape[1]
    log_p, q = student.log_softmax(dim=1), teacher.softmax(dim=1)
    background = torch.cat((log_p[:, :1], log_p[:, num_old:]), dim=1).logsumexp(dim=1)
    per_pixel = q[:, 0] * background + (q[:, 1:] * log_p[:, 1:num_old]).sum(dim=1)
    return -per_pixel.mean() / num_old


VARIANTS: dict[str, Losses] = {
    "typed": (typed_cross_entropy, typed_distillation),
    "plain": (plain.unbiased_cross_entropy, plain.unbiased_distillation),
    "fused": (fused.unbiased_cross_entropy, fused.unbiased_distillation),
}
TARGETS = {"fused": (Target(low=4), Target(high=1 / 3))}  # of the losses that are used by default


def example(images: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the teacher's logits, and labels: background, the new class, some void."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(images, NUM_CLASSES, side, side, generator=generator).requires_grad_()
    teacher = torch.randn(images, NUM_OLD, side, side, generator=generator)
    values = torch.tensor([0, 0, 0, NUM_OLD, NUM_OLD, IGNORE_INDEX])
    return logits, teacher, values[torch.randint(6, (images, side, side), generator=generator)]


def gradient(variant: Losses, logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    segmentation, retention = variant
    loss = segmentation(logits, labels, NUM_OLD) + KEEP * retention(logits, teacher)
    return torch.autograd.grad(loss, logits)[0]


def compiled(*tensors: Tensor) -> Losses | None:
    """Return the plain losses by torch.compile, which needs a C++ compiler; None where it fails."""
    segmentation, retention = VARIANTS["plain"]
    variant = torch.compile(segmentation, dynamic=False), torch.compile(retention, dynamic=False)
    try:
        gradient(variant, *tensors)
    except Exception as error:  # compilers fail in many ways
        say(f"  torch.compile: {str(error).splitlines()[0]}")
        return None
    return variant


def losses(options: Options) -> list[Measurement]:
    """Unbiased cross-entropy and distillation, forward and backward."""
    measurements = []
    for images, side in ((1, 32),) if options.quick else SIZES:
        tensors = example(images, side)
        variants = VARIANTS | {"compiled": compiled(*tensors)}
        actions = {
            name: partial(gradient, variant, *tensors)
            for name, variant in variants.items()
            if variant is not None
        }
        seconds = interleave({name: timed(action) for name, action in actions.items()}, options.times(15))
        peaks: Samples = {name: [peak_bytes(action)] for name, action in actions.items()}
        size = f"{images}x{NUM_CLASSES}x{side}x{side}"
        for name in list(variants)[1:]:
            measurements += compare(name, size, seconds, peaks)
    return measurements


def compare(name: str, size: str, seconds: Samples, peaks: Samples) -> list[Measurement]:
    faster, smaller = TARGETS.get(name, (None, None))
    speed, memory = f"{size}: {name} faster than typed", f"{size}: peak memory {name} / typed"
    if name not in seconds:
        return [
            Measurement(what, note="torch.compile failed (is there a C++ compiler?)")
            for what in (speed, memory)
        ]
    return [
        ratio(speed, seconds, "typed", name, faster),
        ratio(memory, peaks, name, "typed", smaller, raw_unit="bytes"),
    ]
