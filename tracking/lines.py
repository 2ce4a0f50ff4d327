"""Curves and metrics as lines of text in one file of the run's folder."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tracking.tracker import WITHIN_STEPS, Recorded, Tracker, metrics_of


class Lines(Tracker):
    """A tracker that adds lines to a file. A subclass says how they are written, and read back."""

    file: str
    header = ""

    def written(self, values: Mapping[str, float], at: int) -> Iterable[str]:
        """Yield lines, with their ends, that hold the values of an iteration."""
        raise NotImplementedError

    def told(self, line: str) -> Recorded | None:
        """Return the iteration of a line and the values by name; None if it is damaged."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        return self.folder / self.file

    @property
    def place(self) -> str:
        return str(self.path)

    @property
    def is_new(self) -> bool:
        return not self.path.exists()

    def open(self, at: int | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_new:
            self.path.write_text(self.header, encoding="utf-8")
        elif at is not None:
            self._keep(lambda iteration, values: iteration < at)

    def recorded(self) -> Iterator[Recorded]:
        for at, values in filter(None, map(self.told, self._lines())):
            within = {
                name: v for name, v in values.items() if name.startswith(WITHIN_STEPS) and v is not None
            }
            if within:
                yield at, within

    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.writelines(self.written(known, at))

    def results(self, result: dict, at: int) -> None:
        """A step that is scored again, after a kill or on demand, has its metrics once."""
        known = {"step", *metrics_of(result)}
        self._keep(lambda iteration, values: iteration != at or not values.keys() <= known)
        super().results(result, at)

    def watch(self, runs: str) -> str:
        return f"tail -f {self.path}"

    def _lines(self) -> list[str]:
        with open(self.path, encoding="utf-8", newline="") as file:
            return file.readlines()

    def _keep(self, is_wanted: Callable[[int, Mapping[str, float]], bool]) -> None:
        """Drop other lines, and one that was cut off by a kill; the file is whole at any time."""
        lines = self._lines()
        read = ((line, self.told(line)) for line in lines if line != self.header)
        kept = [line for line, told in read if told is not None and is_wanted(*told)]
        if len(kept) + bool(self.header) != len(lines):
            beside = self.path.with_name(f".{self.file}.tmp")
            beside.write_text(self.header + "".join(kept), encoding="utf-8", newline="")
            os.replace(beside, self.path)
