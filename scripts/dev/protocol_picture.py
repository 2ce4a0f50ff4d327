"""The figure of docs/protocols.md: what each mode shows the network, on images of the generated data set.

python -m scripts.dev.protocol_picture docs/protocols.png
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.incremental import select_train, test_table, train_table
from data.loaders import relabel
from data.protocols import BACKGROUND, IGNORE_INDEX, Step, protocol_steps
from data.shapes import NUM_CLASSES, draw

STEPS = protocol_steps("voc", "15-1")
STEP = STEPS[3]  # learns class 18: there are old classes and future ones
FUTURE = tuple(c for step in STEPS[STEP.index + 1 :] for c in step.new)
MODES = ("overlapped", "disjoint", "sequential")
SIZE = 192
SMALLEST = 0.07  # share of the image that each object shown covers at least
HIDDEN = "dashed: an object labelled background"

# Distinct to the colour-blind (after Okabe and Ito).
COLOURS = {
    "background": "#20232a",
    "void": "#ffffff",
    "old": "#56B4E9",
    "new": "#E69F00",
    "future": "#CC79A7",
}


@dataclass(frozen=True)
class Example:
    shows: str  # what is in it, for the reader
    image: np.ndarray
    mask: np.ndarray

    @property
    def classes(self) -> frozenset[int]:
        return frozenset(np.unique(self.mask).tolist()) - {BACKGROUND, IGNORE_INDEX}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="file to write (.png)")
    options = parser.parse_args(arguments)
    examples = [
        find_example("new only", ("new",)),
        find_example("old + new", ("new", "old")),
        find_example("new + future", ("new", "future")),
        find_example("old only", ("old",)),
    ]
    draw_figure(examples, options.picture)
    return 0


def kind_of(class_id: int, step: Step = STEP) -> str:
    if class_id in (BACKGROUND, IGNORE_INDEX):
        return "background" if class_id == BACKGROUND else "void"
    return "old" if class_id in step.old else "new" if class_id in step.new else "future"


def find_example(shows: str, kinds: tuple[str, ...]) -> Example:
    """Return the first generated image with one class of each kind and nothing else,
    all of them large and whole.
    """
    for number in range(100_000):
        main_class = number % NUM_CLASSES + 1
        if kind_of(main_class) != kinds[0]:
            continue
        # An image shows the same at every size, so the search is done on small ones.
        small = Example(shows, *draw(main_class, 48, np.random.default_rng([0, 0, number])))
        if sorted(map(kind_of, small.classes)) == sorted(kinds) and well_visible(small):
            return Example(shows, *draw(main_class, SIZE, np.random.default_rng([0, 0, number])))
    raise AssertionError(f"no generated image shows {kinds}")


def well_visible(example: Example) -> bool:
    """Return whether every object is large enough and none touches the edge."""
    mask = example.mask
    large = all((mask == c).mean() >= SMALLEST for c in example.classes)
    return large and not any(edge.any() for edge in (mask[0], mask[-1], mask[:, 0], mask[:, -1]))


def labels_in_training(example: Example, mode: str) -> np.ndarray | None:
    """Return the mask as the step's training sees it, in the data set's class ids;
    None if it does not see the image.
    """
    if not select_train([example.classes], STEP, mode):
        return None
    return class_ids(relabel(example.mask, train_table(STEP, mode, void="background")))


def labels_in_testing(example: Example) -> np.ndarray:
    return class_ids(relabel(example.mask, test_table(STEP, unseen="ignore")))


def class_ids(labels: np.ndarray) -> np.ndarray:
    """From positions in the network back to ids of the data set."""
    table = np.full(256, IGNORE_INDEX, np.uint8)
    table[: STEP.num_classes] = STEP.seen
    return table[labels]


def why_not(example: Example) -> str:
    return "shows a future class" if set(example.classes) & set(FUTURE) else "shows no new class"


def draw_figure(examples: Sequence[Example], path: Path) -> None:
    from matplotlib.patches import Patch

    from tracking.plotting import pyplot, save

    titles = ["image", "full truth", *MODES, "testing"]
    subtitles = ["", "the mask on disk", *["training"] * len(MODES), "as a test image"]
    figure, axes = pyplot.subplots(
        len(examples), len(titles), figsize=(1.75 * len(titles) + 0.4, 1.72 * len(examples) + 1.2)
    )
    figure.subplots_adjust(left=0.04, right=0.995, top=0.872, bottom=0.065, wspace=0.04, hspace=0.04)
    future = " and ".join(map(str, FUTURE))
    figure.suptitle(
        f"Protocol 15-1, step {STEP.index}: class {STEP.new[0]} is new, 1-{STEP.old[-1]} are old, {future} "
        "come later",
        fontsize=13,
        y=0.975,
    )
    for row, example in zip(axes, examples, strict=True):
        row[0].imshow(example.image)
        row[0].set_ylabel(example.shows, fontsize=12)
        show_labels(row[1], example.mask, example.mask)
        for axis, mode in zip(row[2:], MODES, strict=False):
            labels = labels_in_training(example, mode)
            if labels is None:
                axis.set_facecolor("#eeeeee")
                axis.set(xlim=(0, 1), ylim=(0, 1))
                text = f"not in this step:\n{why_not(example)}"
                axis.text(0.5, 0.5, text, ha="center", va="center", fontsize=9, color="#444444")
            else:
                show_labels(axis, labels, example.mask)
        show_labels(row[-1], labels_in_testing(example), example.mask)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], aspect="equal")
        axis.spines[:].set_color("#888888")
    for axis, title, subtitle in zip(axes[0], titles, subtitles, strict=True):
        axis.set_title(subtitle, fontsize=9, color="#555555", pad=4)
        axis.text(0.5, 1.14, title, transform=axis.transAxes, ha="center", va="bottom", fontsize=12)
    meaning = {
        "background": "background",
        "old": "old class",
        "new": "new class",
        "future": "future class",
        "void": "not counted",
    }
    handles = [Patch(facecolor=COLOURS[k], edgecolor="#888888", label=text) for k, text in meaning.items()]
    handles.append(Patch(facecolor=COLOURS["background"], edgecolor="white", linestyle="--", label=HIDDEN))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=10)
    save(figure, path, dpi=100)


def show_labels(axis: Any, labels: np.ndarray, truth: np.ndarray) -> None:
    """The labels in the colour of their kind, named; what is labelled background
    though it is none is outlined.
    """
    from matplotlib.colors import to_rgb

    table = np.array([to_rgb(COLOURS[kind_of(c)]) for c in range(256)])
    axis.imshow(table[labels], interpolation="nearest")
    for class_id in sorted(set(np.unique(truth)) - {BACKGROUND, IGNORE_INDEX}):
        inside = truth == class_id
        label = int(np.median(labels[inside]))
        if label == BACKGROUND:
            axis.contour(inside, levels=[0.5], colors="white", linewidths=1.2, linestyles="dashed")
        name = "0" if label == BACKGROUND else "255" if label == IGNORE_INDEX else str(label)
        y, x = visible_centre(inside)
        colour = "white" if label == BACKGROUND else "black"
        axis.text(x, y, name, ha="center", va="center", fontsize=10, color=colour, weight="bold")


def visible_centre(inside: np.ndarray) -> tuple[float, float]:
    """Return a point well inside a shape: of all its points the one with the most of the shape around it."""
    near = inside.astype(float)
    window = np.hanning(91)
    for axis in (0, 1):
        near = np.apply_along_axis(np.convolve, axis, near, window, "same")
    y, x = np.unravel_index(np.argmax(near * inside), inside.shape)
    return float(y), float(x)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
