"""From many results.json to numbers that may be compared: runs sorted by what they did, means over seeds,
paired tests.

Runs are told apart by their config alone (`study.identity.setting_of`), never by the name of a folder. Only
runs of one recipe - all of the config but method, phase, lambda and seed, and the same images - are put side
by side.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.identity import order_name, short_name
from configs.schema import with_defaults
from data.protocols import BACKGROUND, Step, steps_from_lists
from engine.identity import kind_of_step_0, objective_of, recipe_of
from engine.results import metrics_by_step, steps_asked_for, steps_done
from metrics import continual
from study.identity import SPEED_KEYS, Setting, recipe_differences, setting_of
from study.rungs import own_keys
from study.spreads import Spread, spread

MACHINE = ("device", "processor", "threads", "world_size", "torch")
FLATNESS_FILE = "flatness.json"  # beside results.json
FLATNESS: dict[str | int, Callable[[Mapping[str, Any]], float | None]] = {
    "gradient norm": lambda metrics: metrics.get("gradient_norm2"),
    "top eigenvalue": lambda metrics: next(iter(metrics.get("eigenvalues", ())), None),
    "trace": lambda metrics: metrics.get("trace", {}).get("mean"),
}
MIB_TIME = "mib / plain mib"
BENCHMARK_FILE = "benchmark.json"  # in the folder of the runs, by scripts.benchmark
WITH_BACKGROUND: dict[str | int, str] = {"with background": "all", "old with background": "old"}
LOGGED_FLATNESS = ("squared_gradient_norm", "top_eigenvalue")  # by run.flatness, while a step trains


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A results.json: its folder, what it holds, and how texts call the folder."""

    folder: Path
    results: Mapping[str, Any]
    place: str
    evaluation: str | None = None  # the name of the setting it was scored in, where that is not its own

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Keys that did not exist when it ran have their defaults."""
        return with_defaults(self.results["config"])

    @property
    def seed(self) -> int:
        return self.config["train"]["seed"]

    @cached_property
    def setting(self) -> Setting:
        return setting_of(self.config)

    @cached_property
    def steps(self) -> list[Step]:
        return steps_from_lists(self.results["protocol"])

    @property
    def is_finished(self) -> bool:
        """Whether it has the whole protocol behind it, as tables want it."""
        return steps_done(self.results["steps"]) == len(self.steps)

    @property
    def is_cut(self) -> bool:
        """Whether it is done, but was asked for the first steps only: by train.last_step."""
        asked = steps_asked_for(self.config["train"], len(self.steps))
        return not self.is_finished and steps_done(self.results["steps"]) >= asked

    @cached_property
    def class_names(self) -> dict[int, str]:
        """By class id, of the classes seen so far."""
        metrics = self.results["steps"]
        return dict(zip(self.steps[steps_done(metrics) - 1].seen, metrics[-1]["classes"], strict=True))

    @cached_property
    def history(self) -> list[continual.IoU]:
        """IoU by class id after each step; empty for steps of which nothing is known."""
        ids = {name: c for c, name in self.class_names.items()}
        metrics = metrics_by_step(self.results["steps"])
        known = {index: step["iou"].items() for index, step in metrics.items()}
        return [{ids[name]: iou for name, iou in known.get(i, ())} for i in range(len(self.steps))]

    def metric(self, name: str) -> float | None:
        """Return a registered metric after the last step; of runs that are older than it, from their IoU."""
        last = self.results["steps"][-1].get("metrics", {})
        known = self.history[: steps_done(self.results["steps"])]
        return last[name] if name in last else continual.measure(known, self.steps).get(name)

    @property
    def later_steps(self) -> list[Mapping[str, Any]]:
        """The metrics of the steps after step 0; none unless they are known of every step so far."""
        metrics = metrics_by_step(self.results["steps"])
        later = range(1, steps_done(self.results["steps"]))
        return [metrics[index] for index in later] if metrics.keys() >= set(later) else []

    @cached_property
    def flatness(self) -> Mapping[str, Any]:
        """What scripts.flatness found of l_seg, norms in eval, if it left its metrics beside the run's."""
        try:
            return self.flatness_options["modes"]["eval"]["seg"]
        except (KeyError, TypeError):
            return {}

    @cached_property
    def flatness_options(self) -> Mapping[str, Any]:
        """All that scripts.flatness left beside the run's metrics: with which options it measured, too."""
        try:
            found = json.loads((self.folder / FLATNESS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def change_at_the_end(self, metric: str) -> float | None:
        """Of what run.flatness logged: the value of what a step hands over over that at the share p."""
        end, boundary = self.handed_over(metric), self.logged_flatness(metric, "boundary")
        return None if end is None or boundary is None else end / boundary

    def handed_over(self, metric: str) -> float | None:
        """Of what run.flatness logged: the value of what a step hands over, averaged weights or its end."""
        return self.logged_flatness(metric, "handed over", "end")

    def logged_flatness(self, metric: str, *places: str) -> float | None:
        """Of what run.flatness logged: the geometric mean over the steps after step 0, of each at the first
        of these places that it has; None unless all have one."""
        logged = [step.get("flatness", {}) for step in self.later_steps]
        chosen = [next((place for place in places if place in at), "") for at in logged]
        values = [at.get(place, {}).get(metric) for at, place in zip(logged, chosen, strict=True)]
        known = [value for value in values if value is not None and value > 0]
        return statistics.geometric_mean(known) if known and len(known) == len(values) else None

    @property
    def iteration_time(self) -> float | None:
        """Of one image, MiB's = 1, if `scripts.benchmark updates` left its metrics beside the runs."""
        try:
            content = json.loads((self.folder.parent / BENCHMARK_FILE).read_text(encoding="utf-8"))
            metrics = {metric["what"]: metric["value"] for metric in content["updates"]["figures"]}
            return (metrics | {MIB_TIME: 1.0}).get(f"{short_name(self.config)} / plain mib")
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def background_taken_for(self) -> Mapping[str, float]:
        """Class -> share of the background's pixels that it was given after the last step; empty without a
        confusion matrix."""
        last = self.results["steps"][-1]
        if "confusion" not in last:
            return {}
        counts = last["confusion"][BACKGROUND]  # rows are truth
        total = max(sum(counts), 1)
        return {name: count / total for name, count in zip(last["classes"], counts, strict=True)}

    @property
    def gradients_later(self) -> int | None:
        """Gradients of single images, after step 0."""
        steps = self.later_steps
        if not steps or any("iterations" not in step for step in steps):
            return None
        evaluations = sum(step.get("gradient_evaluations", step["iterations"]) for step in steps)
        return evaluations * self.config["train"]["batch_size"]

    @property
    def seconds_later(self) -> float | None:
        """Of training after step 0."""
        seconds = [step["seconds"] for step in self.later_steps if step.get("seconds") is not None]
        return sum(seconds) if seconds and len(seconds) == len(self.later_steps) else None


# ------------------------------------------------------------------------------------------- sorting the runs


@dataclass
class Collection:
    """The finished runs of one recipe by setting and seed, and what was left out."""

    reference: RecordedRun
    cells: dict[Setting, dict[int, RecordedRun]] = field(default_factory=dict)
    unfinished: list[RecordedRun] = field(default_factory=list)
    # Of another recipe, and how it differs; left out, and the run that was there before.
    foreign: list[tuple[RecordedRun, list[str]]] = field(default_factory=list)
    repeated: list[tuple[RecordedRun, RecordedRun]] = field(default_factory=list)
    # Its runs in other settings of evaluation, by name; of the recipe in other orders of the classes.
    evaluations: dict[str, "Collection"] = field(default_factory=dict)
    orders: dict[str, "Collection"] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        return self.reference.steps

    @property
    def protocol(self) -> str | None:
        return self.reference.config["data"]["protocol"]

    @property
    def runs(self) -> list[RecordedRun]:
        return [run for seeds in self.cells.values() for run in seeds.values()]

    def seeds(self, settings: Iterable[Setting]) -> list[int]:
        return sorted({seed for setting in settings for seed in self.cells.get(setting, {})})

    def on_shared_seeds(self, settings: Iterable[Setting]) -> "Collection":
        """Of these settings only the seeds that all of them have which ran: a curve must not mix them. All,
        if none is shared."""
        ran = {setting: set(self.cells[setting]) for setting in settings if setting in self.cells}
        shared = set.intersection(*ran.values()) if ran else set()
        if not shared:
            return self
        cells = {
            setting: {seed: run for seed, run in runs.items() if setting not in ran or seed in shared}
            for setting, runs in self.cells.items()
        }
        return replace(self, cells=cells)

    def values(self, setting: Setting, key: str | int) -> dict[int, float]:
        """Seed -> a metric after the last step, where it is known: old, new, all, first (old after step 0),
        with background (all), old with background, forgetting, metrics/<name> or a class id, in percent; or
        seconds and gradients, of the later steps, and what scripts.flatness and scripts.benchmark measured.
        """
        known = {seed: self._metric(run, key) for seed, run in self.cells.get(setting, {}).items()}
        return {seed: value for seed, value in sorted(known.items()) if value is not None}

    def _metric(self, run: RecordedRun, key: str | int) -> float | None:
        if key == "seconds":
            return run.seconds_later
        if key == "gradients":
            return run.gradients_later
        if key == "time":
            return run.iteration_time
        if key in FLATNESS:
            return FLATNESS[key](run.flatness)
        if key in LOGGED_FLATNESS:
            return run.change_at_the_end(str(key))
        if key == "forgetting":
            value = run.results["steps"][-1]["mean_forgetting"]
        elif isinstance(key, str) and key.startswith("metrics/"):
            value = run.metric(key.removeprefix("metrics/"))
        elif key in WITH_BACKGROUND:
            counted = continual.miou(run.history[-1], self.steps[0], with_background=True)
            value = counted[WITH_BACKGROUND[key]]
        elif isinstance(key, int):
            value = run.history[-1].get(key)
        else:
            after, group = (run.history[0], "old") if key == "first" else (run.history[-1], key)
            value = continual.miou(after, self.steps[0], with_background=False)[group]
        return None if value is None else 100 * value

    def old_classes_by_step(self, setting: Setting) -> list[Spread]:
        """mIoU of the old classes after each step."""
        histories = [run.history for run in self.cells.get(setting, {}).values()]
        return [
            spread(100 * v for v in (self._old(iou) for iou in after) if v is not None)
            for after in zip(*histories, strict=True)
        ]

    def _old(self, iou: continual.IoU) -> float | None:
        return continual.miou(iou, self.steps[0], with_background=False)["old"]

    def classes_by_step(self, setting: Setting) -> list[list[float | None]]:
        """IoU of each foreground class (rows, in the order of learning) after each step, the mean over
        seeds."""
        histories = [run.history for run in self.cells.get(setting, {}).values()]
        return [
            [_percent(continual.mean(iou.get(c) for iou in after)) for after in zip(*histories, strict=True)]
            for c in self.steps[-1].seen
            if c != BACKGROUND
        ]


def collect(runs: Sequence[RecordedRun]) -> Collection | None:
    """Sort the runs; the recipe is the one that most finished runs share. None if no run is finished."""
    finished = [run for run in runs if run.is_finished]
    if not finished:
        return None
    collection = Collection(_most_common_recipe(finished))
    collection.unfinished = [run for run in runs if not run.is_finished]
    for run in finished:
        differences = recipe_differences(collection.reference, run)
        cells = collection.cells
        if differences and all(difference.startswith("data.order: ") for difference in differences):
            cells, differences = collection.orders.setdefault(order_of(run), Collection(run)).cells, []
        seeds = cells.setdefault(run.setting, {}) if not differences else {}
        if differences:
            collection.foreign.append((run, differences))
        elif run.seed in seeds:
            collection.repeated.append((run, seeds[run.seed]))
        else:
            seeds[run.seed] = run
    for view in (view for run in collection.runs for view in scored_otherwise(run)):
        others = collection.evaluations.setdefault(str(view.evaluation), Collection(collection.reference))
        others.cells.setdefault(view.setting, {})[view.seed] = view
    return collection


def order_of(run: RecordedRun) -> str:
    """How tables call the order in which a run learned its protocol's classes."""
    order = run.config["data"]["order"]
    return "as numbered" if order is None else order_name(order)


def scored_otherwise(run: RecordedRun) -> list[RecordedRun]:
    """Return the run as it was scored in each other evaluation setting."""
    views = []
    for name, other in run.results.get("evaluations", {}).items():
        settings = {key.removeprefix("data."): value for key, value in other["settings"].items()}
        config = {**run.config, "data": run.config["data"] | settings}
        results = {**run.results, "config": config, "steps": other["steps"], "evaluations": {}}
        if other["steps"]:
            views.append(RecordedRun(run.folder, results, f"{run.place} [{name}]", name))
    return views


def machine_differences(runs: Sequence[RecordedRun]) -> list[str]:
    """In what matters for seconds: "threads: 1, 2". What an older run does not tell is no difference."""
    found: dict[str, set[str]] = {}
    for run in runs:
        environment = run.results.get("environment", {})
        for key in MACHINE:
            found.setdefault(key, set()).update({str(environment[key])} if key in environment else ())
        for key in SPEED_KEYS:
            section, name = key.split(".")
            found.setdefault(key, set()).add(str(run.config[section].get(name)))
    return [f"{key}: {', '.join(sorted(values))}" for key, values in found.items() if len(values) > 1]


def share_step_0(runs: Sequence[RecordedRun]) -> bool:
    """Do runs of different seeds all go out from the same step 0?"""
    first = runs[0].history[0] if runs else {}
    return (
        bool(first) and len({run.seed for run in runs}) > 1 and all(run.history[0] == first for run in runs)
    )


def steps_0_of_one_recipe(runs: Sequence[RecordedRun]) -> list[list[list[RecordedRun]]]:
    """Return the runs of each step 0 that one recipe and seed trained more than once, by what came out.

    Rounding differs from processor to processor, and a step 0 trained again is then another model.
    """
    found: dict[str, list[list[RecordedRun]]] = {}
    for run in (run for run in runs if run.history[0]):
        method = run.config["method"]
        kind = kind_of_step_0(method["name"])
        options = objective_of(run.config, 0)["method"]["options"].get(kind)  # what is shared has none
        told = (run.seed, kind, options, method["cross_entropy"], recipe_of(run.config, 0), run.steps[0].new)
        models = found.setdefault(json.dumps(told, sort_keys=True), [])
        same = next((model for model in models if model[0].history[0] == run.history[0]), None)
        if same is None:
            models.append([run])
        else:
            same.append(run)
    return [models for models in found.values() if len(models) > 1]


def _most_common_recipe(runs: Sequence[RecordedRun]) -> RecordedRun:
    groups: list[list[RecordedRun]] = []
    several = [run for run in runs if run.setting.method != "joint"] or runs
    # Those with keys of their own come last: they fit to runs that do not fit to each other.
    for run in sorted(several, key=lambda run: bool(own_keys(run.config))):
        group = next((group for group in groups if not recipe_differences(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return max(groups, key=len)[0]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
