"""Confusion matrix over non-void pixels, and IoU = tp / (tp + fp + fn)."""

import torch
import torch.distributed as dist
from torch import Tensor

from data.protocols import IGNORE_INDEX

CHUNK = 2**18  # pixels counted at a time: what stays in a cache
# pixels in turn are counted apart: neighbours are mostly alike, and a count waits for the last one of its
# kind
LANES = 2


class ConfusionMatrix:
    """Counts on the device; rows are the truth, columns the prediction.

    Nothing is copied to the host until asked.
    """

    def __init__(self, num_classes: int, device: torch.device | str = "cpu"):
        assert num_classes <= IGNORE_INDEX
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.bins = num_classes * (num_classes + 1)  # one more row takes the pixels without a label
        dtype = torch.int16 if LANES * self.bins <= torch.iinfo(torch.int16).max else torch.int32
        self.lanes = (torch.arange(CHUNK, device=device) % LANES * self.bins).to(dtype)

    def update(self, labels: Tensor, predictions: Tensor) -> None:
        """Add pixels; both tensors of one shape, integers, labels may hold IGNORE_INDEX."""
        parts = zip(labels.flatten().split(CHUNK), predictions.flatten().split(CHUNK), strict=True)
        for truth, guess in parts:
            lanes = self.lanes[: len(truth)]
            rows = truth.clamp(max=self.num_classes).to(lanes.dtype)
            pairs = torch.add(lanes, rows, alpha=self.num_classes).add_(guess.to(lanes.dtype))
            counts = torch.bincount(pairs, minlength=LANES * self.bins).view(LANES, -1, self.num_classes)
            self.counts += counts.sum(0)[: self.num_classes]

    def sum_over_ranks(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.counts)

    def iou(self) -> Tensor:
        """Return the IoU of each class on the CPU, NaN where the class occurs
        neither in truth nor in prediction.
        """
        counts = self.counts.cpu().double()
        hit = counts.diagonal()
        return hit / (counts.sum(0) + counts.sum(1) - hit)
