"""What TensorBoard shows of a run: scalars, pictures, the confusion matrix, the config."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data.palette import voc_palette
from data.protocols import IGNORE_INDEX


class Board:
    """A SummaryWriter that knows the names used here. On ranks other than the first it writes nothing."""

    def __init__(self, folder: Path, enabled: bool = True):
        self.folder, self.enabled = folder, enabled
        self.is_new = not any(folder.glob("events.*"))
        self.writer = None

    def open(self, at: int | None = None) -> None:
        """Start writing. TensorBoard discards what an interrupted run wrote from iteration `at` on; None keeps it all."""
        if self.enabled:
            # Imported late: it takes a second, which --help and a config error need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            self.writer = SummaryWriter(str(self.folder), purge_step=at)

    def config(self, text: str) -> None:
        """Once per run, however often the board is opened."""
        if self.writer and self.is_new:
            self.writer.add_text("config", "```yaml\n" + text + "\n```", 0)
            self.is_new = False

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
