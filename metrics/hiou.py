"""hIoU: the harmonic mean of old and new mIoU, which no learner raises by giving up one for the other."""

from collections.abc import Sequence

from data.protocols import Step
from metrics.continual import IoU, miou, register


@register("hiou")
def harmonic_mean(history: Sequence[IoU], steps: Sequence[Step]) -> float | None:
    """2 old new / (old + new), without background; None as long as one of them is not known, as in step 0."""
    groups = miou(history[-1], steps[0], with_background=False)
    old, new = groups["old"], groups["new"]
    if old is None or new is None:
        return None
    return 2 * old * new / (old + new) if old and new else 0.0
