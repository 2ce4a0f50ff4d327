"""What `engine.curvature` measures: the model after a step with its objective as training had it,
and batches of images.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.schema import Config
from data import DataError, Dataset
from data.dataset import Sample
from data.incremental import images_of_steps, select_test, test_table, train_table
from data.index import build_index
from data.loaders import StepDataset
from data.protocols import Step, configured_steps
from data.transforms import normalise, test_transform, train_transform
from engine import checkpoint, identity
from engine.probe import freeze_like, has_retention, penalty, plain_method
from engine.run_folder import RunError, RunFolder
from engine.step import load_method_state
from methods import Batch, Method, make_average, make_phase
from metrics import flatness
from models.segmenter import Output, Segmenter


@dataclass(frozen=True)
class Options:
    """What to measure, and on which images; scripts.flatness says more about each."""

    step: int | None  # the model after this step, None for the last one saved
    num_images: int
    batch_size: int
    on: str  # train, old or test
    norm_mode: str  # eval, train or both
    of: str  # seg, objective or both
    top: int  # eigenvalues
    probes: int  # of the trace
    epsilon: float  # half the side of the box of the sharpness
    plane: bool  # whether to walk over a plane of two directions as well
    seed: int


@dataclass
class CurvatureBatch:
    images: Tensor  # uint8
    labels: Tensor
    method: Method  # as in the step that made the labels: its l_seg


# -------------------------------------------------------------------------------------------------- the model


@dataclass
class Subject:
    """The model after a step and its objective, as training had it."""

    config: Config
    steps: list[Step]
    step: Step
    model: Segmenter
    before: Segmenter | None  # the model the step began with
    method: Method
    trained_norm: str

    def __post_init__(self) -> None:
        method, phase = self.config.method, self.config.phase.model_dump()
        # An epoch of any length: the weights of normal training do not depend on it.
        self.keep = make_phase(step=self.step.index, strength=method.strength, epoch=1, **phase).lambda_a
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        if not self.parameters:
            raise RunError(
                f"{method.name} trains no parameter in step {self.step.index} (none requires a gradient): "
                "there is no direction in which the loss could be flat or steep; choose another --step"
            )

    @property
    def terms(self) -> dict[str, flatness.Loss]:
        """What can be measured, by the name that `Options.of` uses."""
        terms: dict[str, flatness.Loss] = {"seg": self.segmentation}
        with_retention = self.before is not None and has_retention(self.method)
        return terms | {"objective": self.objective} if with_retention else terms

    def inputs(self, images: Tensor) -> Tensor:
        """Images as the model takes them."""
        like = self.parameters[0]
        return normalise(images.to(like.device), like.dtype, *self.model.colours)

    def segmentation(self, batch: CurvatureBatch) -> Tensor:
        """l_seg."""
        images = self.inputs(batch.images)
        return batch.method.learn(self.model(images), Batch(images, batch.labels))

    def objective(self, batch: CurvatureBatch) -> Tensor:
        """l_seg + lambda R."""
        images = self.inputs(batch.images)
        output, seen = self.model(images), Batch(images, batch.labels)
        retention = penalty(self.method, self.model)
        if self.method.needs_teacher and self.before is not None:
            with torch.no_grad():
                target = self.before(images)
            retention = retention + sum(self.method.keep(output, target, seen).values())
        return batch.method.learn(output, seen) + self.keep * retention

    def segmentation_and_among_old(self, batch: CurvatureBatch) -> Tensor:
        """l_seg, and l_seg as if the step's new classes were not there."""
        logits = self.model(self.inputs(batch.images)).logits
        choices = logits, logits[:, : self.step.num_old]
        return torch.stack([batch.method.segmentation_loss(scores, batch.labels) for scores in choices])


def read_subject(folder: RunFolder, wanted: int | None, dataset: Dataset, config: Config) -> Subject:
    """Return the model that a run saved after a step, None for its last one,
    with the model and the method before that step.
    """
    steps = configured_steps(
        config.data.dataset,
        config.data.protocol,
        config.data.steps,
        dataset.class_names,
        config.data.order,
    )
    step = steps[choose_step(folder, wanted, len(steps))]
    device = torch.device("cuda" if config.train.device != "cpu" and torch.cuda.is_available() else "cpu")
    model, state = load_model(folder.step_checkpoint(step.index), step, dataset.class_names, device)
    method, before, start = plain_method(config), None, model
    method.protocol = steps
    if step.index > 0:  # as in engine.step.begin_step
        earlier = steps[step.index - 1]
        start, left = load_model(folder.step_checkpoint(earlier.index), earlier, dataset.class_names, device)
        load_method_state(method, left["methods"], step)
        before = start.frozen_copy()
        for network in (before, model):
            method.attach(network, step)
        method.add_classifier(start, step)
        method.init_classifier(start)
        method.freeze(start)
    make_average(**config.average.model_dump()).begin_step(start, step)
    method.begin_step(start, step)
    freeze_like(start, model)
    return Subject(config, steps, step, model, before, method, state["network"]["arguments"]["norm"])


def choose_step(folder: RunFolder, wanted: int | None, count: int) -> int:
    """Return the step that is wanted, or the last one of which there is a checkpoint."""
    saved = [i for i in range(count) if folder.step_checkpoint(i).exists()]
    if not saved:
        raise RunError(f"{folder.path}: no step checkpoint (step_<i>.pt); train a step first")
    if wanted is not None and wanted not in saved:
        there = ", ".join(map(str, saved))
        raise RunError(f"--step {wanted}: {folder.path} has no such checkpoint, only of the steps {there}")
    return saved[-1] if wanted is None else wanted


def load_model(
    path: Path, step: Step, class_names: Sequence[str], device: torch.device
) -> tuple[Segmenter, dict]:
    """Return the model with the norm that can be differentiated twice, whichever it was trained with:
    their states are equal.
    """
    model, state = checkpoint.load_segmenter(path, device, norm="abn")
    classes = tuple(state["class_ids"])
    if classes != step.seen:
        raise checkpoint.CheckpointError(
            f"{path}: knows the classes {list(classes)}, but the run's config.yaml wants {list(step.seen)}"
        )
    identity.check_class_names(path, state, class_names)
    return model, state


# ------------------------------------------------------------------------------------------------- the images


class Batches:
    """Batches of the same size, each from one step, chosen by the seed."""

    def __init__(self, subject: Subject, dataset: Dataset, options: Options):
        self.subject, self.dataset, self.options = subject, dataset, options
        self.data = subject.config.data
        self.train_classes = self._classes(dataset.train)

    def of(self, kind: str) -> list[CurvatureBatch]:
        """Return batches of the step's training images (train), those of all steps before it (old),
        or test images (test).
        """
        step = self.subject.step
        if kind == "test":
            return self._load([self._test()])
        return self._load([self._train(s) for s in ([step] if kind == "train" else self._earlier())])

    def _earlier(self) -> list[Step]:
        step = self.subject.step
        if step.index == 0:
            raise RunError("step 0 has no old images and no line: nothing was learned before it")
        return self.subject.steps[: step.index]

    def _train(self, step: Step) -> tuple[StepDataset, Method]:
        """Return the images of a step as it was trained on them, crops and labels and l_seg."""
        data, subject = self.data, self.subject
        names = [image.name for image in self.dataset.train]
        chosen = images_of_steps(self.train_classes, names, subject.steps, data.mode, data.split_seed)
        images = [self.dataset.train[i] for i in chosen[step.index]]
        transform = train_transform(data.crop, data.scale, data.flip, data.augment)
        method = subject.method
        if step != subject.step:
            method = plain_method(subject.config)
            method.begin_step(
                copy.deepcopy(subject.model), step
            )  # it may freeze other parts than the subject's step
        table = train_table(step, data.mode, data.void, self.dataset.num_classes)
        dataset = StepDataset(images, table, transform, seed=self.options.seed)
        if method is subject.method and subject.before is not None and method.surveys:
            method.survey(self._teacher_outputs(dataset))
        return dataset, method

    def _teacher_outputs(self, dataset: StepDataset) -> Iterator[tuple[Tensor, Output]]:
        """As engine.step hands them to a method that surveys."""
        assert self.subject.before is not None
        for part in torch.arange(len(dataset)).split(self.options.batch_size):
            images, labels = self._read(dataset, part.tolist())
            with torch.no_grad():
                yield labels, self.subject.before(self.subject.inputs(images))

    def _test(self) -> tuple[StepDataset, Method]:
        """Test images with all labels seen so far: a method that never began a step takes
        every label for what it says.
        """
        data, step = self.data, self.subject.step
        chosen = select_test(self._classes(self.dataset.test), step)
        table = test_table(step, data.unseen, self.dataset.void_labels, self.dataset.num_classes)
        images = [self.dataset.test[i] for i in chosen]
        return StepDataset(images, table, test_transform(data.crop)), plain_method(self.subject.config)

    def _classes(self, images: Sequence[Sample]) -> list[frozenset[int]]:
        data, dataset = self.data, self.dataset
        return build_index(dataset.name, images, dataset.num_classes, cache=data.cache, unnamed=data.unnamed)

    def _load(self, groups: list[tuple[StepDataset, Method]]) -> list[CurvatureBatch]:
        options = self.options
        size = min(options.batch_size, options.num_images, *(len(data) for data, _ in groups))
        if size == 0:
            raise DataError(f"--on {options.on}: no such image shows a class of the step")
        if size == 1 and options.norm_mode != "eval":
            raise RunError("--norm-mode train: a batch of one image has no statistics; raise --batch")
        generator = torch.Generator().manual_seed(options.seed)
        orders = [torch.randperm(len(data), generator=generator).split(size) for data, _ in groups]
        whole = [(g, part) for g, order in enumerate(orders) for part in order if len(part) == size]
        chosen = torch.randperm(len(whole), generator=generator)[: options.num_images // size]
        return [self._batch(groups[g], part.tolist()) for g, part in (whole[i] for i in chosen)]

    def _batch(self, group: tuple[StepDataset, Method], positions: list[int]) -> CurvatureBatch:
        (data, method), before = group, self.subject.before
        images, labels = self._read(data, positions)
        if method is self.subject.method and before is not None and method.needs_teacher:
            with torch.no_grad():
                labels = method.targets(labels, before(self.subject.inputs(images)))
        return CurvatureBatch(images, labels, method)

    def _read(self, data: StepDataset, positions: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*(data[0, position] for position in positions), strict=True)
        return torch.stack(images), torch.stack(labels).long().to(self.subject.parameters[0].device)
