"""A run: what every part of it needs to know; `prepare` finds what is wrong before the first iteration."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from configs.identity import run_name, short_name
from configs.schema import EVALUATION_KEYS, FREE_KEYS, Config, ConfigError, dump_config, load_config
from data import Dataset, configured_dataset
from data.incremental import check_steps, images_of_steps
from data.index import content_digest, read_index
from data.loaders import iterations_per_epoch, micro_batch_size
from data.memory import Kept, choose_memory
from data.protocols import Step, configured_steps
from engine import identity
from engine.arguments import without_effect
from engine.objective import Placement
from engine.optim import iterations_of
from engine.ranks import (
    Ranks,
    StoppedBySignal,
    StopRequest,
    any_rank,
    be_deterministic,
    check_alike,
    main_rank_first,
    together,
)
from engine.results import changed_lists, environment, metrics_by_step, steps_asked_for
from engine.run_folder import RunError, RunFolder
from engine.scores import drop_from, evaluation_name, scores_of
from engine.start import settle_start
from methods import METHODS, AlterSGD, Descent, make_phase
from tracking.tracker import Trackers, make_trackers

T = TypeVar("T")
# of results.json: what its metrics depend on beside config and data
FACTS = ("classes", "weights", "started_from")
# of the config: what may differ between the machines of a run, whose ranks compare what they find there
MACHINE_KEYS = ("data.root", "data.cache", "data.workers", "run.folder")


@dataclass
class Run:
    config: Config
    ranks: Ranks
    stop: StopRequest
    folder: RunFolder
    dataset: Dataset
    steps: list[Step]
    train_images: list[list[int]]  # of each step: positions in dataset.train
    test_classes: list[frozenset[int]]
    board: Trackers
    results: dict
    evaluation: str | None = None  # the name of a setting for scores that is not the run's own
    memory: list[list[Kept]] = field(default_factory=list)  # of each step, if the run has a memory

    @cached_property
    def scores(self) -> list[dict]:
        """The metrics of steps in the setting that this start scores in: a part of `results`."""
        return scores_of(self.results, self.evaluation, self.config.model_dump(mode="json"))

    @property
    def first(self) -> int:
        """The step that the run begins with: 0, or the one that it starts from."""
        return first_step(self.results)

    @property
    def last_step(self) -> int:
        """The last one asked for."""
        return steps_asked_for(self.config.train.model_dump(), len(self.steps)) - 1

    def remembered(self, step: Step) -> list[Kept]:
        """Return the images of earlier steps that come back in the step."""
        return self.memory[step.index] if self.memory else []

    def num_images(self, step: Step) -> int:
        """Images of an epoch. Those that make half of every batch do not lengthen it."""
        is_longer = METHODS[self.config.method.name].memory == "concatenated"
        return len(self.train_images[step.index]) + is_longer * len(self.remembered(step))

    @cached_property
    def place(self) -> Placement:
        return Placement.of(self.config, self.ranks.device)

    @property
    def sync_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks over which norms take their statistics."""
        return self.ranks.group if self.config.model.sync else None

    def epoch(self, step: Step) -> int:
        """Return the number of iterations in an epoch of the step."""
        return iterations_per_epoch(self.num_images(step), self.config.train.batch_size, step.index)

    def iterations(self, step: Step) -> int:
        """Return T, the number of optimizer updates in a step."""
        return iterations_of(self.config.train, self.num_images(step), step.index)

    def iterations_before(self, step: Step) -> int:
        return sum(self.iterations(earlier) for earlier in self.steps[: step.index])

    def iterations_until(self, step: Step) -> int:
        """Return the number of updates until the end of the step, where trackers show its metrics."""
        return self.iterations_before(step) + self.iterations(step)

    def phase(self, step: Step) -> Descent:
        config = self.config
        return make_phase(
            step=step.index,
            strength=config.method.strength,
            epoch=self.epoch(step),
            **config.phase.model_dump(),
        )

    def until_stopped(self, batches: Iterable[T], doing: str) -> Iterator[T]:
        """Yield the batches until somebody asks to stop; ranks may have more or fewer, and agree
        afterwards."""
        stopped = False
        for batch in batches:
            if stopped := self.stop.requested:
                break
            yield batch
        if any_rank(self.ranks, stopped):
            self.board.flush()
            raise StoppedBySignal(f"stopped while {doing}: the same command resumes from here")

    def say(self, text: str) -> None:
        if self.ranks.is_main:
            tqdm.write(text)


def prepare(config: Config, ranks: Ranks, stop: StopRequest) -> Run:
    """Return a run that is ready to train, after everything that can be wrong was looked for."""
    torch.backends.cudnn.benchmark = not config.train.deterministic
    be_deterministic(config.train.deterministic)
    with main_rank_first(ranks):
        check_norms(config, ranks.world)
        dataset = configured_dataset(config.data)
        steps = configured_steps(
            config.data.dataset,
            config.data.protocol,
            config.data.steps,
            dataset.class_names,
            config.data.order,
        )
        index = partial(
            read_index,
            dataset.name,
            num_classes=len(dataset.class_names),
            cache=config.data.cache,
            progress=ranks.is_main,
            unnamed=config.data.unnamed,
            between=partial(leave_if_asked, stop),
        )
        train_index, test_index = index(dataset.train), index(dataset.test)
        train_classes, test_classes = train_index.classes, test_index.classes
        names = [image.name for image in dataset.train]
        chosen = images_of_steps(train_classes, names, steps, config.data.mode, config.data.split_seed)
        check_steps(dataset.class_names, train_classes, steps, chosen, config.data.mode)
        results: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "protocol": [list(step.new) for step in steps],
            "remarks": METHODS[config.method.name].remarks(config),
            "classes": list(dataset.class_names),
            "environment": environment(ranks.device, ranks.world),
            "data": {
                "train": content_digest(dataset.train, train_classes),
                "test": content_digest(dataset.test, test_classes),
                "train_content": train_index.content,
                "test_content": test_index.content,
            },
            "steps": [],
        }
    # from which, with the config, the iterations of each step follow
    facts = {"images": results["data"] | {"of each step": [len(images) for images in chosen]}}
    check_alike(ranks, results["config"] | facts | {"classes": results["classes"]}, free=MACHINE_KEYS)
    folder = open_folder(config, ranks, steps, results)
    evaluation = evaluation_name(results, config.model_dump(mode="json"))
    board = make_trackers(
        config.run.tracker,
        ranks.is_main,
        folder.board(evaluation),
        about=dump_config(config),
        old=[dataset.class_names[c] for c in steps[0].seen],
        new=[dataset.class_names[c] for step in steps[1:] for c in step.new],
        palette=dataset.palette,
    )
    memory = memories(config, train_classes, chosen, steps)
    run = Run(
        *(
            config,
            ranks,
            stop,
            folder,
            dataset,
            steps,
            chosen,
            test_classes,
            board,
            results,
            evaluation,
            memory,
        )
    )
    iterations = [run.iterations(step) for step in steps]  # raises if a step has fewer images than a batch
    notices = [*dataset.notices, *train_index.notes, *test_index.notes]
    for notice in [*notices, *ends_on_an_ascent(run), *without_effect(config)]:
        run.say(f"note: {notice}")
    remembers = f", memory {config.method.memory}" if METHODS[config.method.name].memory else ""
    run.say(
        f"{folder.path}: {short_name(config.model_dump())}, strength {config.method.strength:g}{remembers}\n"
        f"images     {' + '.join(str(len(images)) for images in chosen)}\n"
        f"iterations {' + '.join(map(str, iterations))}"
    )
    return run


def memories(
    config: Config, train_classes: list[frozenset[int]], chosen: list[list[int]], steps: list[Step]
) -> list[list[Kept]]:
    """Return what each step remembers, if the run has a memory at all."""
    size, seed = config.method.memory, config.train.seed
    return [choose_memory(train_classes, chosen, steps, step, size, seed) for step in steps] if size else []


def check_norms(config: Config, world: int) -> None:
    """Training pools the whole map to one value per image and channel, of which a norm needs two."""
    size = micro_batch_size(config.train.batch_size, world, config.train.accumulate)  # says if it is none
    seen_together = size * (world if config.model.sync else 1)
    if seen_together == 1 and not config.train.evaluate_only:
        cut = f"{world} ranks x train.accumulate {config.train.accumulate}"
        raise RunError(
            f"train.batch_size {config.train.batch_size} cut into {cut} shows the network one image at a "
            "time, of which a norm cannot take statistics (one value per channel after the pooling): lower "
            "train.accumulate, raise train.batch_size, or on several ranks set model.sync=true"
        )


def leave_if_asked(stop: StopRequest) -> None:
    if stop.requested:
        raise StoppedBySignal("stopped while scanning the data set: the same command scans it again")


def open_folder(config: Config, ranks: Ranks, steps: list[Step], results: dict[str, Any]) -> RunFolder:
    """Return the run's folder, locked and checked; what it holds of earlier steps goes into `results`."""
    folder = RunFolder(Path(config.run.folder) / run_name(config.model_dump()))
    with together(ranks):  # the others wait until the folder is ready
        if ranks.is_main:
            folder.lock()
            before = folder.earlier_results() or {}
            weights = identity.weights_of(config, needed=trains_step_0(config, folder, before))
            check_same_config(config, folder, before, weights)
            check_same_classes(folder, before, results["classes"])
            results |= {"weights": weights} if weights else {}
            settle_start(config, folder, results, steps, tqdm.write)
            if not (config.train.evaluate_only and (folder.config_file.exists() or before)):
                folder.write_config(dump_config(config))
            folder.set_damaged_steps_aside(tqdm.write)
    check_alike(ranks, {"run.folder": folder.sight()})  # one disk, seen by all
    earlier = folder.earlier_results()
    if earlier:
        check_same_data(config, folder, earlier["data"], results["data"])
        if ranks.is_main and "train_content" not in earlier["data"]:
            tqdm.write(
                f"note: {folder.path} was begun before the content of images was recorded: that they are the "
                "same is known of their names, classes and sizes alone"
            )
        results |= {key: earlier[key] for key in FACTS if key in earlier}
        facts = {key: results[key] for key in FACTS if key in results}
        facts["data"] = results["data"] | earlier["data"]
        if facts != {key: earlier.get(key) for key in facts}:
            earlier |= facts  # what a folder of an older version lacks is asked for once
            if ranks.is_main:
                folder.write_results(earlier)
        missing = first_missing(folder, first_step(results))
        metrics = metrics_by_step(earlier["steps"])
        results["steps"] = [result for index, result in metrics.items() if index < missing]
        keep_evaluations(config, ranks, folder, earlier, results, missing)
        behind = [step.index for step in steps[missing:] if folder.step_checkpoint(step.index).exists()]
        if behind and ranks.is_main:
            tqdm.write(
                f"note: step_{missing}.pt is missing; the models of later steps "
                f"({', '.join(map(str, behind))}) were trained from it, and not from one that is trained "
                "now: delete them to have them trained again"
            )
        return folder
    if config.train.evaluate_only:  # the metrics were moved away; the run's own setting is still known
        results["config"] = load_config([folder.config_file]).model_dump(mode="json")
    if ranks.is_main:
        folder.write_results(results)
    return folder


def trains_step_0(config: Config, folder: RunFolder, before: dict[str, Any]) -> bool:
    starts_elsewhere = config.train.start_from is not None or "started_from" in before
    return not (starts_elsewhere or config.train.evaluate_only or folder.step_checkpoint(0).exists())


def first_step(results: dict[str, Any]) -> int:
    """Return the step that a run begins with, by its results.json."""
    return results["started_from"]["step"] if "started_from" in results else 0


def first_missing(folder: RunFolder, first: int) -> int:
    """Return the first step from `first` on that has no checkpoint: metrics from there on are made again."""
    while folder.step_checkpoint(first).exists():
        first += 1
    return first


def keep_evaluations(
    config: Config,
    ranks: Ranks,
    folder: RunFolder,
    earlier: dict[str, Any],
    results: dict[str, Any],
    missing: int,
) -> None:
    """Keep scores in other settings as long as their models; who only scores keeps all that is recorded."""
    if config.train.evaluate_only:
        results |= earlier
    elif "evaluations" in earlier:
        results["evaluations"] = earlier["evaluations"]
        dropped = drop_from(results, missing)
        if dropped and ranks.is_main:
            tqdm.write(
                f"note: step {missing} is trained anew: its scores as {', '.join(dropped)} are dropped"
            )
            folder.write_results(results)


def check_same_config(
    config: Config, folder: RunFolder, before: dict[str, Any], weights: dict[str, str] | None
) -> None:
    """A folder holds one experiment: refuse to resume with another config unless forced."""
    if not folder.config_file.exists():
        return
    free = FREE_KEYS + (EVALUATION_KEYS if config.train.evaluate_only else ())
    try:
        found = load_config([folder.config_file]).model_dump()
        if "\nrun:\n" not in folder.config_file.read_text(encoding="utf-8"):  # what is left may read well
            raise ConfigError(["run: is missing, the last section of a whole file"])
    except ConfigError as error:
        if config.run.force:
            return
        raise RunError(
            f"{folder.config_file}: damaged, or of another version of this code:\n  "
            + "\n  ".join(error.problems)
            + "\n"
            "Give this run a run.name of its own, restore the file or that version, or insist with "
            "run.force=true"
        ) from error
    changed, notes = identity.run_differences(found, before, config, weights, free)
    if changed and not config.run.force:
        raise RunError(
            f"{folder.path} holds a run with another config:\n  " + "\n  ".join(changed) + "\n"
            "Give this one a run.name of its own, restore the old values, or insist with run.force=true"
        )
    for note in notes:
        tqdm.write(f"note: {note}")


def check_same_classes(folder: RunFolder, before: dict[str, Any], class_names: list[str]) -> None:
    """Not even run.force mixes class names: metrics are kept under them."""
    known = identity.recorded_classes(before)
    renamed = identity.class_differences(known, dict(enumerate(class_names)))
    if renamed:
        raise RunError(
            f"{folder.path} was begun with other class names: {identity.some(renamed)}. Restore the names of "
            "the data set, or give this run a run.name of its own"
        )


def check_same_data(config: Config, folder: RunFolder, before: dict[str, str], now: dict[str, str]) -> None:
    changed = changed_lists(before, now)
    if changed and not config.run.force:
        raise RunError(
            f"{folder.path} was begun with other {' and '.join(changed)} images than "
            f"data.root={config.data.root} holds now: restore the data set, give this run a run.name of its "
            "own, or insist with run.force=true"
        )


def ends_on_an_ascent(run: Run) -> Iterator[str]:
    """Yield a notice if a step with long halves hands its model over as an ascent left it."""
    if run.config.phase.name != "altersgd":  # the controls ascend nothing
        return
    phases = [(run.phase(step), run.iterations(step)) for step in run.steps]
    if any(isinstance(phase, AlterSGD) and phase.every > 1 and phase.ascends(n, n) for phase, n in phases):
        p, every = run.config.phase.p, run.config.phase.every
        yield (
            f"with phase.p={p:.4g} and phase.every={every} a step ends on an ascent; another p ends on a "
            "descent"
        )
