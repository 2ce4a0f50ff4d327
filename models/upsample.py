"""Bilinear enlargement as two matrix products: what F.interpolate computes,
deterministic on every device and faster; and work on enlarged maps by pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

T = TypeVar("T")


@lru_cache(maxsize=256)
def interpolation(length: int, new_length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the matrix (new_length, length) of F.interpolate(mode="bilinear", align_corners=False)
    along one side.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # evaluation may ask first, and training keeps it for backward
        centres = (torch.arange(new_length, dtype=torch.float64, device="cpu") + 0.5) * (
            length / new_length
        ) - 0.5
        places = centres.clamp(0, length - 1)[:, None]
        distances = (places - torch.arange(length, device="cpu")).abs()
        return (1 - distances).clamp(min=0).to(device, dtype)


def interpolations(x: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the matrices of the rows and of the columns that give maps (..., H, W) another size."""
    rows, columns = (
        interpolation(*sides, x.device, x.dtype) for sides in zip(x.shape[-2:], size, strict=True)
    )
    return rows, columns


def enlarge(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (..., h, w) at another size; equal to bilinear interpolation without antialiasing,
    smaller sizes too.
    """
    if x.shape[-2:] == size:
        return x
    rows, columns = interpolations(x, size)
    with _full_precision(x.device.type):
        return (rows @ x) @ columns.mT


def _full_precision(device: str) -> AbstractContextManager:
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


class Late:
    """Stands for a tensor that is made when something is done with it which only a tensor can do."""

    @cached_property
    def tensor(self) -> Tensor:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that is not ours: copying, pickling
            raise AttributeError(name)
        return getattr(self.tensor, name)

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, place: Any) -> Tensor:
        return self.tensor[place]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_made(args), **_made(kwargs or {}))


def _made(values: Any) -> Any:
    """Return the values with their tensors made, however they are nested."""
    return tree_map_only(Late, lambda late: late.tensor, values)


def _operator(name: str) -> Any:
    return lambda self, *others: getattr(self.tensor, name)(*_made(others))


OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow rpow matmul neg lt le gt ge eq ne"
for _name in OPERATORS.split():  # Python looks them up in the class, past __getattr__
    setattr(Late, f"__{_name}__", _operator(f"__{_name}__"))


class Enlarged(Late):
    """Small maps (B, C, h, w) that stand for maps of another size: losses that can,
    work on pieces of these.
    """

    def __init__(self, small: Tensor, size: tuple[int, int]) -> None:
        self.small = small
        self.shape = torch.Size((*small.shape[:-2], *size))

    @cached_property
    def tensor(self) -> Tensor:
        return enlarge(self.small, (self.shape[-2], self.shape[-1]))


PIECE = {"cpu": 500_000}  # scores that are worked on at once: they stay in the cache of a core
LARGE_PIECE = 1 << 26  # elsewhere: a quarter of a gigabyte, and few kernels


class Maps:
    """Scores (B, C, H, W) piece by piece, and their gradient."""

    def __init__(self, scores: Tensor) -> None:
        self.source, self.shape = scores, scores.shape
        self.scores = scores.detach()

    def walk(self, visit: Callable[[slice, slice], T]) -> list[T]:
        """Return what `visit` gives for the images and rows of each piece.

        The threads of a CPU work on pieces side by side: on one piece together they would wait for each other
        after every operator, for as long as another process keeps one of them from running.
        """
        threads = torch.get_num_threads()
        if self.source.device.type != "cpu" or threads == 1:
            return [visit(*piece) for piece in self.pieces()]
        torch.set_num_threads(1)  # of the operators
        try:
            return list(_workers(threads).map(lambda piece: visit(*piece), self.pieces()))
        finally:
            torch.set_num_threads(threads)

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Images and rows of each piece: several images, one, or a strip of one; pieces are about equal."""
        num_images, num_classes, height, width = self.shape
        at_once = PIECE.get(self.source.device.type, LARGE_PIECE)
        images = max(1, at_once // (num_classes * height * width))
        images = -(-num_images // -(-num_images // images))
        strips = -(-num_classes * height * width // at_once)
        rows = -(-height // strips)
        for first in range(0, num_images, images):
            for top in range(0, height, rows):
                yield slice(first, first + images), slice(top, top + rows)

    def piece(self, images: slice, rows: slice) -> Tensor:
        return self.scores[images, :, rows]

    def empty_gradient(self) -> Tensor:
        return torch.empty_like(self.scores)

    def put(self, gradient: Tensor, images: slice, rows: slice, of_piece: Tensor) -> None:
        gradient[images, :, rows] = of_piece

    def of_source(self, gradient: Tensor) -> Tensor:
        return gradient


@lru_cache(maxsize=1)
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)  # kept: new threads would take new memory in every iteration


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
