"""What TensorBoard shows of a run: scalars, pictures, the confusion matrix, the config."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data.protocols import IGNORE_INDEX


def voc_palette(num_colours: int = 256) -> np.ndarray:
    """The colour of each class id: the bits of the id dealt out to R, G, B from the highest bit down (VOC's own map)."""
    ids = np.arange(num_colours)
    palette = np.zeros((num_colours, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            palette[:, channel] |= (((ids >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return palette


class Board:
    """A SummaryWriter that knows the names used here. On ranks other than the first it writes nothing."""

    def __init__(self, folder: Path, enabled: bool = True, purge_step: int | None = None):
        self.writer = None
        if enabled:
            from torch.utils.tensorboard import (
                SummaryWriter,
            )  # takes a second, which --help need not wait for

            self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def config(self, text: str) -> None:
        if self.writer:
            self.writer.add_text("config", "```yaml\n" + text + "\n```", 0)

    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        if self.writer:
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(name, value, at)

    def results(self, result: dict, at: int) -> None:
        """The figures after a step: against the iteration so that they line up with the losses."""
        values = {f"miou/{k}": v for k, v in result["miou"].items()}
        values |= {f"miou_with_background/{k}": v for k, v in result["miou_with_background"].items()}
        values |= {f"iou/{name}": v for name, v in result["iou"].items()}
        values |= {f"forgetting/{name}": v for name, v in result["forgetting"].items()}
        values["forgetting_mean"] = result["mean_forgetting"]
        values["backward_transfer"] = result["backward_transfer"]
        self.scalars(values, at)

    def picture(
        self,
        number: int,
        image: np.ndarray,
        label: np.ndarray,
        guess: np.ndarray,
        classes: Sequence[int],
        at: int,
    ) -> None:
        """Input (H, W, 3), truth and prediction side by side; both (H, W) in the labels of the step."""
        if self.writer:
            colours = voc_palette()[[*classes, *[IGNORE_INDEX] * (256 - len(classes))]]
            strip = np.concatenate([image, colours[label], colours[guess]], axis=1)
            self.writer.add_image(f"pictures/{number}", strip, at, dataformats="HWC")

    def confusion(self, counts: np.ndarray, names: Sequence[str], at: int) -> None:
        """Rows are the truth, normalised: a bright diagonal is a good network."""
        if not self.writer:
            return
        rates = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        cell = max(4, 320 // len(names))
        grey = np.kron(1.0 - rates, np.ones((cell, cell)))
        self.writer.add_image("confusion", grey[None], at, dataformats="CHW")
        self.writer.add_text("confusion/order", ", ".join(names), at)

    def flush(self) -> None:
        if self.writer:
            self.writer.flush()

    def close(self) -> None:
        if self.writer:
            self.writer.close()
