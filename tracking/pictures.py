"""What trackers draw that can show an image: test images over the steps, losses, confusion matrix."""

import sys
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image
from tqdm import tqdm

from data.palette import palette_image
from data.protocols import IGNORE_INDEX, Step
from tracking import drawing
from tracking.shown import LOSSES_AND_IMAGES
from tracking.text import printable
from tracking.tracker import Tracker


class Drawn(Tracker):
    """A tracker that shows drawings: a subclass says in `show` where they go."""

    def show(self, tag: str, pixels: np.ndarray, at: int) -> None:
        """Show an image (H, W, 3) of bytes."""
        raise NotImplementedError

    def image(
        self, number: int, image: np.ndarray, label: np.ndarray, guess: np.ndarray, step: Step, at: int
    ) -> None:
        """Input (H, W, 3), truth and the predictions after this and all earlier steps; (H, W)
        in the labels of the step.

        The predictions are kept as files, so that those of earlier steps are there when a run resumes.
        """
        classes = np.array([*step.seen, *[IGNORE_INDEX] * (256 - step.num_classes)], np.uint8)
        folder = self.folder / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        palette_image(classes[guess], self.palette).save(folder / f"{number}_step_{step.index}.png")
        shown: dict[str, np.ndarray | None] = {"input": image, "truth": self.palette[classes[label]]}
        for index in range(step.index + 1):
            try:
                with Image.open(folder / f"{number}_step_{index}.png", formats=["PNG"]) as file:
                    shown[f"step {index}"] = np.asarray(file.convert("RGB"))
            except (OSError, SyntaxError):  # scored in another run, no test image yet, or a damaged file
                shown[f"step {index}"] = None
        present = np.union1d(label, guess)
        legend = {
            name: self.palette[class_id]
            for i, (name, class_id) in enumerate(zip([*self.old, *self.new], step.seen, strict=False))
            if i in present
        }
        self._draw(f"{LOSSES_AND_IMAGES}/3 image {number}", at, lambda: drawing.tiles(shown, legend))

    def confusion(self, counts: np.ndarray, names: Sequence[str], at: int) -> None:
        """Rows are the truth, normalised: a dark diagonal is a good network."""
        self._draw("confusion", at, lambda: drawing.confusion(counts, names))

    def losses(self, curves: drawing.Curves, at: int) -> None:
        """The losses of a step with its phase shaded, which charts of scalars cannot do."""
        self._draw(f"{LOSSES_AND_IMAGES}/2 losses, the phase shaded", at, lambda: drawing.losses(curves))

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
            self.show(tag, pixels, at)
