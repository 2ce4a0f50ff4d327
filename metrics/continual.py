"""From IoU per class and step to the metrics continual learners are compared by.

`history[i]` maps class id -> IoU in [0, 1] (None: the class occurred nowhere) after step i, over the classes
seen so far. Two conventions of mIoU exist in the literature and are never mixed: without background (the
paper, MiB: 1-15, 16-20, all of
20) and with it (PLOP and later: 0-15, 16-20, all of 21). "old" are the classes of step 0, "new" all later
    ones.

What else is measured after each step is a function with @register("name") in a file of this folder: of
`history`, in which a step of which nothing is known is empty, and of the protocol's steps. It gives a share,
which tables show in percent, or None.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from configs.registry import Registry
from data.protocols import BACKGROUND, Step

IoU = dict[int, float | None]
Metric = Callable[[Sequence[IoU], Sequence[Step]], float | None]
METRICS: Registry[Metric] = Registry("metric", "metrics")
register = METRICS.register


def measure(history: Sequence[IoU], steps: Sequence[Step]) -> dict[str, float | None]:
    """Return every registered metric after the last step of `history`; None where it is not known."""
    values = {name: metric(history, steps) for name, metric in METRICS.items()}
    return {
        name: None if value is None or not math.isfinite(value) else float(value)
        for name, value in values.items()
    }


def mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def miou(iou: IoU, first_step: Step, with_background: bool) -> dict[str, float | None]:
    counted = [c for c in iou if with_background or c != BACKGROUND]
    old = [c for c in counted if c == BACKGROUND or c in first_step.new]
    new = [c for c in counted if c not in old]
    groups = {"old": old, "new": new, "all": counted}
    return {name: mean(iou[c] for c in classes) for name, classes in groups.items()}


def forgetting(history: Sequence[IoU]) -> IoU:
    """Return for each class the best IoU it had after an earlier step minus the IoU it has now.

    Classes that were just learned have none.
    """
    now, earlier = history[-1], history[:-1]
    lost: IoU = {}
    for c, value in now.items():
        best = max((before for h in earlier if (before := h.get(c)) is not None), default=None)
        if best is not None and value is not None:
            lost[c] = best - value
    return lost


def backward_transfer(history: Sequence[IoU]) -> float | None:
    """Return the mean over the earlier steps' foreground classes of (IoU now -
    IoU right after the class was learned).
    """
    now, changes = history[-1], []
    for c, value in now.items():
        learned = next(i for i, h in enumerate(history) if c in h)
        first = history[learned][c]
        if c != BACKGROUND and learned < len(history) - 1 and value is not None and first is not None:
            changes.append(value - first)
    return mean(changes)


def summary(history: Sequence[IoU], steps: Sequence[Step]) -> dict:
    """Return everything that is said about the newest step.

    `average` is the mean over steps of mIoU over all classes seen.
    """
    lost = forgetting(history)
    return summary_of_one(history[-1], steps) | {
        "forgetting": lost,
        "mean_forgetting": mean(v for c, v in lost.items() if c != BACKGROUND),
        "backward_transfer": backward_transfer(history),
        "average": {
            "miou": mean(miou(h, steps[0], with_background=False)["all"] for h in history),
            "miou_with_background": mean(miou(h, steps[0], with_background=True)["all"] for h in history),
        },
    }


def summary_of_one(now: IoU, steps: Sequence[Step]) -> dict:
    """Return what can be said about a step alone, where the IoU after earlier steps are not known."""
    return {
        "miou": miou(now, steps[0], with_background=False),
        "miou_with_background": miou(now, steps[0], with_background=True),
        "forgetting": {},
        "mean_forgetting": None,
        "backward_transfer": None,
        "average": {"miou": None, "miou_with_background": None},
    }


def group_names(steps: Sequence[Step]) -> dict[str, str]:
    """Return how the paper writes the groups: {"old": "1-15", "new": "16-20"};
    own class orders fall back to the words.
    """
    groups = {"old": steps[0].new, "new": tuple(c for step in steps[1:] for c in step.new)}
    names = {}
    for name, classes in groups.items():
        is_range = bool(classes) and list(classes) == list(range(classes[0], classes[-1] + 1))
        names[name] = (
            name if not is_range else f"{classes[0]}-{classes[-1]}" if len(classes) > 1 else f"{classes[0]}"
        )
    return names
