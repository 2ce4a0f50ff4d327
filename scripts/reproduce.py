"""Run what the tables and figures of the paper consist of: all methods and settings, several seeds, step 0 trained once.

    python -m scripts.reproduce table1 --preset shapes --seeds 1 2 3
    python -m scripts.reproduce all --preset voc --root /data/VOC2012 --pretrained imagenet --dry-run
    python -m scripts.reproduce table3 --preset voc-cpu --root /data/VOC2012 --jobs 2 train.epochs_later=5
    python -m scripts.reproduce all --preset voc --root /data/VOC2012 --launcher slurm --slurm slurm_partition=gpu

First comes the plan: every run, whether it is done, can go on or is missing, and what it costs. --dry-run ends there.
The same command, typed again, starts only what is not done. What fails does not stop the rest. key.sub=value goes to
every run.

Exit codes: 0 all done, 1 something failed, 2 bad arguments, config or data, 75 stopped by a signal with everything saved.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch

from configs.schema import ConfigError
from data import DataError, shapes
from data.protocols import steps_from_lists
from engine.ranks import StopRequest
from engine.run_folder import RunError, RunFolder
from engine.terminal import STOPPED_BY_SIGNAL, exit_with
from metrics.continual import group_names
from study.experiments import TABLES
from study.launchers import (
    Event,
    Events,
    LauncherError,
    Task,
    run_here,
    run_on_cluster,
    train_command,
)
from study.plan import PRESETS, Run, State, choose, describe, list_jobs, look_at
from tracking.tables import percent

CLUSTERS = {"slurm": "slurm", "submitit-local": "local"}
TAIL_LINES = 12


def main(arguments: Sequence[str] | None = None, command: Sequence[str] | None = None) -> int:
    """`command` stands in for train.py."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    preset, root = PRESETS[options.preset], options.root
    generated = options.preset == "shapes" and root is None
    if generated:
        root = options.runs / "data"
    try:
        tables = TABLES if options.table == "all" else [options.table]
        settings = {"data.root": root, "model.pretrained": options.pretrained}
        jobs = list_jobs(tables, preset, options.seeds, options.runs, settings, options.overrides)
        if options.only:
            jobs = choose(jobs, options.only)
        if root is None and not options.dry_run:
            raise DataError("the place of the data set is not given; set --root <folder>")
        if generated and not options.dry_run:
            shapes.generate(root)
        here = not options.dry_run or (root is not None and root.is_dir())
        runs = look_at(jobs, preset, count=here)
        print(describe(runs, preset), flush=True)
        if not here:
            print("The data set is not here: the numbers of its pictures are those on record.")
        return 0 if options.dry_run else carry_out(runs, options, command)
    except ConfigError as error:
        print("\n".join(f"config error: {problem}" for problem in error.problems), file=sys.stderr)
    except (DataError, LauncherError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        usage="%(prog)s TABLE --preset PRESET [options] [key.sub=value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("table", choices=[*TABLES, "all"], help="what to reproduce; table1 is table 2 as well")
    add("--preset", choices=PRESETS, required=True, help="data set, network and recipe")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    add(
        "--only",
        nargs="+",
        metavar="RUN",
        help="these rows or runs alone, in this order: joint 'ewc_seed[23]'",
    )
    add("--root", type=Path, help="place of the data set (shapes: generated in the folder of the runs)")
    add("--pretrained", help="weights to start from: imagenet or a file")
    add("--runs", type=Path, help="folder of all runs (default: runs/<preset>)")
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add("--launcher", choices=["local", "torchrun", *CLUSTERS], default="local", help="default: local")
    add("--jobs", type=_count, default=1, help="local: runs at once (default: 1)")
    add("--threads", type=_count, help="of all runs together (default: all cores); slurm: of a run")
    add("--gpus", type=int, help="of a run (torchrun: all there are; slurm: 1, and 0 for CPUs alone)")
    add("--slurm", type=_parameter, action="append", default=[], metavar="KEY=VALUE", help="for submitit")
    # --seeds takes all that follows it, so the overrides are set apart first
    overrides = [a for a in arguments if re.match(r"\w+\.[\w.]+=", a)]
    options = parser.parse_args([a for a in arguments if a not in overrides])
    if options.jobs > 1 and options.launcher != "local":
        parser.error(
            "--jobs is for the local launcher: torchrun has one run at a time, Slurm limits of its own"
        )
    options.overrides = overrides
    options.seeds = list(dict.fromkeys(options.seeds))
    options.runs = options.runs or Path("runs") / options.preset
    return options


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _parameter(text: str) -> tuple[str, str | int]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError
    return key, int(value) if value.isdigit() else value


# ------------------------------------------------------------------------------------------------------ starting the runs


def carry_out(runs: Sequence[Run], options: argparse.Namespace, command: Sequence[str] | None) -> int:
    """Start all that is to do, say what happens, and return the exit code."""
    by_name = {run.name: run for run in runs}
    ended = {run.name: Event.DONE for run in runs if run.state in (State.DONE, State.UNNEEDED)}
    began: dict[str, float] = {}

    def report(run: Run, event: Event) -> None:
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
    for task, event in launch([run for run in runs if run.name not in ended], stop, options, command):
        report(by_name[task.name], event)
    print(summary(runs, ended), flush=True)
    if stop.requested or Event.STOPPED in ended.values():
        return STOPPED_BY_SIGNAL
    return 0 if all(event == Event.DONE for event in ended.values()) else 1


def launch(
    runs: Sequence[Run], stop: StopRequest, options: argparse.Namespace, command: Sequence[str] | None
) -> Events:
    launcher, gpus = options.launcher, options.gpus
    if gpus is None:
        gpus = max(1, torch.cuda.device_count()) if launcher == "torchrun" else 1
    many = launcher == "torchrun" or (launcher in CLUSTERS and gpus > 1)
    command = command or train_command(gpus if many else None)
    tasks = [Task(run.name, (*command, *run.job.arguments), run.log, run.job.needs) for run in runs]
    if not tasks:
        return iter(())
    if launcher in CLUSTERS:
        parameters = {"gpus": gpus, "threads": options.threads, "options": dict(options.slurm)}
        return run_on_cluster(tasks, stop, options.runs / "submitit", CLUSTERS[launcher], **parameters)
    processes = gpus if launcher == "torchrun" else options.jobs
    threads = max(1, (options.threads or os.cpu_count() or 1) // processes)
    return run_here(tasks, stop, slots=options.jobs, threads=threads)


# ------------------------------------------------------------------------------------------------------- what is said of it


def ending(run: Run, event: Event, seconds: float) -> str:
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
        return f"no figures in {folder.results_file}"
    return " / ".join(f"{name} {percent(miou[group])}" for group, name in groups.items())


def summary(runs: Sequence[Run], ended: Mapping[str, Event]) -> str:
    """How many ended how, and all that is known of those that failed."""
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
        lines.append("The same command goes on from here.")
    return "\n".join(lines)


def failure(run: Run) -> list[str]:
    if run.state == State.OTHER:
        return [
            f"failed: {run.name}, {run.folder.path} holds a run with another config:",
            *(f"  {difference}" for difference in run.differences),
            "  Restore the old values, move the folder away, or choose another one with --runs.",
        ]
    return [f"failed: {run.name}, the end of {run.log}:", *(f"  {line}" for line in tail(run.log))]


def tail(log: Path) -> list[str]:
    if not log.is_file():
        return ["(there is no log)"]
    # a progress bar is one line, written over and over
    lines = [line.rpartition("\r")[2] for line in log.read_text("utf-8", "replace").split("\n")]
    return [line for line in lines if line.strip()][-TAIL_LINES:]


if __name__ == "__main__":
    exit_with(main)
