"""The losses of plain.py from the small logits of student and teacher: the same values and gradients, faster
and without full-size temporaries.

A loss of logits that are not enlarged yet (models/upsample.py) is noted down only, as a `Pending` sum of
pixel terms. The sum can be weighed and added to others. Who needs its value has all of its terms evaluated in
one walk over the pixels, a piece at a time: the scores of the piece are enlarged, every term adds its value
and its part of the gradient, and the gradient is made small again. No tensor holds more than a piece at full
size. A loss of an ordinary tensor is evaluated at once, by the same code.

The gradient is written out by hand from the terms' formulas. In all of them the student's scores z appear in
log-sums over groups of classes and in products with something known, a label or the teacher's probabilities:

    term = sum over pixels of  sum_S coefficient_S * log sum_{c in S} exp(z_c)  -  sum_c known_c * z_c

so exponentials and log-sums are taken once for all terms. The operators are matrix products, reductions and
what works place by place: on every device they give the same bits again. No second derivative: whoever needs
it takes `train.losses=plain`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from data.protocols import IGNORE_INDEX
from methods.losses.plain import feature_distillation, foreground_cross_entropy, local_pod, num_pixels
from models.upsample import Enlarged, Late, Maps, maps

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
    return _noted(logits, _CrossEntropy(labels, _count(labels, mean_over)))


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, mean_over: str = "all") -> Tensor:
    return _noted(logits, _CrossEntropy(labels, _count(labels, mean_over), weights=weights))


def unbiased_cross_entropy(logits: Tensor, labels: Tensor, num_old: int, mean_over: str = "all") -> Tensor:
    if num_old == 1:
        return cross_entropy(logits, labels, mean_over)
    return _noted(logits, _CrossEntropy(labels, _count(labels, mean_over), num_old))


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return _noted(student, _Distillation(teacher))


def unbiased_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return _noted(student, _UnbiasedDistillation(teacher))


def binary_cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    return _noted(logits, _BinaryCrossEntropy(labels, _count(labels, mean_over)))


def binary_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return _noted(student, _BinaryDistillation(teacher))


def confidence(logits: Tensor) -> Tensor:
    return _noted(logits, _Confidence(logits.shape))


def _noted(logits: Any, term: Term) -> Any:
    pending = Pending(logits, [(1.0, term)])
    return pending if isinstance(logits, Enlarged) else pending.tensor


# ------------------------------------------------------------------------------------------- pieces and terms

# Groups of classes are the background, the old foreground and the new classes.
Groups = tuple[int, ...]
ALL, OLD, BACKGROUND_OR_NEW = (0, 1, 2), (0, 1), (0, 2)


class Piece:
    """The student's scores (b, C, rows, columns) in a part of the images, what terms ask of them,
    and what they add up.
    """

    def __init__(self, scores: Tensor, num_old: int) -> None:
        self.scores = scores
        self.classes = slice(0, 1), slice(1, num_old), slice(num_old, None)  # by group
        self.coefficients: dict[Groups, Tensor | float] = {}
        self.known: list[tuple[slice, Tensor, float]] = []  # classes, values, their factor

    @cached_property
    def _groups(self) -> tuple[Tensor, list[Tensor], dict[Groups, Tensor]]:
        """exp(z_c - the largest of its group), the sums of these by group, and log-sums by groups."""
        exponentials = torch.empty_like(self.scores)
        sums: list[Tensor] = []
        log_sums: dict[Groups, Tensor] = {}
        for group, classes in enumerate(self.classes):
            scores, out = self.scores[:, classes], exponentials[:, classes]
            if scores.shape[1] > 1:
                largest = scores.amax(dim=1)
                total = torch.sub(scores, largest[:, None], out=out).exp_().sum(dim=1)
                log_sum = total.log().add_(largest)
            else:
                total = self.scores.new_ones(())
                log_sum = scores[:, 0] if scores.shape[1] else self.scores.new_full((), -torch.inf)
                out.fill_(1.0)
            sums.append(total)
            log_sums[group,] = log_sum
        return exponentials, sums, log_sums

    def log_sum(self, groups: Groups) -> Tensor:
        """log sum_c exp(z_c) over the classes of the groups, for each pixel."""
        *_, log_sums = self._groups
        if groups not in log_sums:
            log_sums[groups] = torch.logaddexp(self.log_sum(groups[:-1]), self.log_sum(groups[-1:]))
        return log_sums[groups]

    def add(self, groups: Groups, coefficient: Tensor | float) -> None:
        """A term has coefficient * log_sum(groups)."""
        self.coefficients[groups] = self.coefficients.get(groups, 0.0) + coefficient

    def subtract(self, classes: slice, known: Tensor, factor: float = 1.0) -> None:
        """A term has -factor * known_c * z_c for each of the classes,
        or something else with that gradient.
        """
        self.known.append((classes, known, factor))

    def gradient(self) -> Tensor:
        """Of all that was added and subtracted; the piece is used up."""
        if self.coefficients:
            gradient, sums, _ = self._groups
            for group, classes in enumerate(self.classes):
                if gradient[:, classes].shape[1]:
                    gradient[:, classes].mul_((self._share(group) / sums[group])[:, None])
        else:
            gradient = torch.zeros_like(self.scores)
        for classes, known, factor in self.known:
            gradient[:, classes].sub_(known, alpha=factor)
        return gradient

    def _share(self, group: int) -> Tensor:
        """Return the derivative by the log-sum of a group."""
        log_sum = self.log_sum((group,))
        share = torch.zeros_like(log_sum)
        for groups, coefficient in self.coefficients.items():
            if group in groups:
                share += (log_sum - self.log_sum(groups)).exp_().mul_(coefficient)
        return share


class Term:
    """A mean over pixels, or another sum over them. It has a value when it was evaluated."""

    num_old: int | None = None  # where the groups of classes are divided; None: anywhere
    value: Tensor

    def visit(self, piece: Piece, images: slice, rows: slice, weight: float) -> Tensor:
        """Return the value of a piece, which is told what the term times the weight consists of."""
        raise NotImplementedError


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


def _count(labels: Tensor, mean_over: str) -> Tensor | int:
    """Return the denominator of a pixel mean: all pixels, or the valid ones as plain.py counts them."""
    return labels.numel() if mean_over == "all" else num_pixels(labels, mean_over)


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


# ------------------------------------------------------------------------------------------- their evaluation


class Pending(Late):
    """A weighed sum of terms on the same scores, and of numbers and tensors:
    a scalar tensor as soon as somebody asks.
    """

    def __init__(
        self, scores: Tensor | Enlarged, terms: Sequence[tuple[float, Term]], rest: Any = 0.0
    ) -> None:
        self.scores, self.terms, self.rest = scores, terms, rest

    @cached_property
    def tensor(self) -> Tensor:
        scores = maps(self.scores)
        if torch.is_grad_enabled() and scores.source.requires_grad:
            gradient = evaluate(scores, self.terms)
            return _WithGradient.apply(scores.source, gradient, self._value()) + self.rest
        evaluate(scores, self.terms, with_gradient=False)
        return self._value() + self.rest

    def detach(self) -> Tensor:
        """Return the value; it is not computed again if all terms were evaluated in another sum."""
        if all(hasattr(term, "value") for _, term in self.terms):
            return torch.as_tensor(self._value() + self.rest).detach()
        return self.tensor.detach()

    def _value(self) -> Tensor:
        return torch.stack([weight * term.value for weight, term in self.terms]).sum()

    def __mul__(self, factor: Any) -> Any:
        if not isinstance(factor, int | float):
            return self.tensor * factor
        return Pending(self.scores, [(factor * w, term) for w, term in self.terms], factor * self.rest)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Pending) and other.scores is self.scores:
            return Pending(self.scores, [*self.terms, *other.terms], self.rest + other.rest)
        return Pending(self.scores, self.terms, self.rest + other)

    def __truediv__(self, divisor: Any) -> Any:
        return self * (1 / divisor)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __rmul__, __radd__ = __mul__, __add__


def evaluate(scores: Maps, terms: Sequence[tuple[float, Term]], with_gradient: bool = True) -> Tensor | None:
    """Gives every term its value; returns the gradient of their weighed sum."""
    divisions = {term.num_old for _, term in terms if term.num_old} or {1}
    if len(divisions) > 1:  # no method divides the classes in two ways
        raise ValueError(f"terms with {divisions} old classes cannot be evaluated together")
    num_old = divisions.pop()
    gradient = scores.empty_gradient() if with_gradient else None

    def visit(images: slice, rows: slice) -> Tensor:
        piece = Piece(scores.piece(images, rows), num_old)
        values = [term.visit(piece, images, rows, weight) for weight, term in terms]
        if gradient is not None:
            scores.put(gradient, images, rows, piece.gradient())
        return torch.stack(values)

    values = sum(scores.walk(visit), scores.source.new_zeros(len(terms)))
    for (_, term), value in zip(terms, values, strict=True):
        term.value = value
    return None if gradient is None else scores.of_source(gradient)


class _WithGradient(Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # create_graph=True: a second derivative would silently lack these terms
            raise RuntimeError("the fused losses cannot be differentiated twice: set train.losses=plain")
        (gradient,) = ctx.saved_tensors
        return gradient * g, None, None
