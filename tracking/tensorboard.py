"""What TensorBoard shows of a run: scalars, images, the confusion matrix, the config;
docs/watching.md is its guide.

The metrics after a step stand twice: against the iteration (`miou/old`), where they line up with the losses,
and against the number of the step (`by_step/miou/old`), where runs of other lengths can be compared and the
steps lie evenly. A prefix rather than a second run, so that a run stays one line in TensorBoard's list.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from tracking.pictures import Drawn
from tracking.shown import FINAL_METRICS, FIRST_COLUMNS, hyperparameters, layout, shown_by_step, with_live
from tracking.text import markdown
from tracking.tracker import WITHIN_STEPS, Recorded, metrics_of, register

PAGE = "http://localhost:6006/?smoothing=0#timeseries"


@register("tensorboard")
class Board(Drawn):
    """A SummaryWriter that knows the names used here."""

    writer: Any = None  # a SummaryWriter: a second to import

    @cached_property
    def is_new(self) -> bool:
        return not any(self.folder.glob("events.*"))

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

    def recorded(self) -> Iterator[Recorded]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if self.is_new:
            return
        events = EventAccumulator(str(self.folder), size_guidance={"scalars": 0}).Reload()
        found: dict[int, dict[str, float]] = {}
        for name in events.Tags()["scalars"]:
            if name.startswith(WITHIN_STEPS):
                for event in events.Scalars(name):
                    found.setdefault(event.step, {})[name] = event.value
        yield from sorted(found.items())

    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        for name, value in with_live(values).items():
            if value is not None:
                self.writer.add_scalar(name, value, at)

    def results(self, result: dict, at: int) -> None:
        self.scalars(metrics_of(result), at)
        self.scalars(shown_by_step(result), result["step"])

    def confusion(self, counts: np.ndarray, names: Sequence[str], at: int) -> None:
        super().confusion(counts, names, at)
        self.writer.add_text("confusion/order", markdown(", ".join(names)), at)

    def show(self, tag: str, pixels: np.ndarray, at: int) -> None:
        self.writer.add_image(tag, pixels, at, dataformats="HWC")

    def finish(self, config: Mapping[str, Any]) -> None:
        """The row of a finished run in the HParams tab.

        It takes the last value of each of FINAL_METRICS by itself.
        """
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

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        """Behind half a record in a file none would be read: what is opened after a failure is another."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    @property
    def place(self) -> str:
        return f"{self.folder}: TensorBoard's files"

    def watch(self, runs: str) -> str:
        return f"tensorboard --logdir {runs}   {PAGE}"


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
