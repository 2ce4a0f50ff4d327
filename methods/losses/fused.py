"""The losses of plain.py for the loss head: the same values and gradients,
faster and without full-size temporaries.

A loss of logits that are not enlarged yet is `Pending`, see head.py: it is evaluated together with the
others. A loss of an ordinary tensor is evaluated at once, by the same code. No second derivative: whoever
needs it takes `train.losses=plain`.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.protocols import IGNORE_INDEX
from methods.losses.head import ALL, BACKGROUND_OR_NEW, OLD, Pending, Piece, Term, maps
from methods.losses.plain import feature_distillation, foreground_cross_entropy, local_pod, num_pixels
from models.upsample import Enlarged

__all__ = [
    "binary_cross_entropy",
    "binary_distillation",
    "confidence",
    "cross_entropy",
    "distillation",
    "feature_distillation",
    "foreground_cross_entropy",
    "local_pod",
    "unbiased_cross_entropy",
    "unbiased_distillation",
    "weighted_cross_entropy",
]


def cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    return _noted(logits, _CrossEntropy(labels, num_pixels(labels, mean_over)))


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, mean_over: str = "all") -> Tensor:
    return _noted(logits, _CrossEntropy(labels, num_pixels(labels, mean_over), weights=weights))


def unbiased_cross_entropy(logits: Tensor, labels: Tensor, num_old: int, mean_over: str = "all") -> Tensor:
    if num_old == 1:
        return cross_entropy(logits, labels, mean_over)
    return _noted(logits, _CrossEntropy(labels, num_pixels(labels, mean_over), num_old))


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return _noted(student, _Distillation(teacher))


def unbiased_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return _noted(student, _UnbiasedDistillation(teacher))


def binary_cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    return _noted(logits, _BinaryCrossEntropy(labels, num_pixels(labels, mean_over)))


def binary_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return _noted(student, _BinaryDistillation(teacher))


def confidence(logits: Tensor) -> Tensor:
    return _noted(logits, _Confidence(logits.shape))


def _noted(logits: Any, term: Term) -> Any:
    pending = Pending(logits, [(1.0, term)])
    return pending if isinstance(logits, Enlarged) else pending.tensor


class _CrossEntropy(Term):
    """log-sum over all - z_y; if `num_old` is given, a label below it says "one of the old":
    log-sum over all - over the old.
    """

    def __init__(
        self, labels: Tensor, count: Tensor | int, num_old: int | None = None, weights: Tensor | None = None
    ) -> None:
        self.labels, self.count, self.num_old, self.weights = labels, count, num_old, weights

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        labels, first = self.labels[images, rows], self.num_old or 0
        valid, named = labels != IGNORE_INDEX, _named(labels, first)
        factor = valid.to(piece.scores.dtype) / self.count
        if self.weights is not None:
            factor = factor * self.weights[images, None, None]
        target = piece.scores.gather(1, labels.where(named, 0)[:, None])[:, 0]
        if first:
            target = torch.where(named, target, piece.log_sum(OLD))
            piece.add(OLD, -weight * factor.masked_fill(named, 0.0))
        piece.add(ALL, weight * factor)
        piece.subtract(*_one_hot(labels, first, piece.scores, weight * factor))
        return ((piece.log_sum(ALL) - target) * factor).sum()


class _Distillation(Term):
    """With q = softmax(teacher) summing to one:  log-sum over the old - sum_{c < num_old} q_c z_c."""

    def __init__(self, teacher: Any) -> None:
        self.teacher = maps(teacher)
        self.num_old = self.teacher.shape[1]
        self.count = self.num_old * _num_pixels(self.teacher.shape)

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        q, old = self.teacher.piece(images, rows).softmax(dim=1), slice(0, self.num_old)
        piece.add(OLD, weight / self.count)
        piece.subtract(old, q, weight / self.count)
        return (piece.log_sum(OLD).sum() - _dot(q, piece.scores[:, old])) / self.count


class _UnbiasedDistillation(_Distillation):
    """log-sum over all - q_0 log-sum over background and new - sum_{1 <= c < num_old} q_c z_c."""

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        q, foreground = self.teacher.piece(images, rows).softmax(dim=1), slice(1, self.num_old)
        piece.add(ALL, weight / self.count)
        piece.add(BACKGROUND_OR_NEW, q[:, 0] * (-weight / self.count))
        piece.subtract(foreground, q[:, 1:], weight / self.count)
        log_sums = piece.log_sum(ALL) - q[:, 0] * piece.log_sum(BACKGROUND_OR_NEW)
        return (log_sums.sum() - _dot(q[:, 1:], piece.scores[:, foreground])) / self.count


class _BinaryCrossEntropy(Term):
    """sum_c log(1 + exp z_c) - z_y."""

    def __init__(self, labels: Tensor, count: Tensor | int) -> None:
        self.labels, self.count = labels, count

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        labels, z = self.labels[images, rows], piece.scores
        valid = labels != IGNORE_INDEX
        factor = valid.to(z.dtype) / self.count
        target = z.gather(1, labels.where(valid, 0)[:, None])[:, 0]
        piece.subtract(slice(None), z.sigmoid().mul_(factor[:, None]), -weight)
        piece.subtract(*_one_hot(labels, 0, z, weight * factor))
        return ((-F.logsigmoid(-z).sum(dim=1) - target) * factor).sum()


class _BinaryDistillation(Term):
    """sum_{c < num_old} log(1 + exp z_c) - q_c z_c, with q the sigmoids of the teacher."""

    def __init__(self, teacher: Any) -> None:
        self.teacher = maps(teacher)
        self.count = _num_pixels(self.teacher.shape)

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        old = slice(0, self.teacher.shape[1])
        q, z = self.teacher.piece(images, rows).sigmoid(), piece.scores[:, old]
        piece.subtract(old, q - z.sigmoid(), weight / self.count)
        return (-F.logsigmoid(-z).sum() - _dot(q, z)) / self.count


class _Confidence(Term):
    """log C + sum_c p_c log p_c."""

    def __init__(self, shape: torch.Size) -> None:
        self.num_classes, self.count = shape[1], _num_pixels(shape)

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        log_p = piece.scores - piece.log_sum(ALL)[:, None]
        p = log_p.exp()
        negative_entropy = (p * log_p).sum(dim=1)
        piece.subtract(slice(None), p.mul_(log_p.sub_(negative_entropy[:, None])), -weight / self.count)
        return (negative_entropy + math.log(self.num_classes)).sum() / self.count


# ----------------------------------------------------------------------------------------------------- pieces


def _num_pixels(shape: torch.Size) -> int:
    num_images, _, height, width = shape
    return num_images * height * width


def _named(labels: Tensor, first: int) -> Tensor:
    """Where a label names a class from `first` on."""
    return (labels >= first) & (labels != IGNORE_INDEX)


def _one_hot(labels: Tensor, first: int, scores: Tensor, factor: Tensor) -> tuple[slice, Tensor]:
    """Return the classes from `first` on, and the factor at the class of each pixel's label, 0 elsewhere."""
    classes = torch.arange(first, scores.shape[1], device=labels.device)
    hits = labels[:, None] == classes[:, None, None]
    return slice(first, None), torch.where(hits, factor[:, None], 0.0)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of all products, without a tensor of them."""
    return (one.flatten(1)[:, None] @ other.flatten(1)[:, :, None]).sum()
