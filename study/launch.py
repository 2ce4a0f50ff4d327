"""Carry out a plan: start every run that is to do, say what happens to it, and sum up."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from data.protocols import steps_from_lists
from engine.ranks import StopRequest
from engine.run_folder import RunError, RunFolder
from engine.terminal import STOPPED_BY_SIGNAL
from metrics.continual import group_names
from study.launchers import LAUNCHERS, Event, Events, Resources, Task
from study.plan import PlannedRun, State
from tracking.tables import percent

TAIL_LINES = 12


# ------------------------------------------------------------------------------------------ starting the runs


def carry_out(runs: Sequence[PlannedRun], resources: Resources, command: Sequence[str] | None = None) -> int:
    """Start all that is to do, say what happens, and return the exit code.

    `command` stands in for train.py.
    """
    by_name = {run.name: run for run in runs}
    ended = {run.name: Event.DONE for run in runs if run.state in (State.DONE, State.UNNEEDED)}
    began: dict[str, float] = {}

    def report(run: PlannedRun, event: Event) -> None:
        if event in (Event.STARTED, Event.SUBMITTED):
            began[run.name] = time.monotonic()
            text = f"{event}, log {run.log}"
        else:
            ended[run.name] = event
            text = ending(run, event, time.monotonic() - began.get(run.name, time.monotonic()))
        print(f"[{len(ended)}/{len(runs)}] {run.name}: {text}", flush=True)

    for run in runs:
        if run.state == State.OTHER:
            report(run, Event.FAILED)
        elif run.to_do and ended.get(run.job.needs or "") == Event.FAILED:
            report(run, Event.SKIPPED)
    stop = StopRequest()
    for task, event in launch([run for run in runs if run.name not in ended], stop, resources, command):
        report(by_name[task.name], event)
    print(summary(runs, ended), flush=True)
    if stop.requested or Event.STOPPED in ended.values():
        return STOPPED_BY_SIGNAL
    return 0 if all(event == Event.DONE for event in ended.values()) else 1


def launch(
    runs: Sequence[PlannedRun], stop: StopRequest, resources: Resources, command: Sequence[str] | None = None
) -> Events:
    """Start the runs, and hand out what happens to them as it happens."""
    launcher = LAUNCHERS.find(resources.launcher)(resources)
    command = command or launcher.command()
    tasks = [Task(run.name, (*command, *run.job.arguments), run.log, run.job.needs) for run in runs]
    return launcher(tasks, stop) if tasks else iter(())


# ----------------------------------------------------------------------------------------- what is said of it


def ending(run: PlannedRun, event: Event, seconds: float) -> str:
    """Return how a run ended, in words."""
    if event == Event.SKIPPED:
        return f"skipped, for it starts from {run.job.needs}"
    if run.state == State.OTHER:
        return f"failed, {run.folder.path} holds a run with another config"
    score = f", {last_row(run.folder)}" if event == Event.DONE else ""
    return f"{event} after {timedelta(seconds=round(seconds))}{score}"


def last_row(folder: RunFolder) -> str:
    """mIoU in percent after the last step: 1-15 40.5 / 16-20 13.3 / all 33.7"""
    try:
        results = folder.read_results() or {}
        groups = group_names(steps_from_lists(results["protocol"])) | {"all": "all"}
        miou = results["steps"][-1]["miou"]
    except (RunError, TypeError, LookupError):
        return f"no metrics in {folder.results_file}"
    return " / ".join(f"{name} {percent(miou[group])}" for group, name in groups.items())


def summary(runs: Sequence[PlannedRun], ended: Mapping[str, Event]) -> str:
    """Return how many ended how, and all that is known of those that failed."""
    events = list(ended.values())
    counts = [f"{events.count(event)} {event}" for event in Event if event in events]
    counts += [f"{len(runs) - len(ended)} not started"] if len(ended) < len(runs) else []
    lines = ["", f"{len(runs)} runs: {', '.join(counts)}"]
    for run in runs:
        if ended.get(run.name) == Event.SKIPPED:
            lines.append(f"skipped: {run.name}, for it starts from {run.job.needs}")
        elif ended.get(run.name) == Event.FAILED:
            lines += failure(run)
    if len(ended) < len(runs) or set(events) != {Event.DONE}:
        lines.append("The same command resumes from here.")
    return "\n".join(lines)


def failure(run: PlannedRun) -> list[str]:
    """Return what is known of a run that failed."""
    if run.state == State.OTHER:
        return [
            f"failed: {run.name}, {run.folder.path} holds a run with another config:",
            *(f"  {difference}" for difference in run.differences),
            "  Restore the old values, move the folder away, or choose another one with --runs.",
        ]
    return [f"failed: {run.name}, the end of {run.log}:", *(f"  {line}" for line in tail(run.log))]


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    if not log.is_file():
        return ["(there is no log)"]
    # a progress bar is one line, written over and over
    lines = [line.rpartition("\r")[2] for line in log.read_text("utf-8", "replace").split("\n")]
    return [line for line in lines if line.strip()][-TAIL_LINES:]
