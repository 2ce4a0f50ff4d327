"""What TensorBoard shows of a run: scalars, images, the confusion matrix, the config;
docs/watching.md is its guide.

The metrics after a step stand twice: against the iteration (`miou/old`), where they line up with the losses,
and against the number of the step (`by_step/miou/old`), where runs of other lengths can be compared and the
steps lie evenly. A prefix rather than a second run, so that a run stays one line in TensorBoard's list.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from data.palette import palette_image, voc_palette
from data.protocols import IGNORE_INDEX, Step
from tracking import drawing
from tracking.shown import FINAL_METRICS, FIRST_COLUMNS, hyperparameters, layout
from tracking.text import markdown, printable
from tracking.tracker import Tracker, metrics_of, register, while_it_can

PAGE = "http://localhost:6006/#custom_scalars&_smoothingWeight=0"


@register("tensorboard")
class Board(Tracker):
    """A SummaryWriter that knows the names used here."""

    writer: Any = None  # a SummaryWriter: a second to import

    @cached_property
    def is_new(self) -> bool:
        return not any(self.folder.glob("events.*"))

    @while_it_can
    def open(self, at: int | None = None) -> None:
        """Start writing, into one file however often it is called.

        TensorBoard discards what an interrupted run wrote from iteration `at` on; None keeps it all.
        """
        # Imported late: it takes a second, which --help and a config error need not wait for.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None:
            hush_writers()
            is_new = self.is_new  # before there is a file
            self.writer = SummaryWriter(str(self.folder), flush_secs=30)
            if is_new:
                self.writer.add_text("config", "```yaml\n" + self.about + "\n```", 0)
                self.writer.add_custom_scalars(layout(self.old, self.new))
                self.is_new = False
        if at is not None:
            # What SummaryWriter's purge_step writes, but without a new file.
            start = Event(step=at, session_log=SessionLog(status=SessionLog.START))
            self.writer.file_writer.add_event(start)

    @while_it_can
    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        if self.writer:
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(name, value, at)

    def results(self, result: dict, at: int) -> None:
        """The metrics after a step, which ended with iteration `at`."""
        values = metrics_of(result)
        self.scalars(values, at)
        self.scalars({f"by_step/{name}": value for name, value in values.items()}, result["step"])

    @while_it_can
    def image(
        self, number: int, image: np.ndarray, label: np.ndarray, guess: np.ndarray, step: Step, at: int
    ) -> None:
        """Input (H, W, 3), truth and the predictions after this and all earlier steps; (H, W)
        in the labels of the step.

        The predictions are kept as files, so that those of earlier steps are there when a run resumes.
        """
        if not self.writer:
            return
        classes = np.array([*step.seen, *[IGNORE_INDEX] * (256 - step.num_classes)], np.uint8)
        folder = self.folder / "pictures"
        folder.mkdir(exist_ok=True)
        palette_image(classes[guess]).save(folder / f"{number}_step_{step.index}.png")
        shown = {"input": image, "truth": voc_palette()[classes[label]]}
        for index in range(step.index + 1):
            try:
                with Image.open(folder / f"{number}_step_{index}.png", formats=["PNG"]) as file:
                    shown[f"step {index}"] = np.asarray(file.convert("RGB"))
            except (OSError, SyntaxError):  # scored in another run, no test image yet, or a damaged file
                shown[f"step {index}"] = None
        present = np.union1d(label, guess)
        legend = {
            name: voc_palette()[class_id]
            for i, (name, class_id) in enumerate(zip([*self.old, *self.new], step.seen, strict=False))
            if i in present
        }
        self._draw(f"pictures/{number}", at, lambda: drawing.tiles(shown, legend))

    @while_it_can
    def confusion(self, counts: np.ndarray, names: Sequence[str], at: int) -> None:
        """Rows are the truth, normalised: a dark diagonal is a good network."""
        if self.writer:
            self._draw("confusion", at, lambda: drawing.confusion(counts, names))
            self.writer.add_text("confusion/order", markdown(", ".join(names)), at)

    @while_it_can
    def losses(self, curves: drawing.Curves, at: int) -> None:
        """The losses of a step with its phase shaded, which TensorBoard's own charts cannot do."""
        if self.writer:
            self._draw("losses", at, lambda: drawing.losses(curves))

    @while_it_can
    def finish(self, config: Mapping[str, Any]) -> None:
        """The row of a finished run in the HParams tab.

        It takes the last value of each of FINAL_METRICS by itself.
        """
        if self.writer:
            from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
            from torch.utils.tensorboard.summary import hparams

            experiment, start, end = hparams(hyperparameters(config), dict.fromkeys(FINAL_METRICS))
            plugin = experiment.value[0].metadata.plugin_data
            content = HParamsPluginData.FromString(plugin.content)
            for column in content.experiment.hparam_infos:
                column.differs = column.name in FIRST_COLUMNS  # those that differ come first, then by name
            plugin.content = content.SerializeToString()
            # Not add_hparams, which would make a second run of it.
            for summary in (experiment, start, end):
                self.writer.file_writer.add_summary(summary)

    def give_up(self, error: OSError) -> None:
        """Say so, and write nothing until `open` is called again.

        Behind half a record in the file none would be read.
        """
        writer, self.writer = self.writer, None
        why = f"{self.folder}: TensorBoard's files cannot be written ({error})"
        tqdm.write(f"note: {why}; the run continues, and its curves do in the next step", file=sys.stderr)
        with suppress(OSError):
            if writer is not None:
                writer.close()

    @while_it_can
    def flush(self) -> None:
        if self.writer:
            self.writer.flush()

    @while_it_can
    def close(self) -> None:
        if self.writer:
            self.writer.close()
            self.writer = None

    def watch(self, runs: str) -> str:
        return f"tensorboard --logdir {runs}   {PAGE}"

    def _draw(self, tag: str, at: int, draw: Callable[[], np.ndarray | None]) -> None:
        """Show a figure. One that cannot be drawn is said and left out: it is no reason to end a run."""
        try:
            pixels = draw()
        except Exception as error:
            why = printable(f"{type(error).__name__}: {error}")
            tqdm.write(
                f"warning: the figure {tag!r} cannot be drawn and is left out ({why})", file=sys.stderr
            )
            return
        if pixels is not None:
            self.writer.add_image(tag, pixels, at, dataformats="HWC")


def hush_writers() -> None:
    """An event file is written by a thread of TensorBoard's, which hands its error over,
    yet would print a traceback too.
    """
    hook = threading.excepthook
    if getattr(hook, "func", None) is not _hushed:
        threading.excepthook = partial(_hushed, hook)


def _hushed(hook: Callable[[Any], Any], failed: threading.ExceptHookArgs) -> None:
    is_writer = type(failed.thread).__module__.startswith("tensorboard.")
    if not (is_writer and issubclass(failed.exc_type, OSError)):
        hook(failed)
