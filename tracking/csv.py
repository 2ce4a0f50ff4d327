"""Curves and metrics as a table: a row for each value in the run's scalars.csv, which any spreadsheet opens.

iteration,name,value
10,loss/seg,0.71
"""

import csv
import io
from collections.abc import Iterable, Mapping

from tracking.lines import Lines
from tracking.text import printable
from tracking.tracker import Recorded, register


@register("csv")
class Rows(Lines):
    """A row per value: columns per name would have to be known before the first of them is."""

    file = "scalars.csv"
    header = "iteration,name,value\n"

    def written(self, values: Mapping[str, float], at: int) -> Iterable[str]:
        text = io.StringIO()
        rows = ((at, printable(name), value) for name, value in values.items())
        csv.writer(text, lineterminator="\n").writerows(rows)
        yield text.getvalue()

    def told(self, line: str) -> Recorded | None:
        try:
            (iteration, name, value), whole = next(csv.reader([line])), line.endswith("\n")
            return (int(iteration), {name: float(value)}) if whole else None
        except (ValueError, csv.Error, StopIteration):
            return None
