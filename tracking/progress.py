"""What a person sees while a step trains: a progress bar, and scalars for the trackers."""

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from tqdm import tqdm

from tracking.drawing import Curves, Logged
from tracking.tracker import Recorded, Tracker

SECONDS_BETWEEN_LINES = 30  # in a log file


class Progress:
    """Called at the iterations that are logged; only then are values read from the device.

    Iterations after `boundary` belong to a phase. `phase/sign` alone does not show it: with an even number of
    iterations between two entries it is always a descent, or always an ascent, that is logged.
    """

    def __init__(
        self,
        board: Tracker,
        title: str,
        total: int,
        done: int,
        offset: int,
        batch_size: int,
        quiet: bool,
        boundary: int | None = None,
    ):
        self.board, self.offset, self.batch_size = board, offset, batch_size
        self.done, self.since = done, time.monotonic()
        self.curves = Curves(title, total, total if boundary is None else boundary)
        self.bar = tqdm(total=total, initial=done, desc=title, unit="it", disable=quiet, **bar_place())

    def __call__(
        self, iteration: int, terms: Mapping[str, Tensor], learn: float, keep: float, lr: float
    ) -> None:
        now = time.monotonic()
        speed = (iteration - self.done) * self.batch_size / max(now - self.since, 1e-9)
        values = {name: value.item() for name, value in terms.items()}
        kept = {name: value for name, value in values.items() if name != "seg"}
        segmentation, in_phase = values["seg"], iteration > self.curves.boundary
        scalars = {"loss/seg": segmentation} | {f"loss/keep/{name}": value for name, value in kept.items()}
        if kept:
            scalars["loss/weighted_keep"] = keep * sum(kept.values())
        scalars |= {"phase/sign": learn, "phase/keep": keep, "phase/on": float(in_phase)}
        # The lower edge of a band under the loss: a band of no height, but down to 0 in the phase.
        scalars["phase/fill"] = 0.0 if in_phase else segmentation
        scalars |= {"lr": lr, "speed/images_per_second": speed}
        self.board.scalars(scalars, self.offset + iteration)
        weighted = scalars.get("loss/weighted_keep", 0.0)
        self.curves.entries.append(Logged(iteration, segmentation, weighted, learn))
        shown = {name: f"{value:.3f}" for name, value in values.items()}
        shown |= {"sign": f"{learn:+.0f}", "lr": f"{lr:.1e}", "img/s": f"{speed:.0f}"}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(iteration - self.done)
        self.done, self.since = iteration, now

    def recall(self, recorded: Iterable[Recorded]) -> None:
        """Take up what was logged of the step before it was interrupted, for the drawing of its losses."""
        for at, values in recorded:
            if self.offset < at <= self.offset + self.done and "loss/seg" in values:
                weighted, sign = values.get("loss/weighted_keep", 0.0), values.get("phase/sign", 1.0)
                self.curves.entries.append(Logged(at - self.offset, values["loss/seg"], weighted, sign))

    def close(self) -> None:
        self.bar.close()
        self.board.losses(self.curves, self.offset + self.done)


def bar_place() -> dict[str, Any]:
    """tqdm's arguments: a terminal has one line that changes; in a file it would be one endless line."""
    if sys.stderr.isatty():
        return {"leave": False}
    return {"leave": True, "file": _Lines(), "mininterval": SECONDS_BETWEEN_LINES, "ascii": True}


class _Lines:
    """Every state of a tqdm bar as a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            sys.stderr.write(text.strip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()
