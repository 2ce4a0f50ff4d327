"""Confusion matrix over non-void pixels, and IoU = tp / (tp + fp + fn)."""

import torch
import torch.distributed as dist
from torch import Tensor

from data.protocols import IGNORE_INDEX


class ConfusionMatrix:
    """Counts on the device; rows are the truth, columns the prediction. Nothing is copied to the host until asked."""

    def __init__(self, num_classes: int, device: torch.device | str = "cpu"):
        self.num_classes = num_classes
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)

    def update(self, labels: Tensor, predictions: Tensor) -> None:
        """Add pixels; both tensors of one shape, integers, labels may hold IGNORE_INDEX."""
        valid = labels != IGNORE_INDEX
        pairs = labels[valid].long() * self.num_classes + predictions[valid].long()
        self.counts += torch.bincount(pairs, minlength=self.num_classes**2).reshape(self.counts.shape)

    def sum_over_ranks(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.counts)

    def iou(self) -> Tensor:
        """Per class on the CPU, NaN where the class occurs neither in truth nor in prediction."""
        counts = self.counts.cpu().double()
        hit = counts.diagonal()
        return hit / (counts.sum(0) + counts.sum(1) - hit)
