"""The objective of an iteration: micro-batches -> terms -> backward.

    loss = weights.learn * l_seg + weights.keep * sum(R)

The method says what the terms are and the phase with which two numbers they are weighed; CPR's term, if asked
for, is part of l_seg. `Placement` is where the tensors of a run live.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from data.transforms import normalise
from engine import checkpoint
from engine.ranks import Ranks
from engine.run_folder import RunError
from methods import Batch, Method, Update, Weights
from methods.losses.fused import Pending
from models.backbone import IMAGENET, Colours, colours_of
from models.segmenter import Output, Segmenter

Shown = tuple[Batch, Output | None]  # to the student, and what the teacher says of it
Terms = dict[str, Tensor]

AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Placement:
    """Where the tensors of a run live, and in which layout and precision they are used."""

    device: torch.device
    channels_last: bool
    amp: str
    colours: Colours = IMAGENET  # by which the backbone wants images normalised

    @classmethod
    def of(cls, config: Config, device: torch.device) -> "Placement":
        return cls(device, config.train.channels_last, config.train.amp, colours_of(config.model.body))

    def arrange(self, tensors: Any) -> Any:
        """Return a module or a batch of images in the memory format of the run."""
        return tensors.to(memory_format=torch.channels_last) if self.channels_last else tensors

    def images(self, images: Tensor) -> Tensor:
        """Return images as floats on the device; they travel there as uint8."""
        images = images.to(self.device, non_blocking=True)
        return self.arrange(normalise(images, torch.get_default_dtype(), *self.colours))

    def labels(self, labels: Tensor) -> Tensor:
        return labels.to(self.device, non_blocking=True).long()

    def autocast(self) -> AbstractContextManager:
        dtype = AMP_DTYPES[self.amp]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


class Objective:
    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        student: Any,  # the model, wrapped where there are other ranks
        teacher: Segmenter | None,
        method: Method,
        update: Update,
        scaler: torch.amp.GradScaler,
        batches: Iterator,
    ):
        self.ranks, self.place = ranks, Placement.of(config, ranks.device)
        self.student, self.teacher, self.method = student, teacher, method
        self.scaler, self.batches = scaler, batches
        self.num_parts, self.beta = config.train.accumulate, config.method.entropy
        self.evaluations = update.evaluations
        self.learn: Callable[..., Any] = method.learn
        self.keep: Callable[..., Any] = method.keep
        self.enlarged = config.train.losses != "fused"  # the fused losses enlarge them, a piece at a time
        if config.train.losses == "compiled":
            self.learn, self.keep = torch.compile(method.learn), torch.compile(method.keep)

    def on_next_batch(self) -> Callable[..., Terms]:
        """Return the objective on the images of one update, as a function that an update rule evaluates.

        Its value is the mean over the micro-batches.
        """
        # For rules that evaluate more than once, which also want the same dropout again.
        kept: list[Shown] = []
        randomness = checkpoint.random_state(self.place.device) if self.evaluations > 1 else None

        def evaluate(weights: Weights, *, local: bool = False, backward: bool = True) -> Terms:
            terms: Terms = {}
            if randomness is not None:
                checkpoint.set_random_state(randomness, self.place.device)
            for part, (batch, target) in enumerate(list(kept) or self._micro_batches(kept)):
                alone = self.ranks.group is not None and (local or part + 1 < self.num_parts)
                with self.student.no_sync() if alone else nullcontext():
                    segmentation, retention = self._terms(batch, target)
                    loss = weights.learn * segmentation + weights.keep * sum(retention.values())
                    if isinstance(loss, Pending):
                        loss = loss.tensor  # all terms in one walk over the pixels
                    if backward:
                        self.scaler.scale(loss / self.num_parts).backward()
                for name, value in {"seg": segmentation, **retention}.items():
                    terms[name] = terms.get(name, 0.0) + value.detach() / self.num_parts
            return terms

        return evaluate

    def _micro_batches(self, kept: list[Shown]) -> Iterator[Shown]:
        """Yield the parts of a batch with what the teacher says of them."""
        for _ in range(self.num_parts):
            images, labels, *rest = next(self.batches)
            batch = Batch(self.place.images(images), self.place.labels(labels), *rest)
            target = None
            if self.teacher is not None:
                target = ask(self.teacher, batch.images, self.place, self.enlarged)
                batch = batch._replace(labels=self.method.targets(batch.labels, target))
            if self.evaluations > 1:
                kept.append((batch, target))
            yield batch, target

    def _terms(self, batch: Batch, target: Output | None) -> tuple[Tensor, Terms]:
        """Return l_seg, and the terms of R by name."""
        with self.place.autocast():
            output = self.student(batch.images, self.enlarged)
        segmentation = self.learn(output, batch)
        retention = self.keep(output, target, batch) if target is not None else {}
        check_terms(self.method, segmentation, retention)
        if self.beta:
            segmentation = segmentation + self.beta * self.method.losses.confidence(output.logits)
        return segmentation, retention


def ask(teacher: Segmenter, images: Tensor, place: Placement, enlarged: bool = True) -> Output:
    with torch.no_grad(), place.autocast():
        return teacher(images, enlarged)


def check_terms(method: Method, segmentation: Any, retention: Any) -> None:
    """Raise an error that names the hook of a method that returns something else than it should.

    Reading shapes waits for no GPU.
    """

    def refuse(hook: str, value: Any, wanted: str) -> None:
        is_tensor = isinstance(value, Tensor)
        what = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"of type {type(value).__name__}"
        raise RunError(f"method {method.name!r}: {hook} is {what}, but must be {wanted}")

    if not isinstance(retention, dict):
        refuse("retention_losses", retention, "a dict of scalar tensors by name")
    returned = {f"retention_losses[{name!r}]": value for name, value in retention.items()}
    for hook, value in {"segmentation_loss": segmentation, **returned}.items():
        if not isinstance(value, Pending) and (not isinstance(value, Tensor) or value.dim() > 0):
            refuse(hook, value, "a scalar tensor")
