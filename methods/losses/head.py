"""The loss head: from the small logits of student and teacher to the terms of the objective and
the gradient of the small logits.

A loss of fused.py that is given logits which are not enlarged yet (models/upsample.py) is noted down only, as
a `Pending` sum of pixel terms. The sum can be weighed and added to others. Who needs its value has all of its
terms evaluated in one walk over the pixels, a piece at a time: the scores of the piece are enlarged, every
term adds its value and its part of the gradient, and the gradient is made small again. No tensor holds more
than a piece at full size.

The gradient is written out by hand from the terms' formulas. In all of them the student's scores z appear in
log-sums over groups of classes and in products with something known, a label or the teacher's probabilities:

    term = sum over pixels of  sum_S coefficient_S * log sum_{c in S} exp(z_c)  -  sum_c known_c * z_c

so exponentials and log-sums are taken once for all terms. The operators are matrix products, reductions and
what works place by place: on every device they give the same bits again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from models.upsample import Enlarged, Late, interpolations

PIECE = {"cpu": 1_000_000}  # scores that are worked on at once: they stay in the cache of a core
LARGE_PIECE = 1 << 26  # elsewhere: a quarter of a gigabyte, and few kernels

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


class Maps:
    """Scores (B, C, H, W) piece by piece, and their gradient."""

    def __init__(self, scores: Tensor) -> None:
        self.source, self.shape = scores, scores.shape
        self.scores = scores.detach()

    def piece(self, images: slice, rows: slice) -> Tensor:
        return self.scores[images, :, rows]

    def empty_gradient(self) -> Tensor:
        return torch.empty_like(self.scores)

    def put(self, gradient: Tensor, images: slice, rows: slice, of_piece: Tensor) -> None:
        gradient[images, :, rows] = of_piece

    def of_source(self, gradient: Tensor) -> Tensor:
        return gradient


class EnlargedMaps(Maps):
    """The same of scores that are not enlarged yet.

    They are enlarged to (B, C, H, w) at once, the rest by pieces.
    """

    def __init__(self, scores: Enlarged) -> None:
        self.source, self.shape = scores.small, scores.shape
        self.rows, columns = interpolations(self.source, (self.shape[2], self.shape[3]))
        self.columns, self.wider = columns, columns.mT.contiguous()

    @cached_property
    def scores(self) -> Tensor:  # type: ignore[override]
        return self.rows @ self.source.detach()

    def piece(self, images: slice, rows: slice) -> Tensor:
        tall = self.scores[images, :, rows]
        return (tall.reshape(-1, tall.shape[-1]) @ self.wider).view(*tall.shape[:3], -1)  # one product

    def put(self, gradient: Tensor, images: slice, rows: slice, of_piece: Tensor) -> None:
        gradient[images, :, rows] = of_piece @ self.columns

    def of_source(self, gradient: Tensor) -> Tensor:
        return self.rows.mT @ gradient


def maps(scores: Tensor | Enlarged) -> Maps:
    return EnlargedMaps(scores) if isinstance(scores, Enlarged) else Maps(scores)


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
    values = [scores.source.new_zeros(()) for _ in terms]
    for images, rows in pieces(scores.shape, scores.source.device.type):
        piece = Piece(scores.piece(images, rows), num_old)
        for number, (weight, term) in enumerate(terms):
            values[number] += term.visit(piece, images, rows, weight)
        if gradient is not None:
            scores.put(gradient, images, rows, piece.gradient())
    for (_, term), value in zip(terms, values, strict=True):
        term.value = value
    return None if gradient is None else scores.of_source(gradient)


def pieces(shape: Sequence[int], device: str) -> Iterator[tuple[slice, slice]]:
    """Images and rows of each piece: several images, one, or a strip of one."""
    num_images, num_classes, height, width = shape
    at_once = PIECE.get(device, LARGE_PIECE)
    images = max(1, at_once // (num_classes * height * width))
    strips = -(-num_classes * height * width // at_once) if images == 1 else 1
    rows = -(-height // strips)
    for first in range(0, num_images, images):
        for top in range(0, height, rows):
            yield slice(first, first + images), slice(top, top + rows)


class _WithGradient(Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True: the second derivative would silently lack these terms
            raise RuntimeError("the fused losses cannot be differentiated twice: set train.losses=plain")
        (gradient,) = ctx.saved_tensors
        return gradient * g, None, None
