"""run.flatness: loss, gradient norm and curvature while a step trains, which does not notice.

Three metrics, `loss`, `squared_gradient_norm` and `top_eigenvalue` (of the Hessian), describe each of three
functions of the weights, all of them means over `run.flatness` images with the norms in eval:

    no prefix     l_seg on training images of the step
    objective_    L = l_seg + lambda_a R on the same images, where the method has an R
    old_          cross-entropy on test images that show an old class

CPR's term is no part of them, so that runs can be compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import Config
from data import Dataset
from data.dataset import Sample
from data.incremental import select_test, test_table, train_table
from data.loaders import StepDataset
from data.protocols import IGNORE_INDEX, Step
from data.transforms import test_transform
from engine.objective import Placement
from methods import AlterSGD, Batch, Method, make_method, make_phase
from methods.importance import ImportanceMethod
from models.segmenter import Segmenter, rebuild_segmenter

SMALLEST_SCORE = 1e-8

Metrics = dict[str, float | None]


def places_of(config: Config, step: Step, *, epoch: int, total: int, last: int) -> dict[int, str]:
    """Return the iterations at which a step is measured, each with the name of the place.

    The step has epochs of `epoch` iterations and ends at `last`.

    Normal training ends at the "boundary". Halves of one iteration are too many to be measured one by one.
    Plain training is measured where its config would alternate, so that runs can be compared.
    """
    if config.run.flatness == 0 or step.index == 0:
        return {}
    options = config.phase.model_dump() | {"name": "altersgd", "from_step": 0, "options": {}}
    phase = make_phase(step=0, strength=config.method.strength, epoch=epoch, **options)
    assert isinstance(phase, AlterSGD)
    boundary = phase.boundary(total)
    ends = range(boundary + phase.every, last, phase.every) if phase.every > 1 else ()
    halves = {iteration: f"half {number}" for number, iteration in enumerate(ends, start=1)}
    return {boundary: "boundary"} | halves | {last: "end"}


@dataclass(frozen=True)
class Probe:
    """Measures the model of a later step.

    The model, the teacher and the method stay as they are, the random numbers too.
    """

    config: Config
    device: torch.device
    dataset: Dataset
    steps: Sequence[Step]
    step: Step
    train_images: Sequence[int]  # of the step: positions in dataset.train
    test_classes: Sequence[frozenset[int]]  # shown by each of dataset.test
    teacher: Segmenter | None
    method: Method
    keep: float  # lambda_a, the weight of R in normal training
    places: Mapping[int, str]  # iteration -> name: where to measure

    def __call__(self, model: Segmenter) -> Metrics:
        """Return all metrics by name.

        Every rank must ask: the pixels that a loss counts may be counted over all of them.
        """
        twin = self._twin(model)
        losses = self._training_losses(twin) | self._old_loss(twin)
        freeze_like(model, twin)  # after the method has begun the step with the twin too
        parameters = [p for p in twin.parameters() if p.requires_grad]
        return {
            prefix + name: value
            for prefix, loss in losses.items()
            for name, value in flatness_of(loss, parameters).items()
        }

    def _twin(self, model: Segmenter) -> Segmenter:
        """Return the same weights in a network that can be differentiated twice."""
        network = self.config.model.architecture | {"norm": "abn"}
        with torch.random.fork_rng(devices=[]):  # the first weights, which are replaced at once
            twin = rebuild_segmenter(network, model.outline(), model.state_dict())
        twin.rule = model.rule
        return self._place.arrange(twin.to(self.device)).eval()

    def _judge(self, twin: Segmenter) -> Method:
        """Return the method with what it knows by now, its losses plain: they can be differentiated twice."""
        judge = plain_method(self.config)
        judge.protocol = self.steps
        judge.attach(twin, self.step)
        judge.begin_step(twin, self.step)
        judge.load_state_dict(self.method.state_dict())
        return judge

    def _training_losses(self, twin: Segmenter) -> dict[str, Callable[[], Tensor]]:
        """Return l_seg and L on training images of the step, by prefix."""
        judge, data = self._judge(twin), self.config.data
        chosen = [self.dataset.train[i] for i in self.train_images[: self.config.run.flatness]]
        table = train_table(self.step, data.mode, data.void, self.dataset.num_classes)
        images, labels = self._read(chosen, table)
        target = None
        if self.teacher is not None:
            with torch.no_grad():
                target = self.teacher(images)
                labels = judge.targets(labels, target)

        batch = Batch(images, labels)

        def segmentation() -> Tensor:
            return judge.learn(twin(images), batch)

        def objective() -> Tensor:
            output = twin(images)
            retention = penalty(judge, twin)
            if target is not None:
                retention = retention + sum(judge.keep(output, target, batch).values())
            return judge.learn(output, batch) + self.keep * retention

        return {"": segmentation, "objective_": objective} if has_retention(judge) else {"": segmentation}

    def _old_loss(self, twin: Segmenter) -> dict[str, Callable[[], Tensor]]:
        """Return cross-entropy over all classes, on test images of old classes;
        pixels that were not old are left out.
        """
        before = self.steps[self.step.index - 1]
        shown = select_test(self.test_classes, before)
        count = min(self.config.run.flatness, len(shown))
        # The middle of each of `count` equal parts of the list.
        chosen = [self.dataset.test[shown[(2 * i + 1) * len(shown) // (2 * count)]] for i in range(count)]
        if not chosen:
            return {}
        # Old classes have the same labels in both steps; to the step before, the new ones are unseen like the
        # rest.
        table = test_table(before, "ignore", self.dataset.void_labels, self.dataset.num_classes)
        images, labels = self._read(chosen, table)
        if not (labels != IGNORE_INDEX).any():
            return {}

        def loss() -> Tensor:
            logits = twin(images).logits
            if twin.rule is None:
                return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
            scores = twin.rule(logits).clamp(min=SMALLEST_SCORE)  # their shares stand for probabilities
            return F.nll_loss((scores / scores.sum(1, keepdim=True)).log(), labels, ignore_index=IGNORE_INDEX)

        return {"old_": loss}

    def _read(self, chosen: Sequence[Sample], table: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the central squares of the images as one batch."""
        data = StepDataset(chosen, table, test_transform(self.config.data.crop))
        images, labels = map(torch.stack, zip(*(data[0, i] for i in range(len(data))), strict=True))
        return self._place.images(images), self._place.labels(labels)

    @property
    def _place(self) -> Placement:
        return Placement.of(self.config, self.device)


def freeze_like(model: nn.Module, twin: nn.Module) -> None:
    """Make those of the twin's parameters require a gradient that do in the model."""
    for theirs, ours in zip(model.parameters(), twin.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)


def flatness_of(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Metrics:
    """Return loss, gradient norm and top eigenvalue; None stands for what is not
    finite or did not converge.
    """
    from scipy.sparse.linalg import ArpackError  # late: scipy takes its time

    from metrics import flatness

    value = loss()
    gradient = flatness.flatten(torch.autograd.grad(value, parameters, materialize_grads=True))
    try:
        top = flatness.top_eigenvalues(lambda _: loss(), [None], parameters, 1, tolerance=0.01)
    except ArpackError:  # a Hessian that is not finite, or zero throughout, is no reason to end a run
        top = []
    metrics = {
        "loss": value.item(),
        "squared_gradient_norm": gradient.norm().item() ** 2,
        "top_eigenvalue": top[0] if top else math.nan,
    }
    return {name: metric if math.isfinite(metric) else None for name, metric in metrics.items()}


def plain_method(config: Config) -> Method:
    """Return the config's method with plain losses, which can be differentiated twice."""
    return make_method(config.method.name, config.method.cross_entropy, config.method.options, "plain")


def has_retention(method: Method) -> bool:
    """Return whether the method has an R in a later step, on the outputs or, as EWC, PI and RW,
    on the parameters.
    """
    hooks = (type(method).retention_losses, Method.retention_losses), (type(method).keep, Method.keep)
    return any(own is not usual for own, usual in hooks) or isinstance(method, ImportanceMethod)


def penalty(method: Method, model: nn.Module) -> Tensor | float:
    """Return R of the importance methods, sum omega (theta - anchor)^2.

    In training they add its gradient in closed form.
    """
    if not isinstance(method, ImportanceMethod):
        return 0.0
    parameters = dict(model.named_parameters())
    return sum(
        (method.omega[name] * (parameters[name] - anchor) ** 2).sum()
        for name, anchor in method.anchor.items()
    )
