"""Continual semantic segmentation: learn the classes of a protocol step by step, and measure what is forgotten.

    python train.py configs/quickstart.yaml configs/methods/mib.yaml configs/altersgd.yaml data.root=/data/shapes
    torchrun --nproc_per_node=2 train.py configs/voc/15-1.yaml configs/methods/mib.yaml data.root=/data/VOC2012

Arguments are YAML overlays, merged left to right over configs/base.yaml, and key.sub=value overrides, which always win.
The same command, typed again, goes on where the run stopped. All steps run unless train.first_step / train.last_step say
otherwise; train.start_from=<step_0.pt> begins after a step trained elsewhere; train.evaluate_only=true only scores.

Exit codes: 0 finished, 2 bad config, data or weights, 75 stopped by a signal with everything saved, 1 anything else.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from configs.schema import (
    EVALUATION_KEYS,
    FREE_KEYS,
    Config,
    ConfigError,
    config_differences,
    dump_config,
    load_config,
)
from data import DataError, Dataset, load_dataset
from data.incremental import StepDataset, check_steps, select_test, select_train, test_table, train_table
from data.index import build_index, content_digest
from data.loaders import iterations_per_epoch, micro_batch_size, test_loader, train_loader
from data.protocols import PROTOCOLS, Step, configured_steps
from data.transforms import normalise, test_transform, train_transform
from engine import checkpoint
from engine.inference import predict
from engine.probe import Probe, places_of
from engine.ranks import (
    RankError,
    Ranks,
    StopRequest,
    agree,
    any_rank,
    be_deterministic,
    gather_objects,
    main_rank_first,
    start_ranks,
    stop_ranks,
    wrap,
)
from engine.results import environment, step_result
from engine.run_folder import RunError, RunFolder, read_results
from engine.terminal import exit_with
from methods import (
    METHODS,
    PHASES,
    UPDATES,
    AlterSGD,
    Descent,
    Method,
    Update,
    Weights,
    WithObservers,
    make_method,
    make_phase,
    make_update,
    penalise_confidence,
    published_strength,
)
from metrics.confusion import ConfusionMatrix
from metrics.continual import group_names
from metrics.health import FiniteGuard, NonFiniteLoss
from models.pretrained import WeightsError, load_body_weights
from models.segmenter import BODIES, Output, Segmenter, build_segmenter
from tracking.progress import Progress, bar_place
from tracking.shown import pictures_to_show
from tracking.tables import class_table, step_table
from tracking.tensorboard import Board

STOPPED_BY_SIGNAL = 75
BOARD_PAGE = "http://localhost:6006/#custom_scalars&_smoothingWeight=0"
DEAD_WORKER = (
    "A process that loads pictures died, most often for lack of memory: lower data.workers or data.crop. "
    "The same command goes on from the last checkpoint."
)
BASE_CONFIG = Path(__file__).parent / "configs" / "base.yaml"
AMP_DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class StoppedBySignal(Exception):
    pass


@dataclass
class Run:
    """What every part of the walk needs to know."""

    config: Config
    ranks: Ranks
    stop: StopRequest
    folder: RunFolder
    dataset: Dataset
    steps: list[Step]
    train_pictures: list[list[int]]  # of each step: positions in dataset.train
    test_classes: list[frozenset[int]]
    board: Board
    results: dict

    def iterations(self, step: Step) -> int:
        """T: optimizer updates in a step."""
        train = self.config.train
        epochs = train.epochs if step.index == 0 else train.epochs_later
        return epochs * self.epoch(step)

    def epoch(self, step: Step) -> int:
        """Iterations of an epoch of the step."""
        return iterations_per_epoch(
            len(self.train_pictures[step.index]), self.config.train.batch_size, step.index
        )

    def phase(self, step: Step) -> Descent:
        config = self.config
        return make_phase(
            step=step.index,
            strength=config.method.strength,
            epoch=self.epoch(step),
            **config.phase.model_dump(),
        )

    def iterations_before(self, step: Step) -> int:
        return sum(self.iterations(earlier) for earlier in self.steps[: step.index])

    def iterations_until(self, step: Step) -> int:
        """Updates from the beginning of the run to the end of the step: where its figures stand in TensorBoard."""
        return self.iterations_before(step) + self.iterations(step)

    def say(self, text: str) -> None:
        if self.ranks.is_main:
            tqdm.write(text)


# ------------------------------------------------------------------------------------------------------------ the walk


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    try:
        config = read_config(arguments)
        ranks = start_ranks(config.train.device)
    except ValueError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print("\n".join(f"config error: {problem}" for problem in problems), file=sys.stderr)
        return 2
    try:
        walk(config, ranks, StopRequest())
        return 0
    except StoppedBySignal as stopped:
        print(f"[rank {ranks.rank}] {stopped}", file=sys.stderr)
        return STOPPED_BY_SIGNAL
    except (DataError, WeightsError, RunError, checkpoint.CheckpointError, NonFiniteLoss, RankError) as error:
        tqdm.write(f"error: {error}", file=sys.stderr)  # not behind a progress bar
        return 2
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        print(f"error: {error}\n{DEAD_WORKER}", file=sys.stderr)
        return 1
    finally:
        stop_ranks()


def walk(config: Config, ranks: Ranks, stop: StopRequest) -> dict:
    """All steps of the protocol: train what is missing, score what has no score, and return the results."""
    run = prepare_run(config, ranks, stop)
    last = len(run.steps) - 1 if config.train.last_step is None else config.train.last_step
    was_finished = True
    for step in run.steps[: last + 1]:
        saved = run.folder.step_checkpoint(step.index).exists()
        wanted = step.index >= config.train.first_step
        scored = len(run.results["steps"]) > step.index and not (config.train.evaluate_only and wanted)
        if saved and scored:
            continue
        was_finished = False
        if saved:
            model, state = load_step(run, step)
            run.board.open()  # scoring again must not discard the curves of later steps
        elif wanted and not config.train.evaluate_only:
            model, state = train_step(run, step)
        else:
            raise RunError(
                f"{run.folder.step_checkpoint(step.index)} is missing: train step {step.index} first, "
                "or give the checkpoint as train.start_from"
            )
        record(run, step, evaluate(run, step, model), state["costs"])
    results = run.results["steps"]
    if results:
        run.say("\n" + class_table(results) + "\n\n" + step_table(results, group_names(run.steps)))
        run.say(
            f"\nresults: {run.folder.results_file}\nwatch:   tensorboard --logdir {config.run.folder}   {BOARD_PAGE}"
        )
    if was_finished:
        run.say("Every step asked for was finished already: nothing was trained.")
    if len(results) == len(run.steps):
        run.board.finish(run.results["config"])
    run.board.close()
    run.folder.unlock()
    return run.results


def prepare_run(config: Config, ranks: Ranks, stop: StopRequest) -> Run:
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
    folder = RunFolder(Path(config.run.folder) / run_name(config))
    if ranks.is_main:
        folder.lock()
        check_same_config(config, folder)
        adopt_start(config, folder, results)
        folder.write_config(dump_config(config))
        folder.set_damaged_steps_aside(tqdm.write)
    gather_objects(ranks, None)  # the others wait until the folder is ready
    earlier = folder.read_results()
    if earlier:
        check_same_data(config, folder, earlier["data"], results["data"])
        saved = [folder.step_checkpoint(i).exists() for i in range(len(earlier["steps"]))]
        results["steps"] = earlier["steps"][: sum(saved)]
    elif ranks.is_main:
        folder.write_results(results)
    board = Board(
        folder.path,
        about=dump_config(config),
        old=[dataset.class_names[c] for c in steps[0].seen],
        new=[dataset.class_names[c] for step in steps[1:] for c in step.new],
        enabled=ranks.is_main,
    )
    run = Run(config, ranks, stop, folder, dataset, steps, chosen, test_classes, board, results)
    if board.is_new and results["steps"]:  # they came with train.start_from
        board.open()
        for step, result in zip(steps, results["steps"], strict=False):
            board.results(result, run.iterations_until(step))
    iterations = [run.iterations(step) for step in steps]  # raises if a step has fewer pictures than a batch
    for notice in [*dataset.notices, *ends_on_an_ascent(run)]:
        run.say(f"note: {notice}")
    run.say(
        f"{folder.path}: {config.method.name} / {config.phase.name}, strength {config.method.strength:g}\n"
        f"pictures   {' + '.join(str(len(pictures)) for pictures in chosen)}\n"
        f"iterations {' + '.join(map(str, iterations))}"
    )
    return run


def ends_on_an_ascent(run: Run) -> Iterator[str]:
    """A notice if halves of more than an iteration are cut so that a model is handed over as an ascent left it."""
    phases = [(run.phase(step), run.iterations(step)) for step in run.steps]
    if any(isinstance(phase, AlterSGD) and phase.every > 1 and phase.ascends(n, n) for phase, n in phases):
        p, every = run.config.phase.p, run.config.phase.every
        yield f"with phase.p={p:.4g} and phase.every={every} a step ends on an ascent; another p ends on a descent"


def train_step(run: Run, step: Step) -> tuple[Segmenter, dict]:
    """One incremental step: from the saved model after the step before to the model after this one."""
    config, ranks, total = run.config, run.ranks, run.iterations(step)
    model, teacher, method = begin_step(run, step)
    phase = run.phase(step)
    last = phase.last_iteration(total)
    update = make_update(step=step.index, **config.update.model_dump())
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=initial_rate(config, step),
        momentum=config.optim.momentum,
        nesterov=config.optim.nesterov,
        weight_decay=config.optim.weight_decay,
        # Fused, a first update that the scaler skips would leave the momentum uninitialised.
        fused=config.train.amp != "fp16",
    )
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.train.amp == "fp16")
    parts = {"model": model, "method": method, "optimizer": optimizer, "scaler": scaler}
    resumed = checkpoint.restore_training(run.folder.resume_checkpoint, parts, ranks, run.say, step.index)
    done, seconds = resumed.get("iteration", 0), resumed.get("seconds", 0.0)
    measured = resumed.get("flatness", {})
    if done:
        run.say(f"going on with step {step.index} after iteration {done}")
    elif teacher is not None and method.surveys:
        method.survey(teacher_outputs(run, step, teacher))
    if config.train.losses == "compiled":
        method.segmentation_loss = torch.compile(method.segmentation_loss)
        method.retention_losses = torch.compile(method.retention_losses)
    loader = step_loader(
        run, step, iterations=range(done + 1, last + 1), batch_of=partial(phase.batch_of, total=total)
    )
    student, batches, guard = wrap(model, ranks), iter(loader), FiniteGuard()
    probe = Probe(
        config,
        ranks.device,
        run.dataset,
        run.steps,
        step,
        train_images=run.train_pictures[step.index],
        test_classes=run.test_classes,
        teacher=teacher,
        method=method,
        keep=phase.lambda_a,
        places=places_of(config, step, epoch=run.epoch(step), total=total, last=last),
    )
    offset = run.iterations_before(step)
    run.board.open(at=offset + done + 1)
    progress = Progress(
        run.board,
        title=f"step {step.index}/{len(run.steps) - 1}",
        total=last,
        done=done,
        offset=offset,
        batch_size=config.train.batch_size,
        quiet=not ranks.is_main,
        boundary=phase.boundary(total),
    )
    started = saved = time.monotonic()
    for iteration in range(done + 1, last + 1):
        weights = phase(iteration, total)
        schedule_iteration = phase.schedule_iteration(iteration, total)
        lr = set_learning_rate(optimizer, schedule_iteration, total, config.optim.power)
        phase.prepare(optimizer, iteration, total)
        evaluate_objective = objective_of(run, student, teacher, method, update, scaler, batches)
        if phase.updates(iteration, total):
            terms = update(model, evaluate_objective, weights, scaler.get_scale())
            scaler.unscale_(optimizer)
            # An overflow in fp16: the scaler is going to skip this update, and so does the method.
            if not scaler.is_enabled() or gradients_are_finite(model):
                terms |= method.after_backward(model, weights, lr)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                terms = evaluate_objective(weights, backward=False)
        guard.watch(iteration, terms)
        if place := probe.places.get(iteration):
            began = time.monotonic()
            measured[place] = probe(model)
            figures = {f"flatness/{name}": value for name, value in measured[place].items()}
            run.board.scalars(figures, offset + iteration)
            started += time.monotonic() - began  # no cost of the method

        save_now = config.run.checkpoint_every > 0 and iteration % config.run.checkpoint_every == 0
        stopping = ranks.group is None and run.stop.requested
        if iteration % config.run.log_every == 0 or iteration == last:
            progress(iteration, terms, weights.learn, weights.keep, lr)
            stop_if_not_finite(run, guard, loader)
            stopping = any_rank(ranks, run.stop.requested)
            overdue = 0 < 60 * config.run.checkpoint_minutes < time.monotonic() - saved
            save_now |= any_rank(ranks, overdue)
        if (save_now or stopping) and iteration < last:
            stop_if_not_finite(run, guard, loader)
            saved = time.monotonic()
            position = {"step": step.index, "iteration": iteration, "seconds": seconds + saved - started}
            checkpoint.save_training(
                run.folder.resume_checkpoint, parts, ranks, **position, flatness=measured
            )
            run.board.flush()  # or the curves would have a gap before the place where a killed run goes on
        if stopping and iteration < last:
            where = f"step {step.index}, iteration {iteration} of {last}"
            raise StoppedBySignal(f"stopped at {where}: the same command goes on from here")
    progress.close()
    agree(model, ranks)
    method.end_step(model)
    updates = sum(phase.updates(iteration, total) for iteration in range(1, last + 1))
    costs = {
        "seconds": seconds + time.monotonic() - started,
        "images": len(run.train_pictures[step.index]),
        "iterations": last,
        "gradient_evaluations": updates * update.evaluations,
    } | ({"flatness": measured} if measured else {})
    save_step(run, step, model, method, costs)
    return model, {"costs": costs}


def begin_step(run: Run, step: Step) -> tuple[Segmenter, Segmenter | None, Method]:
    """Model, teacher and method as they stand before the first iteration."""
    config = run.config
    torch.manual_seed(config.train.seed * 1000 + step.index)  # alike whoever trained the step before
    losses = "fused" if config.train.losses == "fused" else "plain"
    method = make_method(config.method.name, config.method.cross_entropy, config.method.options, losses)
    if config.method.entropy:
        penalise_confidence(method, config.method.entropy)
    teacher = None
    if step.index == 0:
        if config.method.also_observe:
            others = [name for name in config.method.also_observe if name != method.name]
            method = WithObservers(method, [make_method(name) for name in others])
        try:
            model = build_segmenter(**config.model.architecture, group=sync_group(run)).to(run.ranks.device)
        except ValueError as error:
            raise RunError(str(error)) from error
        if config.model.pretrained:
            run.say(str(load_body_weights(model, config.model.pretrained)))
        model.add_classes(step.num_classes)
    else:
        model, state = load_step(run, run.steps[step.index - 1])
        load_method_state(method, state["methods"], step)
        if method.needs_teacher:
            teacher = memory_format(run, model.frozen_copy())
            teacher.returns_stages = method.needs_stages
        model.add_classes(step.num_new)
        method.init_classifier(model)
        model.returns_stages = method.needs_stages
    model.dropout = config.model.dropout
    model = memory_format(run, model).train()
    method.begin_step(model, step)
    if run.ranks.rank:
        torch.manual_seed(torch.initial_seed() + 2**32 * run.ranks.rank)  # every rank drops out on its own
    return model, teacher, method


def step_loader(run: Run, step: Step, *, iterations: range, batch_of: Callable[[int], int]) -> DataLoader:
    """The batches of the given iterations of a step."""
    config, ranks = run.config, run.ranks
    data = StepDataset(
        [run.dataset.train[i] for i in run.train_pictures[step.index]],
        train_table(step, config.data.mode, config.data.void),
        train_transform(config.data.crop, config.data.scale, config.data.flip),
        seed=config.train.seed,
    )
    return train_loader(
        data,
        batch_size=config.train.batch_size,
        accumulate=config.train.accumulate,
        iterations=iterations,
        batch_of=batch_of,
        seed=config.train.seed * 1000 + step.index,
        rank=ranks.rank,
        world=ranks.world,
        workers=config.data.workers,
        pin=ranks.device.type == "cuda",
    )


def objective_of(
    run: Run,
    student: Any,  # the model, wrapped where there are other ranks
    teacher: Segmenter | None,
    method: Method,
    update: Update,
    scaler: torch.amp.GradScaler,
    batches: Iterator,
) -> Callable[..., dict[str, Tensor]]:
    """The objective on the pictures of one update, as the update rule evaluates it: the mean over the micro-batches."""
    ranks, num_parts = run.ranks, run.config.train.accumulate
    again = []  # the micro-batches, for rules that evaluate more than once; these also want the same dropout again
    randomness = checkpoint.random_state(ranks.device) if update.evaluations > 1 else None

    def micro_batches() -> Iterator[tuple[Tensor, Tensor, Output | None]]:
        for _ in range(num_parts):
            images, labels = next(batches)
            images, labels = to_device(run, images), labels.to(ranks.device, non_blocking=True).long()
            target = None
            if teacher is not None:
                target = ask(run, teacher, images)
                labels = method.targets(labels, target)
            if update.evaluations > 1:
                again.append((images, labels, target))
            yield images, labels, target

    def evaluate(weights: Weights, *, local: bool = False, backward: bool = True) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        if randomness is not None:
            checkpoint.set_random_state(randomness, ranks.device)
        for part, (images, labels, target) in enumerate(list(again) or micro_batches()):
            alone = ranks.group is not None and (local or part + 1 < num_parts)
            with student.no_sync() if alone else nullcontext():
                with autocast(run):
                    output = student(images)
                segmentation = method.segmentation_loss(output.logits, labels)
                retention = method.retention_losses(output, target) if target is not None else {}
                check_losses(method, segmentation, retention)
                loss = weights.learn * segmentation + weights.keep * sum(retention.values())
                if backward:
                    scaler.scale(loss / num_parts).backward()
            for name, value in {"seg": segmentation, **retention}.items():
                terms[name] = terms.get(name, 0.0) + value.detach() / num_parts
        return terms

    return evaluate


def check_losses(method: Method, segmentation: Any, retention: Any) -> None:
    """Say which hook of a method returns something else than it should. Reading shapes waits for no GPU."""

    def refuse(hook: str, value: Any, wanted: str) -> None:
        is_tensor = isinstance(value, Tensor)
        what = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"of type {type(value).__name__}"
        raise RunError(f"method {method.name!r}: {hook} is {what}, but must be {wanted}")

    if not isinstance(retention, dict):
        refuse("retention_losses", retention, "a dict of scalar tensors by name")
    returned = {f"retention_losses[{name!r}]": value for name, value in retention.items()}
    for hook, value in {"segmentation_loss": segmentation, **returned}.items():
        if not isinstance(value, Tensor) or value.dim() > 0:
            refuse(hook, value, "a scalar tensor")


def teacher_outputs(run: Run, step: Step, teacher: Segmenter) -> Iterator[tuple[Tensor, Output]]:
    """Labels and the teacher's outputs over the first epoch of a step."""
    loader = step_loader(
        run, step, iterations=range(1, run.epoch(step) + 1), batch_of=lambda iteration: iteration
    )
    for images, labels in tqdm(
        loader, f"surveying step {step.index}", disable=not run.ranks.is_main, **bar_place()
    ):
        yield labels.to(run.ranks.device).long(), ask(run, teacher, to_device(run, images))


def ask(run: Run, teacher: Segmenter, images: Tensor) -> Output:
    with torch.no_grad(), autocast(run):
        return teacher(images)


def autocast(run: Run) -> torch.autocast:
    dtype = AMP_DTYPES[run.config.train.amp]
    return torch.autocast(run.ranks.device.type, dtype, enabled=dtype is not None)


def evaluate(run: Run, step: Step, model: Segmenter) -> ConfusionMatrix:
    """Score the model on every test picture that shows a class seen so far."""
    config, ranks = run.config.data, run.ranks
    positions = select_test(run.test_classes, step)
    data = StepDataset(
        [run.dataset.test[i] for i in positions],
        test_table(step, config.unseen, run.dataset.void_labels),
        test_transform(config.evaluate_size if config.evaluate == "crop" else None),
    )
    loader = test_loader(
        data,
        batch_size=run.config.train.evaluate_batch,
        rank=ranks.rank,
        world=ranks.world,
        workers=config.workers,
        pin=ranks.device.type == "cuda",
    )
    window = config.evaluate_size if config.evaluate == "slide" else None
    matrix = ConfusionMatrix(step.num_classes, ranks.device)
    model = memory_format(run, model).eval()

    def guess(images: Tensor) -> Tensor:
        scales, flip = config.evaluate_scales, config.evaluate_flip
        return predict(model, to_device(run, images), window=window, scales=scales, flip=flip).argmax(dim=1)

    for images, labels in tqdm(
        loader, f"scoring step {step.index}", disable=not ranks.is_main, **bar_place()
    ):
        matrix.update(labels.to(ranks.device, non_blocking=True), guess(images))
    for number, position in enumerate(pictures_to_show(run.test_classes, run.steps, run.config.run.pictures)):
        if ranks.is_main and position in positions:
            image, labels = data[0, positions.index(position)]
            picture = image.permute(1, 2, 0).numpy(), labels.numpy(), guess(image[None])[0].cpu().numpy()
            run.board.picture(number, *picture, step, run.iterations_until(step))
    matrix.sum_over_ranks()
    return matrix


def record(run: Run, step: Step, matrix: ConfusionMatrix, costs: dict) -> None:
    """Put the figures of a step into results.json, TensorBoard and the terminal."""
    names, steps = run.dataset.class_names, run.results["steps"]
    counts = matrix.counts.cpu().numpy()
    result = step_result(step, run.steps, names, counts, matrix.iou().tolist(), steps[: step.index]) | costs
    steps[step.index : step.index + 1] = [result]
    at = run.iterations_until(step)
    run.board.results(result, at)
    run.board.confusion(counts, [names[c] for c in step.seen], at)
    run.board.flush()
    if run.ranks.is_main:
        run.folder.write_results(run.results)
    run.say(step_table(steps[: step.index + 1], group_names(run.steps)))


# -------------------------------------------------------------------------------------------------- pieces of the walk


def read_config(arguments: list[str]) -> Config:
    overlays = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    config = load_config(overlays, overrides, {"method.name": sorted(METHODS), "model.body": list(BODIES)})
    try:
        make_method(config.method.name, config.method.cross_entropy, config.method.options)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    check_observers(config)
    strength = config.method.strength
    if strength is None:
        strength = published_strength(config.method.name, config.data.protocol)
    return config.model_copy(update={"method": config.method.model_copy(update={"strength": strength})})


def check_observers(config: Config) -> None:
    able = [name for name in sorted(METHODS) if make_method(name).state_dict()]
    wrong = [name for name in config.method.also_observe if name not in able]
    if wrong:
        raise ConfigError([f"method.also_observe: {wrong[0]!r} is not one of {', '.join(able)}"])
    if config.method.also_observe and not METHODS[config.method.name].shares_first_step:
        raise ConfigError(
            [
                f"method.also_observe: step 0 of {config.method.name} has an objective of its own; leave the list empty"
            ]
        )


def help_text() -> str:
    protocols = "\n".join(f"  {name}: {', '.join(PROTOCOLS[name])}" for name in PROTOCOLS)
    return (
        f"{__doc__}\nMethods (method.name): {', '.join(sorted(METHODS))}\nPhases (phase.name): {', '.join(PHASES)}\n"
        f"Update rules (update.name): {', '.join(UPDATES)}\n"
        f"Bodies (model.body): {', '.join(BODIES)}\nProtocols (data.protocol), by data.dataset:\n{protocols}\n\n"
        f"Every key with its default:\n\n{BASE_CONFIG.read_text(encoding='utf-8')}"
    )


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


def sync_group(run: Run) -> torch.distributed.ProcessGroup | None:
    return run.ranks.group if run.config.model.sync else None


def load_step(run: Run, step: Step) -> tuple[Segmenter, dict]:
    """The model as it stood after a step, and what else its checkpoint holds."""
    path = run.folder.step_checkpoint(step.index)
    model, state = checkpoint.load_segmenter(path, run.ranks.device, sync_group(run))
    ours, theirs = run.config.model.architecture, state["network"]["arguments"]
    if ours != theirs or tuple(state["class_ids"]) != step.seen:
        raise checkpoint.CheckpointError(
            f"{path}: was trained as {theirs} on the classes {state['class_ids']}, this run wants {ours} on {list(step.seen)}"
        )
    return model, state


def save_step(run: Run, step: Step, model: Segmenter, method: Method, costs: dict) -> None:
    if run.ranks.is_main:
        state = checkpoint.step_state(
            model,
            run.config.model.architecture,
            step=step.index,
            class_ids=step.seen,
            class_names=run.dataset.class_names,
            methods=method.handover(),
            costs=costs,
            config=dump_config(run.config),
        )
        checkpoint.save(state, run.folder.step_checkpoint(step.index))
        run.folder.drop_resume()
    gather_objects(run.ranks, None)


def load_method_state(method: Method, states: dict, step: Step) -> None:
    """The statistics left by the step before. A method that keeps none may start from everybody's model."""
    if not method.state_dict():
        return
    if method.name not in states:
        raise checkpoint.CheckpointError(
            f"step {step.index - 1} left no statistics of {method.name!r} (only of: {', '.join(states) or 'no method'}); "
            f"train that step with method.name={method.name}"
        )
    method.load_state_dict(states[method.name])


def initial_rate(config: Config, step: Step) -> float:
    if step.index == 0:
        return config.optim.lr
    return config.optim.lr_later * config.optim.lr_decay ** (step.index - 1)


def set_learning_rate(optimizer: torch.optim.Optimizer, iteration: int, total: int, power: float) -> float:
    """The poly schedule, stepped per iteration; the first one runs at the full rate."""
    lr = optimizer.defaults["lr"] * (1 - (iteration - 1) / total) ** power
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def gradients_are_finite(model: nn.Module) -> bool:
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    return bool(torch.stack(norms).isfinite().all())


def memory_format(run: Run, tensors: Any) -> Any:
    """A module or a batch of pictures in the memory format of the run."""
    return tensors.to(memory_format=torch.channels_last) if run.config.train.channels_last else tensors


def to_device(run: Run, images: Tensor) -> Tensor:
    """uint8 pictures travel; floats are made where they are used."""
    images = normalise(images.to(run.ranks.device, non_blocking=True), torch.get_default_dtype())
    return memory_format(run, images)


def stop_if_not_finite(run: Run, guard: FiniteGuard, loader: DataLoader) -> None:
    try:
        guard.check()
    except NonFiniteLoss as error:
        batches: Any = loader.batch_sampler
        data: Any = loader.dataset
        items = [item for part in batches.micro_batches(error.iteration) for item in part]
        names = ", ".join(data.pictures[position].name for _, position in items)
        error.args = (f"{error}\n  pictures: {names}\n  the last good state is kept in {run.folder.path}",)
        raise


if __name__ == "__main__":
    exit_with(main)
