"""How far every run below some folders is: one table. Reads little, changes nothing, and no model is loaded.

    python -m scripts.status runs
    python -m scripts.status runs /shared/runs --watch 30

done         every step it was asked for is trained and scored
running      a living process holds the folder
stopped      by a signal, with everything saved: the same command resumes from there
unfinished   killed or failed: the same command resumes from the last checkpoint, or after the step before

`steps` are finished ones, `iteration` is that of the step after them. Old, new and all are mIoU in percent
without background after the last finished step. `spent` is training time, that of a step taken over from
another run included; `left` is an estimate from the run's own speed. It begins with > while the number of
images of later steps is unknown: neither the run nor one on the same data has finished them.

Exit codes: 0 some run was found, 2 none was.
"""

import argparse
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from configs import yaml_core
from configs.identity import short_name
from data import DataError
from data.protocols import PROTOCOLS
from engine.checkpoint import previous_path
from engine.optim import last_iteration_of
from engine.results import steps_asked_for, steps_done
from engine.run_folder import RunError, RunFolder
from engine.terminal import exit_with
from tracking.tables import format_table, percent

HEADER = ("run", "method", "state", "steps", "iteration", "old", "new", "all", "spent", "left")
MARK = re.compile(r"config\.yaml|results\.json|resume\.pt|step_\d+\.pt")  # a file that makes a folder a run's
BROKEN = (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError)  # what foreign contents raise
CLEAR_SCREEN = "\033[H\033[2J"


class State(StrEnum):
    DONE = "done"
    RUNNING = "running"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Place:
    """Where training stands inside a step."""

    iteration: int
    seconds: float | None = None  # spent on the step so far
    total: int | None = None  # the last iteration of the step


@dataclass(frozen=True)
class RunStatus:
    path: Path
    config: Mapping[str, Any]
    state: State
    num_steps: int  # that it was asked for
    done: int  # that lie behind it
    metrics: Sequence[
        Mapping[str, Any]
    ]  # as in results.json; those of the steps before its start may be absent
    place: Place | None  # in the step after them
    is_scoring: bool  # that step is trained and waits for its metrics
    data: tuple  # what the number of images of a step depends on


# -------------------------------------------------------------------------------------------------- the table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders with runs somewhere below them")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="look again and again")
    options = parser.parse_args(arguments)
    if options.watch is not None and not 0 < options.watch < 1e6:
        parser.error("--watch: a positive number of seconds is wanted")
    text, found = describe(options.folders)
    print(text, flush=True)
    if not found:
        return 2
    try:
        while options.watch:
            time.sleep(options.watch)
            text, _ = describe(options.folders)
            print(CLEAR_SCREEN + text if sys.stdout.isatty() else "\n" + text, flush=True)
    except KeyboardInterrupt:
        pass
    return 0


def describe(folders: Sequence[Path]) -> tuple[str, bool]:
    """Return the table, a line about every folder that is not in it, and whether there was any run."""
    runs, problems = look_at_all(folders)
    sizes, rows = sizes_by_data(runs), []
    for run in runs:
        try:
            rows.append(row(run, sizes[run.data]))
        except BROKEN as error:
            problems[run.path] = explain(run.path, error)
    lines = [format_table(HEADER, rows)] if rows else []
    lines += [f"{path}: {why}" for path, why in problems.items()]
    return "\n".join(lines), bool(rows)


def look_at_all(folders: Sequence[Path]) -> tuple[list[RunStatus], dict[Path, str]]:
    runs: dict[str, RunStatus] = {}
    problems: dict[Path, str] = {}
    for folder in folders:
        paths, foreign = find_runs(folder)
        problems |= foreign
        for path in paths:
            try:
                runs.setdefault(os.path.abspath(path), look_at(path))
            except (*BROKEN, OSError) as error:
                problems[path] = explain(path, error)
    return list(runs.values()), problems


def explain(path: Path, error: Exception) -> str:
    if isinstance(error, RunError | DataError | OSError):
        return str(error).removeprefix(f"{path}: ").split("\n")[0]
    return f"not what a run writes ({type(error).__name__}: {error})"


def row(run: RunStatus, sizes: Mapping[int, int]) -> list[str]:
    last = run.metrics[-1]["miou"] if run.metrics else {}
    return [
        str(run.path),
        short_name(run.config),
        run.state,
        f"{run.done}/{run.num_steps}",
        iteration_text(run, sizes),
        *(percent(last.get(group)) for group in ("old", "new", "all")),
        duration(seconds_spent(run)),
        "-" if run.state == State.DONE else left_text(run, sizes),
    ]


def iteration_text(run: RunStatus, sizes: Mapping[int, int]) -> str:
    if run.is_scoring:
        return "scoring"
    if run.place is None:
        return "-"
    total = iterations_of(run, run.done, sizes)
    return f"{run.place.iteration}/{total}" if total else str(run.place.iteration)


def left_text(run: RunStatus, sizes: Mapping[int, int]) -> str:
    speed = seconds_per_iteration(run)
    steps = range(run.done + run.is_scoring, run.num_steps)
    iterations = [iterations_of(run, step, sizes) for step in steps]
    known = sum(count for count in iterations if count is not None)
    if run.place and not run.is_scoring and iterations and iterations[0] is not None:
        known -= run.place.iteration
    if speed is None or (not known and None in iterations):
        return "?"
    return ("> " if None in iterations else "") + duration(speed * max(0, known))


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


# ---------------------------------------------------------------------------------------- time and iterations


def seconds_spent(run: RunStatus) -> float:
    here = run.place.seconds if run.place else None
    return sum(metrics.get("seconds", 0.0) for metrics in run.metrics) + (here or 0.0)


def seconds_per_iteration(run: RunStatus) -> float | None:
    """From the newest that is known: later steps have a teacher to ask and are slower than step 0."""
    if run.place and run.place.seconds and run.place.iteration:
        return run.place.seconds / run.place.iteration
    known = [f["seconds"] / f["iterations"] for f in run.metrics if f.get("seconds") and f.get("iterations")]
    return known[-1] if known else None


def iterations_of(run: RunStatus, step: int, sizes: Mapping[int, int]) -> int | None:
    if run.place and run.place.total is not None and step == run.done:
        return run.place.total
    return last_iteration_of(run.config, sizes[step], step) if step in sizes else None


def sizes_by_data(runs: Sequence[RunStatus]) -> dict[tuple, dict[int, int]]:
    """Runs on the same data tell each other the number of training images of each step."""
    sizes: dict[tuple, dict[int, int]] = defaultdict(dict)
    for run in runs:
        sizes[run.data] |= {f["step"]: f["images"] for f in run.metrics if "images" in f}
    return sizes


# ----------------------------------------------------------------------------------------------- reading runs


def find_runs(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """Return the run folders at or below a folder, and which of its own folders have none."""
    if not folder.is_dir():
        return [], {folder: "no such folder"}
    runs = []
    for here, folders, files in os.walk(folder):
        folders.sort()
        if any(MARK.fullmatch(file) for file in files):
            runs.append(Path(here))
            folders.clear()
    if not runs:
        return [], {folder: "no run in it"}
    used = {run.relative_to(folder).parts[:1] for run in runs}
    others = sorted(path for path in folder.iterdir() if path.is_dir()) if () not in used else []
    return runs, {path: "no run in it" for path in others if (path.name,) not in used}


def look_at(path: Path) -> RunStatus:
    """RunError, or whatever foreign contents raise."""
    folder = RunFolder(path)
    results = folder.read_results() or {}
    config = read_config(folder, results)
    metrics = results.get("steps", [])
    first = results.get("started_from", {}).get("step", 0)
    done = max(first, steps_done(metrics))
    if not {metric["step"] for metric in metrics} >= set(range(first, done)):
        raise RunError("results.json: the metrics of a step are missing")
    data = config["data"]
    protocol = data["steps"] or PROTOCOLS[data["dataset"]][data["protocol"]]
    num_steps = steps_asked_for(config["train"], len(protocol))
    held = folder.is_held()
    if done >= num_steps and not held:
        state, place = State.DONE, None
    else:
        state, place = find_place(folder, done, held)
    is_scoring = done < num_steps and folder.step_checkpoint(done).exists()
    key = str(protocol), data["mode"], str(results.get("data"))
    return RunStatus(path, config, state, num_steps, done, metrics, place, is_scoring, key)


def find_place(folder: RunFolder, step: int, held: bool) -> tuple[State, Place | None]:
    """Return what a run that is not done is doing, and where in the given step."""
    saved, reached = saved_place(folder, step), reached_place(folder, step)
    if saved and reached:
        saved = replace(saved, total=reached.total)
    if held:
        return State.RUNNING, reached or saved
    nothing_lost = saved and (reached is None or reached.iteration <= saved.iteration)
    return State.STOPPED if nothing_lost else State.UNFINISHED, saved


def read_config(folder: RunFolder, results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config as it is, for another version's keys do not matter here. config.yaml
    is renewed at every start.
    """
    if folder.config_file.exists():
        return yaml_core.parse(folder.config_file.read_text(encoding="utf-8"))
    if "config" not in results:
        raise RunError("neither config.yaml nor results.json tells what it is")
    return results["config"]


def saved_place(folder: RunFolder, step: int) -> Place | None:
    """Where the step would resume. The file is mapped into memory, so that its weights are never read."""
    for path in (folder.resume_checkpoint, previous_path(folder.resume_checkpoint)):
        try:
            position = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["position"]
            if position["step"] == step:
                return Place(position["iteration"], position["seconds"])
        except Exception:  # not there, just being replaced, or damaged, for which torch has many names
            continue
    return None


def reached_place(folder: RunFolder, step: int) -> Place | None:
    """Where the step was or is, as progress.json tells. Runs of older versions have none."""
    progress = folder.read_progress()
    if progress is None or progress["step"] != step:
        return None
    return Place(progress["iteration"], progress["seconds"], progress["total"])


if __name__ == "__main__":
    exit_with(main)
