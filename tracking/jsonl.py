"""Curves and metrics as text: a line of JSON for each logged iteration in the run's scalars.jsonl.

{"iteration": 10, "loss/seg": 0.71, "lr": 0.009, ...}
"""

import json
import math
from collections.abc import Iterable, Mapping

from tracking.lines import Lines
from tracking.tracker import Recorded, register


@register("jsonl")
class JsonLines(Lines):
    file = "scalars.jsonl"

    def written(self, values: Mapping[str, float], at: int) -> Iterable[str]:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        yield json.dumps({"iteration": at} | finite) + "\n"

    def told(self, line: str) -> Recorded | None:
        try:
            values = json.loads(line)
            return int(values.pop("iteration")), dict(values)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None
