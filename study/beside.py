"""Runs as rows of one table: how each is called, and what differs between them
beyond what the table compares.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.run_folder import RunError, read_results
from study.collection import RecordedRun, scored_otherwise
from study.identity import recipe_differences
from study.report import read_run

COMPARED = "method, phase, lambda and seed"


def rows(folders: Sequence[Path]) -> dict[str, RecordedRun]:
    """Return the runs by names that no two share, each followed by its scores in other settings:
    "mib [flip]".
    """
    once = list({folder.resolve(): folder for folder in folders}.values())
    found: dict[str, RecordedRun] = {}
    for name, folder in zip(unique_names(once), once, strict=True):
        results = read_results(folder / "results.json")
        if not results or not results.get("steps"):
            raise RunError(
                f"{folder}: no results yet; train it with train.py run.folder={folder.parent} "
                f"run.name={folder.name}"
            )
        run = read_run(folder / "results.json", None)
        found[name] = run
        found |= {f"{name} [{view.evaluation}]": view for view in scored_otherwise(run)}
    return found


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder, with as many of the folders above it as tell it from the others."""
    places = [folder.resolve().parts for folder in folders]

    def is_shared(end: tuple[str, ...]) -> bool:
        return sum(place[-len(end) :] == end for place in places) > 1

    names = []
    for place in places:
        ends = (place[-depth:] for depth in range(1, len(place)))
        names.append(str(Path(*next((end for end in ends if not is_shared(end)), place))))
    return names


def differences(runs: Mapping[str, RecordedRun]) -> list[str]:
    """Return what keeps rows from being compared, a line for all rows that differ alike from the first:
    "b, c: optim.lr: 0.1 -> 0.2".
    """
    first, *others = runs
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in others:
        alike.setdefault(tuple(recipe_differences(runs[first], runs[name])), []).append(name)
    return [f"{', '.join(names)}: {'; '.join(found)}" for found, names in alike.items() if found]
