"""Runs as rows of one table: how each is called, and what differs between them
beyond what the table compares.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.results import steps_done
from engine.run_folder import RunError, read_results
from study.collection import RecordedRun, scored_otherwise
from study.identity import by_kind, label, recipe_differences
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
    "b, c: recipe (optim.lr: 0.1 -> 0.2)".
    """
    first, *others = runs
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in others:
        alike.setdefault(tuple(recipe_differences(runs[first], runs[name])), []).append(name)
    return [f"{', '.join(names)}: {by_kind(found)}" for found, names in alike.items() if found]


def over_seeds(runs: Mapping[str, RecordedRun]) -> tuple[dict[str, list[RecordedRun]], list[str]]:
    """Return the runs that a mean may be taken of, by the name of what they did, and why there is none of
    others that have several seeds too.

    A mean wants several seeds, each once, one recipe, and as many steps done. Where there is none to be
    taken, nothing is returned; else what has one run stands beside the means.
    """
    groups: dict[str, dict[str, RecordedRun]] = {}
    for name, run in runs.items():
        scored = f" [{run.evaluation}]" if run.evaluation else ""
        protocol = run.config["data"]["protocol"]
        groups.setdefault(label(run.setting, protocol) + scored, {})[name] = run
    several = {called for called, group in groups.items() if len({run.seed for run in group.values()}) > 1}
    refused = {called: why for called in groups if called in several and (why := _no_mean(groups[called]))}
    if several <= refused.keys():
        means = {}
    else:
        wanted = [c for c, group in groups.items() if len(group) == 1 or c in several - refused.keys()]
        means = {called: list(groups[called].values()) for called in wanted}
    return means, [f"no mean of {called}: {why}" for called, why in refused.items()]


def _no_mean(group: Mapping[str, RecordedRun]) -> str | None:
    """Return why a mean of runs with several seeds would mislead."""
    if unlike := differences(group):
        return f"from {next(iter(group))} differ {'; '.join(unlike)}"
    if len({steps_done(run.results["steps"]) for run in group.values()}) > 1:
        return f"{', '.join(group)} stand after different numbers of steps"
    seeds = [run.seed for run in group.values()]
    repeated = [seed for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    return f"seed {repeated[0]} is there more than once: {', '.join(group)}" if repeated else None
