"""What each norm makes a network keep for the backward pass."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from models.norm import ABN, LEAKY_SLOPE
from models.segmenter import Segmenter, build_segmenter
from scripts.benchmarks.measure import Measurement, Options, Target, channels_last, ratio, saved_bytes, say

NORMS = ("abn", "iabn", "abn_lean")
SYNCHRONISED = "abn on two ranks"
TARGETS = {"iabn": Target(high=0.65), SYNCHRONISED: Target(high=0.7)}
BATCH = 2  # the norm of the pooled branch needs two images to train
NUM_CLASSES = 21


def memory(options: Options) -> list[Measurement]:
    """Bytes saved for backward per image, against nn.BatchNorm2d and activations that are not in place."""
    body, crop = ("resnet_tiny", 64) if options.quick else ("resnet101", 512)
    images = torch.zeros(BATCH, 3, crop, crop).contiguous(memory_format=torch.channels_last)
    bytes_per_image, problems = {}, {}
    for norm in ("plain", *NORMS):
        say(f"  {norm}")
        try:
            model = with_plain_norms(network(body, "abn")) if norm == "plain" else network(body, norm)
        except ValueError as error:  # an unknown norm, or its package is not installed
            problems[norm] = str(error).partition(". ")[0]
        else:
            with nothing_in_place() if norm == "plain" else nullcontext():
                bytes_per_image[norm] = [saved_bytes(model, images) / BATCH]
    say(f"  {SYNCHRONISED}")
    bytes_per_image[SYNCHRONISED] = [synchronised_bytes(body, crop)]
    what = "bytes saved for backward, {} / BatchNorm2d + LeakyReLU, " + f"{body} at {crop}"
    return [
        Measurement(what.format(norm), note=problems[norm])
        if norm in problems
        else ratio(what.format(norm), bytes_per_image, norm, "plain", TARGETS.get(norm), raw_unit="bytes")
        for norm in (*NORMS, SYNCHRONISED)
    ]


def synchronised_bytes(body: str, crop: int) -> float:
    """Per image, by two processes with an image each."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(count_on_a_rank, (folder, body, crop), nprocs=2)
        return sum(int(path.read_text()) for path in Path(folder).glob("*.bytes")) / 2


def count_on_a_rank(rank: int, folder: str, body: str, crop: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    images = torch.zeros(1, 3, crop, crop).contiguous(memory_format=torch.channels_last)
    kept = saved_bytes(network(body, "abn", dist.group.WORLD), images)
    (Path(folder) / f"{rank}.bytes").write_text(str(kept))
    dist.destroy_process_group()


def network(body: str, norm: str, group: dist.ProcessGroup | None = None) -> Segmenter:
    model = build_segmenter(body, norm=norm, group=group)
    model.add_classes(NUM_CLASSES)
    return channels_last(model).train()


def nothing_in_place():
    """The activations after a sum too, which in our blocks are in place."""
    leaky_relu = F.leaky_relu
    return mock.patch.object(F, "leaky_relu", lambda x, slope, inplace=False: leaky_relu(x, slope))


def with_plain_norms(model: Segmenter) -> Segmenter:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, ABN):
                setattr(module, name, plain_norm(child))
    return model


def plain_norm(norm: ABN) -> nn.Module:
    batch_norm = nn.BatchNorm2d(norm.num_features)
    if norm.activation == "identity":
        return batch_norm
    return nn.Sequential(batch_norm, nn.LeakyReLU(LEAKY_SLOPE))
