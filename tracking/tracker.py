"""Who keeps the curves and metrics of a run: any number of trackers, chosen by `run.tracker`.

A tracker is told everything and shows what it can: a subclass overrides those of the methods below that it
has a use for. Iterations are counted over the whole run, steps one after another.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from configs.registry import Registry
from data.palette import voc_palette
from data.protocols import Step
from tracking.drawing import Curves
from tracking.text import printable

TRACKERS: Registry[type["Tracker"]] = Registry("run.tracker", "tracking")
register = TRACKERS.register
Recorded = tuple[int, dict[str, float]]
WITHIN_STEPS = ("loss/", "phase/", "lr", "flatness/")  # how names begin of what is logged while a step trains


@register("none")
class Tracker:
    """Keeps nothing, and is the class that all others begin with.

    `about` is the text of the config, `old` and `new` name the classes of the first step and of all later
    ones, `palette` the colour of each label, if it is not VOC's.
    """

    def __init__(
        self,
        folder: Path,
        about: str = "",
        old: Sequence[str] = (),
        new: Sequence[str] = (),
        palette: np.ndarray | None = None,
    ):
        self.folder, self.about, self.old, self.new = folder, about, old, new
        self.palette = voc_palette() if palette is None else palette

    @property
    def is_new(self) -> bool:
        """Whether the folder holds nothing of this tracker yet."""
        return False

    def open(self, at: int | None = None) -> None:
        """Start writing, however often it is called; nothing else is called before.

        What an interrupted run wrote from iteration `at` on is void.
        """

    def recorded(self) -> Iterator[Recorded]:
        """Yield what the folder holds of scalars within steps, by iteration, if that can be read."""
        yield from ()

    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        """Values by name at an iteration; None is one that is not known."""

    def results(self, result: dict, at: int) -> None:
        """The metrics after a step, which ended with iteration `at`; they replace those told before."""
        self.scalars({"step": result["step"]} | metrics_of(result), at)

    def image(
        self, number: int, image: np.ndarray, label: np.ndarray, guess: np.ndarray, step: Step, at: int
    ) -> None:
        """A test image (H, W, 3), its truth and the prediction after the step; (H, W)
        in the labels of the step.
        """

    def confusion(self, counts: np.ndarray, names: Sequence[str], at: int) -> None:
        """The confusion matrix after a step; rows are the truth."""

    def losses(self, curves: Curves, at: int) -> None:
        """All logged losses of a step that has ended."""

    def finish(self, config: Mapping[str, Any]) -> None:
        """The last step of the run is recorded."""

    def flush(self) -> None:
        """What was said until now must outlive a process that is killed."""

    def close(self) -> None:
        """Nothing more is going to be said until `open` is called again."""

    @property
    def place(self) -> str:
        """What a message says that cannot be written."""
        return str(self.folder)

    def watch(self, runs: str) -> str | None:
        """Return how a person looks at it, where the folder `runs` holds this run and others."""
        return None


class Trackers(Tracker):
    """All trackers of a run as one, of which none can end it.

    Curves are not worth a run: one that fails, by a full disk or a lost network, is told nothing more until
    a step opens it anew.
    """

    def __init__(self, trackers: Iterable[Tracker]):
        self.trackers = list(trackers)
        self.listening: list[Tracker] = []

    def open_new(self) -> bool:
        """Open those whose folder holds nothing of theirs yet, and no other; return whether there are any."""
        self.listening = [tracker for tracker in self.trackers if tracker.is_new]
        is_any = bool(self.listening)
        self._tell("open", None)
        return is_any

    def open(self, at: int | None = None) -> None:
        self.listening = list(self.trackers)
        self._tell("open", at)

    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        self._tell("scalars", values, at)

    def results(self, result: dict, at: int) -> None:
        self._tell("results", result, at)

    def image(
        self, number: int, image: np.ndarray, label: np.ndarray, guess: np.ndarray, step: Step, at: int
    ) -> None:
        self._tell("image", number, image, label, guess, step, at)

    def confusion(self, counts: np.ndarray, names: Sequence[str], at: int) -> None:
        self._tell("confusion", counts, names, at)

    def losses(self, curves: Curves, at: int) -> None:
        self._tell("losses", curves, at)

    def finish(self, config: Mapping[str, Any]) -> None:
        self._tell("finish", config)

    def flush(self) -> None:
        self._tell("flush")

    def close(self) -> None:
        self._tell("close")
        self.listening = []

    def watch(self, runs: str) -> str | None:
        ways = [tracker.watch(runs) for tracker in self.trackers]
        return "\n         ".join(way for way in ways if way) or None

    def _tell(self, what: str, *arguments: Any) -> None:
        for tracker in list(self.listening):
            try:
                getattr(tracker, what)(*arguments)
            except Exception as error:  # whatever a library of somebody else raises
                self.listening.remove(tracker)
                why = printable(
                    str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                )
                tqdm.write(
                    f"note: {tracker.place} cannot be written ({why}); the run continues, and its curves do "
                    "in the next step",
                    file=sys.stderr,
                )
                with suppress(Exception):
                    tracker.close()


def make_trackers(names: Iterable[str], enabled: bool, folder: Path, **about: Any) -> Trackers:
    """Return the trackers of those names. On ranks other than the first none is enabled."""
    return Trackers(TRACKERS.find(name)(folder, **about) for name in names if enabled)


def recorded_in(folder: Path) -> list[Recorded]:
    """Return the curves of a run's folder, by whichever tracker it has that can be read."""
    for name in TRACKERS:
        with suppress(Exception):  # damaged, or of another version: there are none, and nothing is lost
            if found := list(TRACKERS[name](folder).recorded()):
                return found
    return []


def metrics_of(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a step's entry in results.json, by the names under which trackers show them."""
    values = {f"miou/{k}": v for k, v in result["miou"].items()}
    values |= {f"miou_with_background/{k}": v for k, v in result["miou_with_background"].items()}
    for kind in ("iou", "forgetting"):
        values |= {f"{kind}/{printable(name)}": v for name, v in result[kind].items()}
    values["forgetting_mean"] = result["mean_forgetting"]
    values["transfer/backward"] = result["backward_transfer"]
    values |= {f"metrics/{printable(name)}": v for name, v in result.get("metrics", {}).items()}
    return values
