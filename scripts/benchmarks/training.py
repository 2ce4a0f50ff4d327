"""Iterations of training, outside of a run: what a method and a phase cost beside
the passes through the networks.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data import Dataset
from data.protocols import Step, protocol_steps
from engine.arguments import read_config
from engine.objective import Objective
from engine.optim import make_optimizer, make_schedule
from engine.ranks import Ranks, start_ranks, wrap
from engine.run import Run
from engine.run_folder import RunFolder
from engine.step import Training, begin_step, save_step
from methods import METHODS, UPDATES, Method, make_average, make_method, make_phase, make_update
from metrics.health import FiniteGuard
from models.segmenter import Output, Segmenter, build_segmenter
from scripts.benchmarks.measure import Measurement, Options, Samples, Target, interleave, ratio, timed

TOTAL = 1_000_000  # iterations of a step: enough for any number of repeats
LATE = TOTAL * 9 // 10  # well inside AlterSGD's phase
BETA = 0.1  # of CPR
MEMORY = 100  # images, where a method can have a memory
BATCHES = {256: 4, 512: 2}  # crop -> images
QUICK = ("model.body=resnet_tiny", "model.head_channels=8", "data.crop=64", "train.batch_size=2")
STEPS = protocol_steps("voc", "19-1")  # 20 old classes with the background, then one more


def settings(options: Options, crop: int) -> tuple[str, ...]:
    """Return the network of the paper on crops of this size; --quick takes a tiny one."""
    if options.quick:
        return QUICK
    return "model.body=resnet101", f"data.crop={crop}", f"train.batch_size={BATCHES[crop]}"


def make_run(folder: Path, steps: Sequence[Step], *overrides: str, ranks: Ranks | None = None) -> Run:
    """Return a run without images: the shipped functions read no more of it than this."""
    # At such a learning rate the weights stay where they are: an iteration costs the same, and no loss can
    # run away.
    config = read_config(["optim.lr=1e-9", "optim.lr_later=1e-9", *overrides])
    names = tuple(map(str, range(steps[-1].num_classes)))
    unused: Any = None
    return Run(
        config=config,
        ranks=ranks or start_ranks("cpu"),
        stop=unused,
        folder=RunFolder(folder),
        dataset=Dataset("none", names, [], []),
        steps=list(steps),
        train_images=[],
        test_classes=[],
        board=unused,
        results={},
    )


def begin_last_step(run: Run) -> tuple[Segmenter, Segmenter | None, Method]:
    """Model, teacher and method at the start of the run's last step; the step before left random weights."""
    *earlier, last = run.steps
    if earlier:
        model = build_segmenter(**run.config.model.architecture, group=run.sync_group)
        method = make_method(run.config.method.name, options=run.config.method.options)
        method.protocol = run.steps
        for step in earlier:
            method.add_classifier(model, step)
            method.attach(model, step)
            method.begin_step(model, step)
            if method.reviews:
                method.review([random_outputs(run, model, step)])
        method.end_step(model)
        save_step(run, earlier[-1], model, method, costs={})
    return begin_step(run, last)


def random_outputs(run: Run, model: Segmenter, step: Step) -> tuple[Tensor, Output]:
    """Labels of a step and what the model gives for noise: statistics of which only the shape matters."""
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        return torch.randint(step.num_old, step.num_classes, (2, 64, 64)), model.eval()(images)


def make_batch(run: Run) -> tuple[Tensor, ...]:
    """uint8 images and labels, as the loader gives them to a rank:
    background and the new classes of the step.

    With a memory also which of them are remembered: the second half.
    """
    step, crop = run.steps[-1], run.config.data.crop
    generator = torch.Generator().manual_seed(run.ranks.rank)
    size = run.config.train.batch_size // run.ranks.world
    images = torch.randint(256, (size, 3, crop, crop), dtype=torch.uint8, generator=generator)
    labels = torch.randint(step.num_new + 1, (size, crop, crop), dtype=torch.uint8, generator=generator)
    batch = images, torch.where(labels > 0, labels + (step.num_old - 1), labels)
    return (*batch, torch.arange(size) >= size // 2) if run.config.method.memory else batch


class Trainee:
    """A step's training, with one ready batch in place of the loader, well inside AlterSGD's phase."""

    def __init__(self, run: Run, model: Segmenter, teacher: Any, method: Any) -> None:
        config, step = run.config, run.steps[-1].index
        self.run, self.model, self.teacher, self.method = run, model, teacher, method
        # The run has no images, so its epochs have no length: halves of an epoch last an iteration.
        options = config.phase.model_dump()
        self.phase = make_phase(step=step, strength=config.method.strength, epoch=1, **options)
        self.update = make_update(step=step, **config.update.model_dump())
        average = make_average(**config.average.model_dump())
        average.begin_step(model, run.steps[-1])
        self.optimizer = make_optimizer(model, config, step, method)
        self.scaler = torch.amp.GradScaler(run.ranks.device.type, enabled=False)
        self.student, self.guard = wrap(model, run.ranks), FiniteGuard()
        self.batch = make_batch(run)
        self.batches = repeat(self.batch)
        objective = Objective(
            config, run.ranks, self.student, teacher, method, self.update, self.scaler, self.batches
        )
        training = Training(
            model,
            method,
            self.phase,
            self.update,
            objective,
            self.optimizer,
            self.scaler,
            TOTAL,
            make_schedule(config.optim),
            average,
        )
        self.loop = training.loop(count(LATE + 1))
        if teacher is not None and method.surveys:
            images, labels, *_ = self.batch
            with torch.no_grad():
                method.survey([(labels.to(run.ranks.device).long(), teacher(run.place.images(images)))])

    def iterate(self) -> None:
        """An iteration as a run makes it, without its log lines and checkpoints."""
        iteration, terms, *_ = next(self.loop)
        self.guard.watch(iteration, terms)
        if iteration % self.run.config.run.log_every == 0:
            self.guard.check()

    def bare(self) -> Callable[[], None]:
        """Return the same passes and the same update on the same tensors, with nothing beside:
        the loss is the sum of the logits.
        """
        images = self.run.place.images(self.batch[0])
        optimizer = torch.optim.SGD(self.model.parameters(), **(self.optimizer.defaults | {"lr": 0.0}))

        def iterate() -> None:
            output = self.student(images)
            with torch.no_grad():
                target = self.teacher(images)
            output.logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del target  # lived as long as the student's output, as in training

        return iterate


def begin(folder: str, *overrides: str, steps: Sequence[Step] = STEPS) -> Trainee:
    run = make_run(Path(folder), steps, *overrides)
    return Trainee(run, *begin_last_step(run))


def variant(
    trainee: Trainee,
    *,
    phase: str = "descent",
    update: str = "plain",
    average: str = "none",
    entropy: float = 0.0,
    method: Method | None = None,
) -> Trainee:
    """Return the same networks trained in another way, and by another method if one is given."""
    config = trainee.run.config
    changes = {
        "phase": config.phase.model_copy(update={"name": phase}),
        "update": config.update.model_copy(update={"name": update}),
        "average": config.average.model_copy(update={"name": average}),
        "method": config.method.model_copy(update={"entropy": entropy}),
    }
    run = replace(trainee.run, config=config.model_copy(update=changes))
    if method is None:
        return Trainee(run, trainee.model, trainee.teacher, trainee.method)
    method.losses = trainee.method.losses
    method.begin_step(trainee.model, run.steps[-1])
    return Trainee(run, trainee.model, trainee.teacher if method.needs_teacher else None, method)


# -------------------------------------------------------------------------------------------------- the parts


def iteration(options: Options) -> list[Measurement]:
    """A MiB + AlterSGD iteration against the passes through student and teacher and the update alone."""
    measurements = []
    for crop in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            trainee = begin(folder, "method.name=mib", "phase.name=altersgd", *settings(options, crop))
        samples = interleave(
            {"mib + altersgd": timed(trainee.iterate), "bare passes": timed(trainee.bare())},
            options.times(7),
        )
        what = f"mib + altersgd / bare passes, crop {trainee.run.config.data.crop}"
        measurements.append(ratio(what, samples, "mib + altersgd", "bare passes", Target(high=1.05)))
    return measurements


def alternation(options: Options) -> list[Measurement]:
    """An iteration of AlterSGD's phase, and one of SAM, against a plain one."""
    with tempfile.TemporaryDirectory() as folder:
        trainee = begin(folder, "method.name=mib", "phase.name=altersgd", *settings(options, 256))
    variants = {
        "altersgd": timed(trainee.iterate),
        "plain": timed(variant(trainee).iterate),
        "sam": timed(variant(trainee, update="sam").iterate),
    }
    samples = interleave(variants, options.times(15))
    return [
        ratio("altersgd / plain mib", samples, "altersgd", "plain", Target(0.99, 1.01)),
        ratio("sam / plain mib, for comparison", samples, "sam", "plain", Target(1.5, 2.5)),
    ]


def updates(options: Options) -> list[Measurement]:
    """Return an iteration of MiB with each method related to AlterSGD, and of PLOP,
    against a plain one of MiB, on the size of a recipe.

    The phases are inside of their iterations. PLOP's survey before a step, an epoch of its teacher, and the
    norm statistics of EMA and SWA after one, an epoch without gradients, are not counted.
    """
    recipe = QUICK if options.quick else (options.recipe, "model.pretrained=null")
    with tempfile.TemporaryDirectory() as folder:
        plain = begin(folder, *recipe, "method.name=mib")
        stable = begin(folder, *recipe, "configs/stable_sgd.yaml", "method.name=mib")
        plop = begin(folder, *recipe, "method.name=plop")
    trainees = {
        "plain": plain,
        "mib + altersgd": variant(plain, phase="altersgd"),
        "mib + consolidate": variant(plain, phase="consolidate"),
        **{f"mib + {name}": variant(plain, update=name) for name in UPDATES if name != "plain"},
        **{f"mib + {name}": variant(plain, average=name) for name in ("ema", "swa")},
        "mib + cpr": variant(plain, entropy=BETA),
        "mib + stable_sgd": stable,
        "plop": plop,
    }
    samples = interleave({name: per_image(trainee) for name, trainee in trainees.items()}, options.times(9))
    return [ratio(f"{name} / plain mib", samples, name, "plain") for name in trainees if name != "plain"]


def per_image(trainee: Trainee) -> Callable[[], float]:
    """Return seconds of an iteration over its images: smaller batches make more iterations of an epoch."""
    measure, images = timed(trainee.iterate), len(trainee.batch[0])
    return lambda: measure() / images


def importance(options: Options) -> list[Measurement]:
    """EWC, PI and RW against fine-tuning, in a step that has anchors."""
    measurements = []
    for name in ("ewc", "pi", "rw"):
        with tempfile.TemporaryDirectory() as folder:
            trainee = begin(folder, f"method.name={name}", *settings(options, 512))
        assert trainee.method.anchor, "without anchors there is no penalty to pay for"
        variants = {"ft": timed(variant(trainee, method=make_method("ft")).iterate), **timings(name, trainee)}
        samples = with_looks(interleave(variants, options.times(7)), trainee)
        measurements.append(ratio(f"{name} / ft", samples, name, "ft", Target(high=1.05)))
    return measurements


def methods(options: Options) -> list[Measurement]:
    """Return an iteration of every method in a later step against one of FT, on the size of a recipe.

    All have the same network and the same number of images; those that can have a memory have one, which
    gives half of them. What a method does before or after a step (PLOP's and STAR's survey, STAR's review: an
    epoch without gradients each) is not counted.
    """
    recipe = QUICK if options.quick else (options.recipe, "model.pretrained=null")
    trainees = {}
    for name in METHODS:
        memory = f"method.memory={MEMORY if METHODS[name].memory else 0}"
        with tempfile.TemporaryDirectory() as folder:
            trainees[name] = begin(folder, *recipe, f"method.name={name}", memory)
    every = {key: time for name, trainee in trainees.items() for key, time in timings(name, trainee).items()}
    samples = with_looks(interleave(every, options.times(9)), trainees["rw"])
    return [ratio(f"{name} / ft", samples, name, "ft") for name in trainees if name != "ft"]


LOOK, BETWEEN = "rw look", "rw between looks"


def timings(name: str, trainee: Trainee) -> dict[str, Callable[[], float]]:
    """Return what is to be timed of a method.

    RW looks at its path in one of `every` iterations: a median over a few would not see what that costs.
    """
    if name != "rw":
        return {name: timed(trainee.iterate)}
    return {LOOK: looking(trainee, 1), BETWEEN: looking(trainee, TOTAL)}


def with_looks(samples: Samples, trainee: Trainee) -> Samples:
    """Return the samples with those of RW's mean iteration, if it was timed."""
    if LOOK not in samples:
        return samples
    every = trainee.method.options.every
    pairs = zip(samples[LOOK], samples[BETWEEN], strict=True)
    return samples | {"rw": [(look + (every - 1) * between) / every for look, between in pairs]}


def looking(trainee: Trainee, every: int) -> Callable[[], float]:
    """Return the time of an iteration of RW that looks, or does not: `every` 1, or more than there are."""
    given = trainee.method.options
    looks = given.model_copy(update={"every": every})

    def iterate() -> None:
        trainee.method.options = looks
        trainee.iterate()
        trainee.method.options = given

    return timed(iterate)
