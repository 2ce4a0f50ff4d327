"""A run: what every part of it needs to know. `prepare` finds everything that can be wrong before the first iteration."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from configs.schema import EVALUATION_KEYS, FREE_KEYS, Config, config_differences, dump_config, load_config
from data import Dataset, load_dataset
from data.incremental import check_steps, select_train
from data.index import build_index, content_digest
from data.loaders import iterations_per_epoch, micro_batch_size
from data.protocols import Step, configured_steps
from engine.optim import iterations_of
from engine.placement import Placement
from engine.ranks import Ranks, StopRequest, be_deterministic, gather_objects, main_rank_first
from engine.results import environment
from engine.run_folder import RunError, RunFolder, read_results
from engine.scores import drop_from, evaluation_name, scores_of
from methods import AlterSGD, Descent, make_phase
from tracking.tensorboard import Board


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
    board: Board
    results: dict
    evaluation: str | None = None  # the name of a setting for scores that is not the run's own

    @cached_property
    def scores(self) -> list[dict]:
        """The figures of steps in the setting that this start scores in: a part of `results`."""
        return scores_of(self.results, self.evaluation, self.config.model_dump(mode="json"))

    @property
    def last_step(self) -> int:
        """The last one asked for."""
        last = self.config.train.last_step
        return len(self.steps) - 1 if last is None else last

    @cached_property
    def place(self) -> Placement:
        return Placement.of(self.config.train, self.ranks.device)

    @property
    def sync_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks over which norms take their statistics."""
        return self.ranks.group if self.config.model.sync else None

    def epoch(self, step: Step) -> int:
        """Iterations of an epoch of the step."""
        return iterations_per_epoch(
            len(self.train_images[step.index]), self.config.train.batch_size, step.index
        )

    def iterations(self, step: Step) -> int:
        """T: optimizer updates in a step."""
        return iterations_of(self.config.train, len(self.train_images[step.index]), step.index)

    def iterations_before(self, step: Step) -> int:
        return sum(self.iterations(earlier) for earlier in self.steps[: step.index])

    def iterations_until(self, step: Step) -> int:
        """Updates from the beginning of the run to the end of the step: where its figures stand in TensorBoard."""
        return self.iterations_before(step) + self.iterations(step)

    def phase(self, step: Step) -> Descent:
        config = self.config
        return make_phase(
            step=step.index,
            strength=config.method.strength,
            epoch=self.epoch(step),
            **config.phase.model_dump(),
        )

    def say(self, text: str) -> None:
        if self.ranks.is_main:
            tqdm.write(text)


def prepare(config: Config, ranks: Ranks, stop: StopRequest) -> Run:
    """Everything that can be wrong is found here, before the first iteration."""
    torch.backends.cudnn.benchmark = not config.train.deterministic
    be_deterministic(config.train.deterministic)
    micro_batch_size(config.train.batch_size, ranks.world, config.train.accumulate)  # says if it is none
    dataset = load_dataset(config.data.dataset, config.data.root, config.data.train_list)
    steps = configured_steps(
        config.data.dataset, config.data.protocol, config.data.steps, dataset.class_names
    )
    index = partial(
        build_index,
        dataset.name,
        num_classes=len(dataset.class_names),
        cache=config.data.cache,
        progress=ranks.is_main,
    )
    with main_rank_first(ranks):
        train_classes, test_classes = index(dataset.train), index(dataset.test)
    check_steps(dataset.class_names, train_classes, steps, config.data.mode)
    chosen = [select_train(train_classes, step, config.data.mode) for step in steps]

    results: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "protocol": [step.new for step in steps],
        "environment": environment(ranks.device, ranks.world),
        "data": {
            "train": content_digest(dataset.train, train_classes),
            "test": content_digest(dataset.test, test_classes),
        },
        "steps": [],
    }
    folder = open_folder(config, ranks, results)
    evaluation = evaluation_name(results, config.model_dump(mode="json"))
    board = Board(
        folder.board(evaluation),
        about=dump_config(config),
        old=[dataset.class_names[c] for c in steps[0].seen],
        new=[dataset.class_names[c] for step in steps[1:] for c in step.new],
        enabled=ranks.is_main,
    )
    run = Run(config, ranks, stop, folder, dataset, steps, chosen, test_classes, board, results, evaluation)
    if board.is_new and run.scores:  # they came with train.start_from
        board.open()
        for result in run.scores:
            board.results(result, run.iterations_until(steps[result["step"]]))
    iterations = [run.iterations(step) for step in steps]  # raises if a step has fewer images than a batch
    for notice in [*dataset.notices, *ends_on_an_ascent(run)]:
        run.say(f"note: {notice}")
    run.say(
        f"{folder.path}: {config.method.name} / {config.phase.name}, strength {config.method.strength:g}\n"
        f"pictures   {' + '.join(str(len(images)) for images in chosen)}\n"
        f"iterations {' + '.join(map(str, iterations))}"
    )
    return run


def open_folder(config: Config, ranks: Ranks, results: dict[str, Any]) -> RunFolder:
    """The run's folder, locked and checked; what it holds of earlier steps goes into `results`."""
    folder = RunFolder(Path(config.run.folder) / run_name(config))
    if ranks.is_main:
        folder.lock()
        check_same_config(config, folder)
        adopt_start(config, folder, results)
        if not (config.train.evaluate_only and (folder.config_file.exists() or folder.results_file.exists())):
            folder.write_config(dump_config(config))
        folder.set_damaged_steps_aside(tqdm.write)
    gather_objects(ranks, None)  # the others wait until the folder is ready
    earlier = folder.read_results()
    if earlier:
        check_same_data(config, folder, earlier["data"], results["data"])
        saved = [folder.step_checkpoint(i).exists() for i in range(len(earlier["steps"]))]
        results["steps"] = earlier["steps"][: sum(saved)]
        keep_evaluations(config, ranks, folder, earlier, results)
        return folder
    if config.train.evaluate_only:  # the figures were moved away; the run's own setting is still known
        results["config"] = load_config([folder.config_file]).model_dump(mode="json")
    if ranks.is_main:
        folder.write_results(results)
    return folder


def keep_evaluations(
    config: Config, ranks: Ranks, folder: RunFolder, earlier: dict[str, Any], results: dict[str, Any]
) -> None:
    """Scores in other settings stay as long as their models do. Who only scores changes nothing that training recorded."""
    if config.train.evaluate_only:
        results |= earlier
    elif "evaluations" in earlier:
        results["evaluations"] = earlier["evaluations"]
        missing = next(i for i in count() if not folder.step_checkpoint(i).exists())
        dropped = drop_from(results, missing)
        if dropped and ranks.is_main:
            tqdm.write(
                f"note: step {missing} is trained anew: its scores as {', '.join(dropped)} are dropped"
            )
            folder.write_results(results)


def run_name(config: Config) -> str:
    if config.run.name:
        return config.run.name
    protocol = config.data.protocol if config.data.steps is None else "own-steps"
    phase = "" if config.phase.name == "descent" else f"-{config.phase.name}"
    phase += "" if config.update.name == "plain" else f"-{config.update.name}"
    return f"{config.data.dataset}_{protocol}_{config.data.mode}_{config.method.name}{phase}_seed{config.train.seed}"


def check_same_config(config: Config, folder: RunFolder) -> None:
    """A folder holds one experiment: refuse to go on with another config unless forced."""
    if not folder.config_file.exists():
        return
    free = FREE_KEYS + (EVALUATION_KEYS if config.train.evaluate_only else ())
    changed = config_differences(load_config([folder.config_file]).model_dump(), config.model_dump(), free)
    if changed and not config.run.force:
        raise RunError(
            f"{folder.path} holds a run with another config:\n  " + "\n  ".join(changed) + "\n"
            "Give this one a run.name of its own, restore the old values, or insist with run.force=true"
        )


def check_same_data(config: Config, folder: RunFolder, before: dict[str, str], now: dict[str, str]) -> None:
    changed = [part for part in now if before[part] != now[part]]
    if changed and not config.run.force:
        raise RunError(
            f"{folder.path} was begun with other {' and '.join(changed)} pictures than data.root={config.data.root} holds "
            "now: restore the data set, give this run a run.name of its own, or insist with run.force=true"
        )


def adopt_start(config: Config, folder: RunFolder, results: dict) -> None:
    """train.start_from: begin with the given step, and with its figures if they were made as ours would be."""
    if config.train.start_from is None:
        return
    source = Path(config.train.start_from)
    step = folder.adopt_step(source)
    theirs = read_results(source.parent / "results.json")
    if step is not None and theirs and theirs["data"] == results["data"] and folder.read_results() is None:
        differences = config_differences(theirs["config"], results["config"])
        if not any(difference.startswith(EVALUATION_KEYS) for difference in differences):
            folder.write_results(results | {"steps": theirs["steps"][: step + 1]})


def ends_on_an_ascent(run: Run) -> Iterator[str]:
    """A notice if halves of more than an iteration are cut so that a model is handed over as an ascent left it."""
    if run.config.phase.name != "altersgd":  # the controls ascend nothing
        return
    phases = [(run.phase(step), run.iterations(step)) for step in run.steps]
    if any(isinstance(phase, AlterSGD) and phase.every > 1 and phase.ascends(n, n) for phase, n in phases):
        p, every = run.config.phase.p, run.config.phase.every
        yield f"with phase.p={p:.4g} and phase.every={every} a step ends on an ascent; another p ends on a descent"
