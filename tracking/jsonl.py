"""Curves and metrics as text: a line of JSON for each logged iteration in the run's scalars.jsonl.

{"iteration": 10, "loss/seg": 0.71, "lr": 0.009, ...}
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from tracking.tracker import Tracker, register, while_it_can

FILE = "scalars.jsonl"


@register("jsonl")
class JsonLines(Tracker):
    is_open = False

    @property
    def path(self) -> Path:
        return self.folder / FILE

    @property
    def is_new(self) -> bool:
        return not self.path.exists()

    @while_it_can
    def open(self, at: int | None = None) -> None:
        self.is_open = True
        self.folder.mkdir(parents=True, exist_ok=True)
        if at is not None and not self.is_new:
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            self.path.write_text("".join(line for line in lines if _is_before(line, at)), encoding="utf-8")

    @while_it_can
    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        if not self.is_open:
            return
        known = {name: v if math.isfinite(v) else None for name, v in values.items() if v is not None}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": at} | known) + "\n")

    def give_up(self, error: OSError) -> None:
        self.is_open = False
        why = f"{self.path} cannot be written ({error})"
        tqdm.write(f"note: {why}; the run continues, and its curves do in the next step", file=sys.stderr)

    def watch(self, runs: str) -> str:
        return f"tail -f {self.path}"


def _is_before(line: str, at: int) -> bool:
    """Return whether a line is whole and of an iteration before `at`."""
    try:
        return json.loads(line)["iteration"] < at
    except ValueError:  # cut off by a kill
        return False
