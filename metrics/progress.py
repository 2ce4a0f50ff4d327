"""What a person sees while a step trains: a progress bar, and scalars in TensorBoard."""

import time
from collections.abc import Mapping

from torch import Tensor
from tqdm import tqdm

from metrics.tensorboard import Board


class Progress:
    """Called at the iterations that are logged; only then are values read from the device."""

    def __init__(
        self, board: Board, title: str, total: int, done: int, offset: int, batch_size: int, quiet: bool
    ):
        self.board, self.offset, self.batch_size = board, offset, batch_size
        self.done, self.since = done, time.monotonic()
        self.bar = tqdm(total=total, initial=done, desc=title, unit="it", disable=quiet, leave=False)

    def __call__(
        self, iteration: int, terms: Mapping[str, Tensor], learn: float, keep: float, lr: float
    ) -> None:
        now = time.monotonic()
        speed = (iteration - self.done) * self.batch_size / max(now - self.since, 1e-9)
        self.bar.update(iteration - self.done)
        self.done, self.since = iteration, now
        values = {name: value.item() for name, value in terms.items()}
        scalars = {f"loss/{name}" if name == "seg" else f"loss/keep/{name}": v for name, v in values.items()}
        scalars |= {"phase/sign": learn, "phase/keep": keep, "lr": lr, "speed/images_per_second": speed}
        self.board.scalars(scalars, self.offset + iteration)
        shown = {name: f"{value:.3f}" for name, value in values.items()}
        self.bar.set_postfix(shown | {"sign": f"{learn:+.0f}", "lr": f"{lr:.1e}", "img/s": f"{speed:.0f}"})

    def close(self) -> None:
        self.bar.close()
