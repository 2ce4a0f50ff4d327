"""The objective of an iteration: micro-batches -> terms -> backward.

    loss = weights.learn * l_seg + weights.keep * sum(R)

The method says what the terms are and the phase with which two numbers they are weighed; CPR's term, if asked
for, is part of l_seg.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from engine import checkpoint
from engine.placement import Placement
from engine.ranks import Ranks
from engine.run_folder import RunError
from methods import Method, Update, Weights
from methods.losses.head import Pending
from models.segmenter import Output, Segmenter

# Images, labels, what the teacher says, and which of the images come from the memory (on the CPU: nothing
# waits for a GPU).
Batch = tuple[Tensor, Tensor, Output | None, Tensor | None]
Terms = dict[str, Tensor]


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
        self.ranks, self.place = ranks, Placement.of(config.train, ranks.device)
        self.student, self.teacher, self.method = student, teacher, method
        self.scaler, self.batches = scaler, batches
        self.num_parts, self.beta = config.train.accumulate, config.method.entropy
        self.evaluations = update.evaluations
        self.segmentation_loss: Callable[..., Any] = method.segmentation_loss
        self.retention_losses: Callable[..., Any] = method.retention_losses
        # The fused losses enlarge the logits themselves, a piece at a time. Several threads of a CPU would
        # wait for each other at every piece, which takes longer by far than it saves.
        in_pieces = ranks.device.type != "cpu" or torch.get_num_threads() == 1
        self.enlarged = not (config.train.losses == "fused" and in_pieces)
        if config.train.losses == "compiled":
            self.segmentation_loss = torch.compile(method.segmentation_loss)
            self.retention_losses = torch.compile(method.retention_losses)

    def on_next_batch(self) -> Callable[..., Terms]:
        """Return the objective on the images of one update, as a function that an update rule evaluates.

        Its value is the mean over the micro-batches.
        """
        # For rules that evaluate more than once, which also want the same dropout again.
        kept: list[Batch] = []
        randomness = checkpoint.random_state(self.place.device) if self.evaluations > 1 else None

        def evaluate(weights: Weights, *, local: bool = False, backward: bool = True) -> Terms:
            terms: Terms = {}
            if randomness is not None:
                checkpoint.set_random_state(randomness, self.place.device)
            for part, batch in enumerate(list(kept) or self._micro_batches(kept)):
                alone = self.ranks.group is not None and (local or part + 1 < self.num_parts)
                with self.student.no_sync() if alone else nullcontext():
                    segmentation, retention = self._terms(*batch)
                    loss = weights.learn * segmentation + weights.keep * sum(retention.values())
                    if isinstance(loss, Pending):
                        loss = loss.tensor  # all terms in one walk over the pixels
                    if backward:
                        self.scaler.scale(loss / self.num_parts).backward()
                for name, value in {"seg": segmentation, **retention}.items():
                    terms[name] = terms.get(name, 0.0) + value.detach() / self.num_parts
            return terms

        return evaluate

    def _micro_batches(self, kept: list[Batch]) -> Iterator[Batch]:
        for _ in range(self.num_parts):
            images, labels, *rest = next(self.batches)
            images, labels = self.place.images(images), self.place.labels(labels)
            target = None
            if self.teacher is not None:
                target = ask(self.teacher, images, self.place, self.enlarged)
                labels = self.method.targets(labels, target)
            if self.evaluations > 1:
                kept.append((images, labels, target, *(rest or [None])))
            yield images, labels, target, *(rest or [None])

    def _terms(
        self, images: Tensor, labels: Tensor, target: Output | None, remembered: Tensor | None
    ) -> tuple[Tensor, Terms]:
        """Return l_seg, and every term by name."""
        with self.place.autocast():
            output = self.student(images, self.enlarged)
        segmentation = self._segmentation(output.logits, labels, remembered)
        retention = self.retention_losses(output, target) if target is not None else {}
        check_terms(self.method, segmentation, retention)
        if self.beta:
            segmentation = segmentation + self.beta * self.method.losses.confidence(output.logits)
        return segmentation, retention

    def _segmentation(self, logits: Tensor, labels: Tensor, remembered: Tensor | None) -> Tensor:
        """l_seg; where a method has a loss of its own for the memory, the mean over the images of both."""
        if remembered is None or type(self.method).memory_loss is Method.memory_loss:
            return self.segmentation_loss(logits, labels)
        losses = {False: self.segmentation_loss, True: self.method.memory_loss}
        terms = []
        for kind, loss in losses.items():
            own = stretches(remembered, kind)
            if own:
                own_labels = joined(labels, own)
                terms.append(loss(joined(logits, own), own_labels) * (len(own_labels) / len(labels)))
        return sum(terms[1:], terms[0])


def stretches(flags: Tensor, kind: bool) -> list[slice]:
    """Return where the images of one kind stand in a batch.

    Slices, because an index would be copied to the device, and its backward pass adds up in any order there.
    """
    found, first = [], 0
    for flag, images in groupby(flags.tolist()):
        last = first + len(list(images))
        if flag == kind:
            found.append(slice(first, last))
        first = last
    return found


def joined(x: Tensor, places: list[slice]) -> Tensor:
    parts = [x[place] for place in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
