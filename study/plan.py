"""What the runs of an experiment are, how far each has come, and what is left to do. Starts nothing.

A run is recognised by the config in its folder, not by its name alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from configs.schema import (
    Config,
    ConfigError,
    DataConfig,
    load_config,
    with_defaults,
)
from data import configured_dataset
from data.incremental import images_of_steps
from data.index import build_index
from data.official import LISTS, STEP_SIZES
from data.protocols import PROTOCOLS, configured_steps
from engine.arguments import read_config
from engine.identity import run_differences, weights_of
from engine.optim import epochs_of
from engine.results import steps_asked_for, steps_done
from engine.run_folder import RunError, RunFolder
from methods import METHODS, UPDATES
from study.experiments import Job, experiments_of, jobs_of, planned_keys
from tracking.tables import format_table

QUICKSTART = Path(__file__).parent.parent / "results" / "quickstart"
Sizes = tuple[int, ...]  # training images of each step


@dataclass(frozen=True)
class Preset:
    overlays: tuple[str, ...]
    seconds: float | None  # of an image pass, where no run here tells; None: as in results/quickstart
    basis: str  # of these seconds
    sizes: Mapping[tuple[str, str], Sizes]  # (protocol, mode) -> what its data set is known to hold


VOC_SIZES = {
    (protocol, mode): sizes
    for (dataset, train_list, protocol, mode), sizes in STEP_SIZES.items()
    if (dataset, train_list) == ("voc", "train_aug")
} | {("offline", mode): (LISTS["voc"]["train_aug"],) for mode in ("disjoint", "overlapped")}
SHAPES_SIZES = {("15-1", "disjoint"): (2250, 139, 145, 153, 153, 160), ("offline", "disjoint"): (3000,)}
PRESETS = {
    "shapes": Preset(("configs/quickstart.yaml",), None, "measured in results/quickstart", SHAPES_SIZES),
    "voc-cpu": Preset(
        ("configs/voc/15-1.yaml", "configs/recipes/cpu.yaml"),
        1 / 30,
        "an assumption for two CPU cores",
        VOC_SIZES,
    ),
    "voc": Preset(("configs/voc/15-1.yaml",), 1 / 25, "an assumption for one GPU", VOC_SIZES),
}


class State(StrEnum):
    DONE = "done"
    RESUMABLE = "resumable"
    MISSING = "missing"
    OTHER = "other config"
    UNNEEDED = "not needed"  # a step 0 from which no run has to start any more


@dataclass
class PlannedRun:
    """A job, what its folder holds and what it costs."""

    job: Job
    config: Config
    sizes: Sizes | None

    def __post_init__(self) -> None:
        self.folder = RunFolder(Path(self.config.run.folder) / self.name)
        self.differences, self.notes = self._differences()
        self.state = self._state()

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def log(self) -> Path:
        return self.folder.path.with_name(f"{self.name}.log")

    @property
    def is_step_0(self) -> bool:
        """Whether it is there for others to start from."""
        return self.config.train.last_step is not None

    @property
    def to_do(self) -> bool:
        return self.state in (State.RESUMABLE, State.MISSING)

    @cached_property
    def results(self) -> dict:
        """When the plan was made. Damaged ones count as none: train.py says what to do about them."""
        try:
            return self.folder.read_results() or {}
        except RunError:
            return {}

    @property
    def metrics(self) -> list[dict]:
        """Of each step."""
        return self.results.get("steps", [])

    def _differences(self) -> tuple[list[str], list[str]]:
        """Return how the folder's config differs from this one,
        and what could not be compared. Metrics may come alone, from another machine: they know theirs.
        """
        if self.folder.config_file.exists():
            try:
                found = load_config([self.folder.config_file]).model_dump()
            except ConfigError as error:
                return error.problems, []
        elif self.results:
            found = with_defaults(self.results.get("config", {}))
        else:
            return [], []
        return run_differences(found, self.results, self.config, weights_of(self.config))

    def _state(self) -> State:
        if self.differences:
            return State.OTHER
        last = self._own_steps[-1]
        whole = steps_done(self.metrics) > last and (
            not self.is_step_0 or self.folder.step_checkpoint(last).exists()
        )
        if whole:
            return State.DONE
        return State.RESUMABLE if self.folder.config_file.exists() else State.MISSING

    @property
    def _own_steps(self) -> range:
        """Those it does not get from another run."""
        data = self.config.data
        protocol = data.steps or PROTOCOLS[data.dataset][data.protocol or ""]
        asked = steps_asked_for(self.config.train.model_dump(), len(protocol))
        return range(0 if self.job.needs is None else 1, asked)

    def passes(self, first: int = 0) -> int:
        """Epochs x images x gradient evaluations per update, of its own steps from the `first` on."""
        assert self.sizes is not None
        train, update, phase = self.config.train, self.config.update, self.config.phase
        evaluations, method = UPDATES[update.name].evaluations, self.config.method
        # Images of a memory lengthen the epochs of later steps, or take places of a batch.
        remembered = method.memory if METHODS[method.name].memory == "concatenated" else 0
        return sum(
            round(
                epochs_of(train, step)
                * (self.sizes[step] + (remembered if step else 0))
                * (evaluations if step >= update.from_step else 1)
                * (phase.p if phase.name == "stop" and step >= phase.from_step else 1)
            )
            for step in self._own_steps
            if step >= first
        )

    def passes_left(self) -> int:
        return self.passes(first=steps_done(self.metrics)) if self.to_do else 0


# -------------------------------------------------------------------------------------------- making the plan


def list_jobs(
    tables: Iterable[str],
    preset: Preset,
    seeds: Iterable[int],
    folder: Path,
    settings: Mapping[str, object],
    overrides: Sequence[str],
) -> dict[Job, Config]:
    """Return every job with its resolved config.

    `settings` are those that are not None, `overrides` the user's own.
    """
    given = [f"{key}={value}" for key, value in settings.items() if value is not None]
    experiments = experiments_of(tables, load_config(preset.overlays, [*given, *overrides]))
    taken = sorted({override.partition("=")[0] for override in overrides} & planned_keys(experiments))
    if taken:
        raise ConfigError(
            [f"{key}: is set by the plan (tables, --seeds, --root, --runs), not by hand" for key in taken]
        )
    jobs = jobs_of(experiments, seeds, folder, preset.overlays, [*given, *overrides])
    return {job: read_config(list(job.arguments)) for job in jobs}


def choose(jobs: Mapping[Job, Config], patterns: Sequence[str]) -> dict[Job, Config]:
    """Return the jobs that a pattern names, with or without their seed, in the order of the patterns,
    after the steps 0 they need.
    """

    rows = {job: job.name.rpartition("_seed")[0] for job in jobs}
    named = {
        pattern: [job for job in jobs if fnmatchcase(job.name, pattern) or fnmatchcase(rows[job], pattern)]
        for pattern in patterns
    }
    unknown = [pattern for pattern, found in named.items() if not found]
    if unknown:
        known = ", ".join(dict.fromkeys(rows.values()))
        raise ConfigError(
            [f"--only {pattern}: no run has this name; choose of {known}" for pattern in unknown]
        )
    chosen = dict.fromkeys(job for found in named.values() for job in found)
    needed = {job.needs for job in chosen}
    first = dict.fromkeys(job for job in jobs if job.name in needed)
    return {job: jobs[job] for job in first | chosen}


def look_at(jobs: Mapping[Job, Config], preset: Preset, count: bool = True) -> list[PlannedRun]:
    """Return how far each job is.

    `count` reads the data set; without it the costs are known as far as the preset knows them.
    """
    data = {config.data for config in jobs.values()}
    known = {d: preset.sizes.get((d.protocol or "", d.mode)) if d.order is None else None for d in data}
    sizes = {d: count_images(d) if count else known[d] for d in data}
    runs = [PlannedRun(job, config, sizes[config.data]) for job, config in jobs.items()]
    wanted = {run.job.needs for run in runs if run.to_do}
    for run in runs:
        if run.is_step_0 and run.to_do and run.name not in wanted:
            run.state = State.UNNEEDED
    return runs


def count_images(data: DataConfig) -> Sizes:
    dataset = configured_dataset(data)
    classes = build_index(
        dataset.name, dataset.train, dataset.num_classes, cache=data.cache, unnamed=data.unnamed
    )
    steps = configured_steps(data.dataset, data.protocol, data.steps, dataset.class_names, data.order)
    names = [image.name for image in dataset.train]
    return tuple(map(len, images_of_steps(classes, names, steps, data.mode, data.split_seed)))


# ------------------------------------------------------------------------------------------ printing the plan


def describe(runs: Sequence[PlannedRun], preset: Preset) -> str:
    """Return the plan as a table, what is to do, why runs count as others, and what sharing step 0 saves."""
    seconds, basis = seconds_per_pass(run.folder for run in runs if run.state != State.OTHER), "measured here"
    if seconds is None:
        quickstart = [RunFolder(path) for path in sorted(QUICKSTART.iterdir())]
        seconds, basis = preset.seconds or seconds_per_pass(quickstart), preset.basis
    assert seconds is not None
    rows = [[run.name, run.state, *_costs(run, seconds)] for run in runs]
    states = [run.state for run in runs]
    lines = [
        format_table(["run", "state", "image passes", "hours left (estimate)"], rows),
        "",
        f"{len(runs)} runs: " + ", ".join(f"{states.count(s)} {s}" for s in State if s in states),
        *_grouped(State.OTHER, {run.name: run.differences for run in runs}),
        *_grouped("note", {run.name: run.notes for run in runs}),
    ]
    if any(run.sizes is None for run in runs):
        return "\n".join(
            [*lines, "image passes are unknown without the data set: give its place with --root"]
        )
    left = sum(run.passes_left() for run in runs)
    hours = f"estimate {left * seconds / 3600:.1f} hours, one run after the other"
    lines += [f"to do: {left:,} image passes, {hours}, {1000 * seconds:.1f} ms per image ({basis})"]
    return "\n".join([*lines, *_saving(runs)])


def _grouped(word: str, lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what is said of runs, once for all of which it is said: "other config: optim.lr: 0.01 -> 0.02
    (mib_seed1 and 19 more)".
    """
    runs_by_line: dict[str, list[str]] = {}
    for name, said in lines.items():
        for line in said:
            runs_by_line.setdefault(line, []).append(name)
    more = {line: f" and {len(names) - 1} more" * (len(names) > 1) for line, names in runs_by_line.items()}
    return [f"{word}: {line} ({names[0]}{more[line]})" for line, names in runs_by_line.items()]


def _costs(run: PlannedRun, seconds: float) -> tuple[str, str]:
    if run.sizes is None:
        return "?", "?"
    return f"{run.passes():,}", f"{run.passes_left() * seconds / 3600:.2f}" if run.to_do else "-"


def _saving(runs: Sequence[PlannedRun]) -> list[str]:
    """Return nothing where only steps 0 were chosen: nobody shares them."""
    shared = sum(run.passes() for run in runs)
    first: dict[str | None, int] = {run.name: run.passes() for run in runs if run.is_step_0}
    alone = sum(run.passes() + first.get(run.job.needs, 0) for run in runs if not run.is_step_0)
    if not alone:
        return []
    saved = f"{1 - shared / alone:.0%}"
    return [f"sharing step 0: {shared:,} image passes in all instead of {alone:,}, {saved} saved"]


def seconds_per_pass(folders: Iterable[RunFolder]) -> float | None:
    """Return what training took so far.

    A step 0 has the same metrics in all runs that share it, and counts once.
    """
    steps = set()
    for folder in folders:
        try:
            results = folder.read_results() or {"steps": []}
        except RunError:
            continue
        for step in results["steps"]:
            if "seconds" in step:
                steps.add((step["seconds"], step["iterations"] * results["config"]["train"]["batch_size"]))
    passes = sum(passes for _, passes in steps)
    return sum(seconds for seconds, _ in steps) / passes if passes else None
