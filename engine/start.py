"""train.start_from: a run that begins after a step which another run has trained, and with nothing else.

What it began with is kept in its folder as step_<i>.pt, a copy, and named in results.json ("started_from") by
content: the source may move or go. Steps before it are never trained here, and have metrics only if the
source's could be taken over.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.schema import Config
from data.protocols import Step
from engine import checkpoint, identity
from engine.results import changed_lists, metrics_by_step
from engine.run_folder import RunError, RunFolder, read_results
from engine.scores import evaluation_settings

Results = dict[str, Any]


def settle_start(
    config: Config,
    folder: RunFolder,
    results: Results,
    steps: Sequence[Step],
    say: Callable[[str], None],
) -> None:
    """Whatever the run is to start from is in its folder afterwards, or UserError.

    `results` is this run's, still empty.
    """
    given = None if config.train.start_from is None else Path(config.train.start_from)
    before = folder.read_results() or {}
    started = before.get("started_from")
    if started is not None:
        check_same_start(folder, given, started, say)
        keep_start(folder, given, started, say)
    elif given is not None and given.exists():
        begin(config, folder, given, before, results, steps, say)
    elif given is not None:
        take_for_started(folder, given, before, results, say)


# --------------------------------------------------------------------------------------------- the first time


def begin(
    config: Config,
    folder: RunFolder,
    source: Path,
    before: Results,
    results: Results,
    steps: Sequence[Step],
    say: Callable[[str], None],
) -> None:
    """Put the step of another run where this run would have left its own,
    with its metrics if they were made as ours would be.

    results.json names it before the copy is made: a run that is killed meanwhile knows what it waits for.
    """
    state = read_start(source)
    index = state["step"]
    if index >= len(steps):
        raise checkpoint.CheckpointError(
            f"{source}: is of step {index}, but the last step of this protocol is {len(steps) - 1}"
        )
    identity.check_model(source, state, config.model.architecture, steps[index], results["classes"])
    ours = identity.trained_with(
        results["config"], index, results["data"], results["classes"], results.get("weights")
    )
    notes = identity.start_notes(source, state, ours)
    started = {"file": str(source), "sha256": identity.state_digest(state), "step": index}
    check_has_nothing_else(folder, before, started)
    if not before.get("steps"):
        metrics = metrics_beside(source, state, results, steps)
        if index > 0 and not set(range(index)) <= metrics.keys():
            notes.append(
                f"there are no metrics of every step before step {index} beside {source} that were made as "
                "this run's: those that are missing stay absent, and so does what is forgotten of their "
                "classes"
            )
        before = results | {"steps": list(metrics.values())}
    folder.write_results(before | {"started_from": started})
    for note in notes:
        say(f"note: {note}")
    if not folder.step_checkpoint(index).exists():
        checkpoint.save(state, folder.step_checkpoint(index))


def read_start(source: Path) -> dict[str, Any]:
    """Return the state of a step_<i>.pt or of an export, or raise CheckpointError."""
    state = checkpoint.load(source)
    if not {*identity.MODEL_KEYS, "costs"} <= state.keys():
        raise checkpoint.CheckpointError(
            f"{source}: train.start_from wants the step_<i>.pt of a run, or an export"
        )
    checkpoint.check_step(source, state)
    return state


def check_has_nothing_else(folder: RunFolder, before: Results, started: dict[str, Any]) -> None:
    """A folder may hold the step already, from an older version,
    but no training of its own that leads to it.
    """
    place = folder.step_checkpoint(started["step"])
    if place.exists():
        is_same = identity.state_digest(read_start(place)) == started["sha256"]
        own = any(folder.step_checkpoint(i).exists() for i in range(started["step"]))
    else:
        is_same = True
        own = bool(folder.saved_steps()) or folder.resume_checkpoint.exists()
        own |= bool(before.get("steps"))
    if own or not is_same:
        raise RunError(
            f"{folder.path} did not start from {started['file']}: it trained steps of its own, or started "
            "from another model. Give this run a run.name of its own, or leave train.start_from out"
        )


def metrics_beside(
    source: Path, state: dict[str, Any], results: Results, steps: Sequence[Step]
) -> dict[int, dict]:
    """Return what results.json beside the source holds of the step and those before,
    if it is of this model and made alike.
    """
    theirs = read_results((source if source.is_dir() else source.parent) / "results.json")
    if not theirs or not {"data", "protocol", "config", "steps"} <= theirs.keys():
        return {}
    if changed_lists(theirs["data"], results["data"]):
        return {}
    index = state["step"]
    if theirs["protocol"][: index + 1] != [list(step.new) for step in steps[: index + 1]]:
        return {}
    names = dict(enumerate(results["classes"]))
    if identity.class_differences(identity.recorded_classes(theirs), names):
        return {}
    if evaluation_settings(theirs["config"]) != evaluation_settings(results["config"]):
        return {}
    metrics = {step: result for step, result in metrics_by_step(theirs["steps"]).items() if step <= index}
    costs = {key: state["costs"].get(key) for key in ("seconds", "iterations")}
    is_of_this_model = index in metrics and costs == {key: metrics[index].get(key) for key in costs}
    return metrics if is_of_this_model else {}


def take_for_started(
    folder: RunFolder, given: Path, before: Results, results: Results, say: Callable[[str], None]
) -> None:
    """A folder of an older version does not tell what it started from;
    it is believed if it named the same file.
    """
    number = re.fullmatch(r"step_(\d+)\.pt", given.name)
    index = int(number[1]) if number else 0
    named = before.get("config", {}).get("train", {}).get("start_from")
    place = folder.step_checkpoint(index)
    if named != str(given) or not place.exists():
        raise checkpoint.CheckpointError(f"{given}: no such checkpoint, and train.start_from wants one")
    sha256 = identity.state_digest(read_start(place))
    say(f"note: {folder.path} does not tell what it started from; it is taken for {given}, which is gone")
    folder.write_results(before | {"started_from": {"file": str(given), "sha256": sha256, "step": index}})


# ------------------------------------------------------------------------------------------- every time after


def check_same_start(
    folder: RunFolder, given: Path | None, started: dict[str, Any], say: Callable[[str], None]
) -> None:
    if given is None:
        say(f"note: {folder.path} started from {started['file']}, and resumes from there")
    elif given.exists():
        sha256 = identity.state_digest(read_start(given))
        if sha256 != started["sha256"]:
            raise RunError(
                f"{folder.path} started from {started['file']} (sha256 {started['sha256'][:12]}), but "
                f"train.start_from={given} is another model (sha256 {sha256[:12]}): give this run a run.name "
                "of its own, or the old file"
            )
    elif str(given) != started["file"]:
        raise RunError(
            f"train.start_from={given}: no such checkpoint; {folder.path} started from {started['file']}: "
            "give this, even if it is gone, or leave train.start_from out"
        )


def keep_start(
    folder: RunFolder, given: Path | None, started: dict[str, Any], say: Callable[[str], None]
) -> None:
    """The folder's copy of the step is as it was, or is made again from a source that is."""
    place = folder.step_checkpoint(started["step"])
    try:
        if identity.state_digest(read_start(place)) == started["sha256"]:
            return
        problem = f"{place}: is another model than {started['file']} was"
    except checkpoint.CheckpointError as error:
        problem = str(error)
    for source in (given, Path(started["file"])):
        if source is not None and source.exists() and source.resolve() != place.resolve():
            state = read_start(source)
            if identity.state_digest(state) == started["sha256"]:
                if place.exists():
                    place.rename(place.with_suffix(".damaged"))
                checkpoint.save(state, place)
                say(f"{problem}; copied again from {source}")
                return
    raise checkpoint.CheckpointError(
        f"{folder.path} started from {started['file']}, of which nothing whole is left ({problem}), and it "
        f"does not start from nothing: put that file (sha256 {started['sha256'][:12]}) back, or begin again "
        "with a run.name of its own"
    )
