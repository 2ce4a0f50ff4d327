"""What trackers show where: the names seen first, the charts, the columns that compare runs,
the test images.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.protocols import Step
from tracking.text import printable
from tracking.tracker import metrics_of

# HParams shows the first five columns and two metrics at once; the others can be ticked.
FIRST_COLUMNS = ("method", "p", "phase", "seed", "strength")
FINAL_METRICS = ("miou/old", "miou/new", "miou/all", "forgetting_mean")

# Groups of tags, which TensorBoard and W&B sort by name: the two that TensorBoard opens unfolded come first.
AFTER_EACH_STEP = "1 mIoU after each step"
LOSSES_AND_IMAGES = "2 losses and images"
LIVE = {"loss/seg": f"{LOSSES_AND_IMAGES}/1 l_seg"}


def with_live(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the values of an iteration, and those a second time that are seen first."""
    return dict(values) | {LIVE[name]: value for name, value in values.items() if name in LIVE}


def shown_by_step(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of a step's entry in results.json by the names under which they stand against the
    number of the step; old, new and all come a second time, where they are seen first.
    """
    groups = enumerate(("old", "new", "all"), start=1)
    first = {f"{AFTER_EACH_STEP}/{i} {group}": result["miou"][group] for i, group in groups}
    return first | {f"by_step/{name}": value for name, value in metrics_of(result).items()}


def layout(old: Sequence[str], new: Sequence[str]) -> dict[str, dict[str, list]]:
    """Return the charts of the Custom Scalars tab, by category. Tags are regular expressions that
    match from the beginning.

    The lines of a run all have its colour, so what is compared between runs has a chart of its own.
    """

    def lines(*tags: str) -> list:
        return ["Multiline", [f"{tag}$" for tag in tags]]

    def per_class(prefix: str) -> dict[str, list]:
        groups = {"classes of step 0": old, "classes of later steps": new}
        return {
            title: lines(f"{prefix}/({'|'.join(re.escape(printable(name)) for name in names)})")
            for title, names in groups.items()
            if names
        }

    def flatness(prefix: str) -> dict[str, list]:
        """As engine.probe names its metrics."""
        names = ("loss", "squared_gradient_norm", "top_eigenvalue")
        return {name: lines(f"flatness/{prefix}{name}") for name in names}

    return {
        "mIoU after each step, without background": {
            group: lines(f"by_step/miou/{group}") for group in ("old", "new", "all")
        },
        "mIoU after each step, with background": {
            group: lines(f"by_step/miou_with_background/{group}") for group in ("old", "new", "all")
        },
        "Further metrics after each step": {"each": lines("by_step/metrics/.*")},
        "Losses against iterations": {
            "l_seg, filled where the phase runs": ["Margin", ["loss/seg", "phase/fill", "loss/seg"]],
            "l_seg and lambda R": lines("loss/seg", "loss/weighted_keep"),
            "terms of R": lines("loss/keep/.*"),
        },
        "Phase against iterations": {
            "1 where the phase runs": lines("phase/on"),
            "sign of l_seg": lines("phase/sign"),
            "lambda": lines("phase/keep"),
            "learning rate": lines("lr"),
        },
        "Flatness of l_seg (run.flatness)": flatness(""),
        "Flatness of l_seg + lambda R (run.flatness)": flatness("objective_"),
        "Flatness on test images of old classes (run.flatness)": flatness("old_"),
        "IoU after each step": per_class("by_step/iou"),
        "Forgetting after each step": {
            "mean, and backward transfer": lines("by_step/forgetting_mean", "by_step/transfer/backward"),
            **per_class("by_step/forgetting"),
        },
    }


def hyperparameters(config: Mapping[str, Any]) -> dict[str, float | str]:
    """Return what runs are compared by, from a config as results.json holds it. No value may be missing:
    HParams takes its columns from one of the runs.
    """
    data, method, phase, optim, train = (config[k] for k in ("data", "method", "phase", "optim", "train"))
    strength, plain = method["strength"], phase["name"] == "descent"

    def weight(name: str) -> float:
        return strength if plain or phase[name] is None else phase[name]

    return {
        "method": method["name"],
        "phase": phase["name"],
        "p": 1.0 if plain else phase["p"],  # the share that trains normally
        "lambda_a": weight("lambda_a"),
        "lambda_b": weight("lambda_b"),
        "strength": strength,
        "update": config["update"]["name"],
        "average": config["average"]["name"],
        "entropy": method["entropy"],
        "dropout": config["model"]["dropout"],
        "lr": optim["lr"],
        "lr_later": optim["lr_later"],
        "seed": train["seed"],
        "epochs": train["epochs"],
        "epochs_later": train["epochs_later"],
        "batch": train["batch_size"],
        "body": config["model"]["body"],
        "protocol": data["protocol"] or "own steps",
        "mode": data["mode"],
    }


def images_to_show(
    classes_per_image: Sequence[frozenset[int]], steps: Sequence[Step], count: int
) -> list[int]:
    """Return positions of the test images that are shown after every step, the same ones each time.

    In turn one with a class of step 0, where forgetting shows, and one with a class of a later step, where
    learning does.
    """
    later = steps[1:]
    turns = [steps[0] if i % 2 == 0 or not later else later[i // 2 % len(later)] for i in range(count)]
    chosen: list[int] = []
    for step in turns:
        fitting = (i for i, classes in enumerate(classes_per_image) if classes & set(step.new))
        position = next((i for i in fitting if i not in chosen), None)
        if position is not None:
            chosen.append(position)
    return chosen
