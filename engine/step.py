"""One incremental step: from the saved model after the step before to the model after this one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from configs.schema import dump_config
from data.incremental import train_table
from data.loaders import ReplayDataset, StepDataset, train_loader
from data.protocols import Step
from data.transforms import train_transform
from engine import checkpoint, identity
from engine.averaging import recompute_statistics
from engine.objective import Objective, Terms, ask
from engine.optim import make_optimizer, make_schedule, set_learning_rate
from engine.probe import Probe, places_of
from engine.ranks import agree, gather_objects, wrap
from engine.run import Run
from engine.run_folder import RunError
from engine.watch import Watch, not_to_be_saved, stop_all_ranks
from methods import (
    METHODS,
    Average,
    Descent,
    Method,
    Update,
    Weights,
    WithObservers,
    make_average,
    make_method,
    make_update,
)
from models.pretrained import load_backbone_weights
from models.segmenter import Output, Segmenter, build_segmenter
from tracking.progress import Progress, bar_place
from tracking.tracker import recorded_in


@dataclass
class Training:
    """What the loop of a step works with."""

    model: Segmenter
    method: Method
    phase: Descent
    update: Update
    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    total: int  # iterations of the step
    schedule: Callable[[float], float]  # of the learning rate
    average: Average | None = None  # who hears of every update; None: the last weights are handed over

    def loop(self, iterations: Iterable[int]) -> Iterator[tuple[int, Terms, Weights, float]]:
        """Train, and yield each iteration when it is done, with its terms,
        their weights and the learning rate.
        """
        phase, total = self.phase, self.total
        for iteration in iterations:
            weights = phase(iteration, total)
            schedule_iteration = phase.schedule_iteration(iteration, total)
            lr = set_learning_rate(self.optimizer, self.schedule, schedule_iteration, total)
            phase.prepare(self.optimizer, iteration, total)
            evaluate = self.objective.on_next_batch()
            if weights.updates:
                scale = self.scaler.get_scale()
                terms = self.update(self.model, evaluate, weights, scale)
                terms |= apply_update(self.model, self.optimizer, self.scaler, self.method, weights, lr)
                if self.average is not None and self.scaler.get_scale() >= scale:  # else it was skipped
                    self.average.after_update(self.model, iteration, phase.last_iteration(total))
            else:
                with torch.no_grad():
                    terms = evaluate(weights, backward=False)
            yield iteration, terms, weights, lr


def apply_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    method: Method,
    weights: Weights,
    lr: float,
) -> dict[str, Tensor]:
    """One optimizer update by the gradients in `p.grad`; returns the terms that
    the method adds in parameter space.
    """
    scaler.unscale_(optimizer)
    terms = {}
    # An overflow in fp16: the scaler is going to skip this update, and so does the method.
    if not scaler.is_enabled() or gradients_are_finite(model):
        terms = method.after_backward(model, weights, lr)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return terms


def gradients_are_finite(model: nn.Module) -> bool:
    norms = torch._foreach_norm([p.grad for p in model.parameters() if p.grad is not None])
    return bool(torch.stack(norms).isfinite().all())


def train_step(run: Run, step: Step) -> tuple[Segmenter, dict]:
    """Train and save the model of a step; return it, and what its checkpoint holds beside it."""
    config, ranks, total = run.config, run.ranks, run.iterations(step)
    average = make_average(**config.average.model_dump())
    model, teacher, method = begin_step(run, step, average)
    phase = run.phase(step)
    last = phase.last_iteration(total)
    update = make_update(step=step.index, **config.update.model_dump())
    optimizer = make_optimizer(model, config, step.index, method)
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=config.train.amp == "fp16")
    parts = {"model": model, "method": method, "optimizer": optimizer, "scaler": scaler}
    parts |= {"update": update, "average": average}
    resumed = checkpoint.restore_training(run.folder.resume_checkpoint, parts, ranks, run.say, step.index)
    done = resumed.get("iteration", 0)
    if done:
        run.say(f"resuming step {step.index} after iteration {done}")
    elif teacher is not None and method.surveys:
        method.survey(outputs_of(run, step, teacher, "surveying"))
    iterations = range(done + 1, last + 1)
    loader = step_loader(run, step, iterations=iterations, batch_of=partial(phase.batch_of, total=total))
    student = wrap(model, ranks)
    objective = Objective(config, ranks, student, teacher, method, update, scaler, iter(loader))
    schedule = make_schedule(config.optim)
    averaging = None if type(average) is Average else average
    training = Training(
        model, method, phase, update, objective, optimizer, scaler, total, schedule, averaging
    )
    watch = make_watch(run, step, training, teacher, loader, parts, resumed)
    for iteration in training.loop(iterations):
        watch.after(*iteration)
    watch.progress.close()
    agree(model, ranks)
    method.end_step(model)
    if averaging is not None:
        hand_over(run, step, model, average)
        watch.measure("handed over")
    if method.reviews:
        # To the end, whoever asks to stop: a pass without gradients is sooner done than what would be lost.
        method.review(outputs_of(run, step, model.eval(), "reviewing", until_stopped=False))
    updates = sum(phase(iteration, total).updates for iteration in range(1, last + 1))
    costs = {
        "seconds": watch.seconds_spent(),
        "images": len(run.train_images[step.index]),
        "iterations": last,
        "gradient_evaluations": updates * update.evaluations,
    } | ({"flatness": watch.measured} if watch.measured else {})
    save_step(run, step, model, method, costs)
    return model, {"costs": costs}


def make_watch(
    run: Run,
    step: Step,
    training: Training,
    teacher: Segmenter | None,
    loader: DataLoader,
    parts: dict,
    resumed: dict,
) -> Watch:
    config, offset, done = run.config, run.iterations_before(step), resumed.get("iteration", 0)
    phase, total = training.phase, training.total
    last = phase.last_iteration(total)
    probe = Probe(
        config,
        run.ranks.device,
        run.dataset,
        run.steps,
        step,
        train_images=run.train_images[step.index],
        test_classes=run.test_classes,
        teacher=teacher,
        method=training.method,
        keep=phase.lambda_a,
        places=places_of(config, step, epoch=run.epoch(step), total=total, last=last),
    )
    run.board.open(at=offset + done + 1)
    progress = Progress(
        run.board,
        title=f"step {step.index}/{len(run.steps) - 1}",
        total=last,
        done=done,
        offset=offset,
        batch_size=config.train.batch_size,
        quiet=not run.ranks.is_main,
        boundary=phase.boundary(total),
    )
    if done and run.ranks.is_main:
        progress.recall(recorded_in(run.folder.path))
    spent = {"seconds": resumed.get("seconds", 0.0), "measured": resumed.get("flatness", {})}
    return Watch(run, step, training.model, parts, loader, probe, progress, last=last, **spent)


def begin_step(
    run: Run, step: Step, average: Average | None = None
) -> tuple[Segmenter, Segmenter | None, Method]:
    """Model, teacher and method as they stand before the first iteration."""
    config, average = run.config, average or Average()
    torch.manual_seed(config.train.seed * 1000 + step.index)  # alike whoever trained the step before
    losses = "fused" if config.train.losses == "fused" else "plain"
    method = make_method(config.method.name, config.method.cross_entropy, config.method.options, losses)
    method.protocol, method.mode, teacher = run.steps, config.data.mode, None
    if step.index == 0:
        try:
            model = build_segmenter(**config.model.architecture, group=run.sync_group).to(run.ranks.device)
        except ValueError as error:
            raise RunError(str(error)) from error
        if note := getattr(model.body, "note", ""):
            run.say(f"note: {note}")
        if config.model.pretrained:
            run.say(str(load_backbone_weights(model, config.model.pretrained)))
        method.add_classifier(model, step)
    else:
        model, state = load_step(run, run.steps[step.index - 1])
        average.remember(model)
        load_method_state(method, state["methods"], step)
        if method.needs_teacher:
            teacher = run.place.arrange(model.teacher())
            method.attach(teacher, step)
        method.add_classifier(model, step)
        method.init_classifier(model)
        method.freeze(model)
    method.attach(model, step)
    if step.index == 0 and config.method.also_observe:
        others = [name for name in config.method.also_observe if name != method.name]
        method = WithObservers(method, [make_method(name) for name in others])
    model.dropout = config.model.dropout
    model = run.place.arrange(model).train()
    average.begin_step(model, step)
    method.begin_step(model, step)
    if not any(p.requires_grad for p in model.parameters()):
        raise RunError(
            f"method {method.name!r}: its begin_step leaves no parameter to train in step {step.index}; "
            "at least one must require a gradient"
        )
    if run.ranks.rank:
        torch.manual_seed(torch.initial_seed() + 2**32 * run.ranks.rank)  # every rank drops out on its own
    return model, teacher, method


def hand_over(run: Run, step: Step, model: Segmenter, average: Average) -> None:
    """Give the model the weights that the average hands over, alike on all ranks.

    Who asks to stop meanwhile waits for it: a pass without gradients is sooner done than what would be lost.
    """
    average.end_step(model, step)
    if average.stale_statistics:
        epoch = range(1, run.epoch(step) + 1)
        loader = step_loader(run, step, iterations=epoch, batch_of=lambda iteration: iteration)
        shown = tqdm(loader, f"averaging step {step.index}", disable=not run.ranks.is_main, **bar_place())
        recompute_statistics(model, (images for images, *_ in shown), run.place)
    agree(model, run.ranks)


def step_loader(run: Run, step: Step, *, iterations: range, batch_of: Callable[[int], int]) -> DataLoader:
    """Return the batches of the given iterations of a step."""
    config, ranks = run.config, run.ranks
    kept = run.remembered(step)
    makes_half = METHODS[config.method.name].memory == "half"
    return train_loader(
        step_dataset(run, step),
        batch_size=config.train.batch_size,
        accumulate=config.train.accumulate,
        iterations=iterations,
        batch_of=batch_of,
        seed=config.train.seed * 1000 + step.index,
        rank=ranks.rank,
        world=ranks.world,
        workers=config.data.workers,
        pin=ranks.device.type == "cuda",
        memory=len(kept) if makes_half else 0,
    )


def step_dataset(run: Run, step: Step) -> StepDataset | ReplayDataset:
    """Return the training images of a step with its labels, and behind them what it remembers."""
    config, kept = run.config, run.remembered(step)

    def labelled(positions: Iterable[int], by: Step) -> StepDataset:
        return StepDataset(
            [run.dataset.train[i] for i in positions],
            train_table(by, config.data.mode, config.data.void, run.dataset.num_classes),
            train_transform(config.data.crop, config.data.scale, config.data.flip, config.data.augment),
            seed=config.train.seed,
            saliency=config.method.options.get("saliency"),
        )

    current = labelled(run.train_images[step.index], step)
    if not kept:
        return current
    earlier = run.steps[: step.index]
    old = [labelled([k.position for k in kept if k.step == before.index], before) for before in earlier]
    return ReplayDataset(current, old)


def outputs_of(
    run: Run, step: Step, network: Segmenter, what: str, until_stopped: bool = True
) -> Iterator[tuple[Tensor, Output]]:
    """Yield labels and a network's outputs over the first epoch of a step."""
    epoch = range(1, run.epoch(step) + 1)
    loader = step_loader(run, step, iterations=epoch, batch_of=lambda iteration: iteration)
    doing = f"{what} step {step.index}"
    shown = tqdm(loader, doing, disable=not run.ranks.is_main, **bar_place())
    for images, labels, *_ in run.until_stopped(shown, doing) if until_stopped else shown:
        yield labels.to(run.ranks.device).long(), ask(network, run.place.images(images), run.place)


def load_step(run: Run, step: Step) -> tuple[Segmenter, dict]:
    """Return the model as it stood after a step, and what else its checkpoint holds."""
    path = run.folder.step_checkpoint(step.index)
    model, state = checkpoint.load_segmenter(path, run.ranks.device, run.sync_group)
    identity.check_model(path, state, run.config.model.architecture, step, run.dataset.class_names)
    return model, state


def save_step(run: Run, step: Step, model: Segmenter, method: Method, costs: dict) -> None:
    learned = {"model": model.state_dict(), "methods": method.handover()}
    stop_all_ranks(run, not_to_be_saved(run, learned, f"at the end of step {step.index}"))
    if run.ranks.is_main:
        state = checkpoint.step_state(
            model,
            run.config.model.architecture,
            step=step.index,
            class_ids=step.seen,
            class_names=run.dataset.class_names,
            colours=run.dataset.colours,
            methods=learned["methods"],
            costs=costs,
            config=dump_config(run.config),
            num_new=step.num_classes if step.index == 0 else step.num_new,
            rule=None if model.rule is None else method.name,
            trained=identity.trained_with(
                run.config.model_dump(mode="json"),
                step.index,
                run.results.get("data", {}),
                run.dataset.class_names,
                run.results.get("weights"),
            ),
        )
        checkpoint.save(state, run.folder.step_checkpoint(step.index))
        run.folder.drop_resume()
    gather_objects(run.ranks, None)


def load_method_state(method: Method, states: dict, step: Step) -> None:
    """Hand a method what the step before left for it.

    One that kept nothing may start from everybody's model.
    """
    if method.name in states:
        try:
            method.load_state_dict(states[method.name])
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise checkpoint.CheckpointError(
                f"method {method.name!r} refuses what step {step.index - 1} left for it "
                f"({type(error).__name__}: {error}); its load_state_dict must take what its state_dict gives"
            ) from error
    elif method.state_dict():
        raise checkpoint.CheckpointError(
            f"step {step.index - 1} left no statistics of {method.name!r} (only of: "
            f"{', '.join(states) or 'no method'}); train that step with method.name={method.name}"
        )
