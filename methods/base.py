"""What a method is.

A method says what the terms of the objective are, a phase says with which two numbers they are weighed, and
the optimizer knows neither:

    weights = phase(iteration, total)
    loss = weights.learn * method.learn(...) + weights.keep * sum(method.keep(...).values())

So every method runs under every phase, resuming needs no phase state, and all ranks agree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from configs.registry import Conflicts, Registry, Settings
from data.protocols import Step
from methods.losses import fused
from methods.losses import plain as losses

MethodClass = TypeVar("MethodClass", bound=type["Method"])
METHODS: Registry[type["Method"]] = Registry("method.name", "methods")
TEACHER_HOOKS = ("survey", "targets", "retention_losses", "keep")
LOSSES = {"plain": losses, "fused": fused}  # the same functions twice


def register(name: str) -> Callable[[MethodClass], MethodClass]:
    """Return class decorator: make a method selectable as `method.name=<name>`."""

    def add(cls: MethodClass) -> MethodClass:
        wants = [hook for hook in TEACHER_HOOKS if getattr(cls, hook) is not getattr(Method, hook)]
        if wants and not cls.needs_teacher:
            raise ValueError(
                f"{cls.__name__} has {wants[0]}, which is never called without a teacher: set needs_teacher "
                "= True"
            )
        cls.name = name
        return METHODS.register(name)(cls)

    return add


class Output(Protocol):
    """What a network gives for a batch, as a method reads it."""

    @property
    def logits(self) -> Tensor:
        """The scores of all classes, B x C x H x W, at the resolution of the images."""

    @property
    def features(self) -> Tensor:
        """What the backbone gives."""

    @property
    def stages(self) -> tuple[Tensor, ...]:
        """With `needs_stages`: each stage of the backbone before its activation, the head,
        the logits before upsampling.
        """

    @property
    def hidden(self) -> Tensor:
        """What the head gives, at the resolution of the features: what the classifiers see."""

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """What the method's own `outputs` returned."""


class Batch(NamedTuple):
    """The images of a pass and their labels, as `targets` left them."""

    images: Tensor
    labels: Tensor  # B x H x W
    remembered: Tensor | None = None  # which images come from the memory; on the CPU: nothing waits for a GPU


@dataclass(frozen=True)
class Weights:
    """How one iteration weighs the objective: `learn` * l_seg + `keep` * R.

    A negative weight ascends its term.
    """

    learn: float
    keep: float
    updates: bool = True  # False: the images only pass through the network, whose weights stay


class Method:
    """Cross-entropy on what the step labels and nothing against forgetting;
    a method overrides only what it changes.

    None of them asks which step it is in: at step 0 there is no teacher and no importance, and the background
    is the only old class.
    """

    name: str
    needs_teacher = False
    needs_stages = False  # the outputs' `stages`: what the parts of the network give
    # How the images of `method.memory` come back: "half" of every batch, "concatenated" with those of the
    # step, None: not.
    memory: Literal["half", "concatenated"] | None = None
    # Step 0 is trained alike by all methods with plain cross-entropy there, so one model can serve them all.
    shares_first_step = True
    knows_future = False  # it uses `protocol` to know classes that are still to come: tables say so
    protocol: Sequence[Step] = ()  # all of its steps
    mode: str = "disjoint"  # data.mode: which images a step trains on
    losses = losses  # or methods.losses.fused
    # The published lambda, by protocol where it differs: {"default": 10.0, "15-1": 100.0}.
    strength: float | dict[str, float] = 0.0
    Options = Settings  # a method's own settings: `method.options` in the config, `self.options` here

    def __init__(self, cross_entropy: str = "all", **options: Any):
        self.mean_over, self.options, self.num_old = cross_entropy, self.Options(**options), 1

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        """Yield what of the config the method cannot work with:
        pairs of a key and what is wrong with its value.
        """
        return iter(())

    @classmethod
    def remarks(cls, config: Any) -> list[str]:
        """Return what a reader of the results must know before he compares them with others'."""
        facts = {
            f"memory of {config.method.memory} images": bool(config.method.memory),
            "own step 0": not cls.shares_first_step,
            "knows future classes": cls.knows_future,
        }
        return [fact for fact, holds in facts.items() if holds]

    def begin_step(self, model: nn.Module, step: Step) -> None:
        """Called with the model as the step starts from it: classes added, classifier initialised."""
        self.num_old = step.num_old

    def add_classifier(self, model: Any, step: Step) -> None:
        """Give the network the outputs of the step's classes; step 0 brings the background with it."""
        model.add_classes(step.num_classes if step.index == 0 else step.num_new)

    def init_classifier(self, model: nn.Module) -> None:
        """Called right after the step's classes were added (not at step 0)."""

    def freeze(self, model: Any) -> None:
        """Called from step 1 on, after `init_classifier`: what is to stay as it is goes to `model.freeze`."""

    def outputs(self, network: Any, hidden: Tensor) -> Mapping[str, Tensor]:
        """Return what the method wants to know of a batch beside the logits, from what the head gives:
        `extra` in the output of student and teacher. Called inside their forward pass, if overridden.
        """
        return {}

    def attach(self, network: Any, step: Step) -> None:
        """Ask a network, student or teacher, for what the method reads in this step."""
        network.returns_stages = self.needs_stages and step.index > 0
        network.extra_outputs = self.outputs if type(self).outputs is not Method.outputs else None
        network.rule = self.rule(step.num_classes)

    @classmethod
    def scores(cls, logits: Tensor, num_classes: int) -> Tensor:
        """Return scores (B, num_classes, H, W) between 0 and 1, background first, of which the largest
        is the prediction: everywhere, if overridden, in place of the logits' softmax.
        """
        return logits.softmax(dim=1)

    @classmethod
    def rule(cls, num_classes: int) -> Callable[[Tensor], Tensor] | None:
        """Return `scores` if it is overridden."""
        own = cls.scores.__func__ is not Method.scores.__func__  # type: ignore[attr-defined]
        return partial(cls.scores, num_classes=num_classes) if own else None

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """Return the parameters in groups as PyTorch's optimizers take them: "params", and where they differ
        from the config "weight_decay" and "lr_scale", a factor on every learning rate of the step.
        """
        return [{"params": list(model.parameters())}]

    @property
    def surveys(self) -> bool:
        return type(self).survey is not Method.survey

    def survey(self, images: Iterable[tuple[Tensor, Output]]) -> None:
        """Called before the first iteration of a step from step 1 on, if overridden: one epoch of
        (labels, teacher's output).

        What it finds belongs into `state_dict`: a resumed step does not look again. Under several ranks each
        sees its own images.
        """

    def targets(self, labels: Tensor, teacher: Output) -> Tensor:
        """Return the labels that l_seg is given, from step 1 on if `needs_teacher`:
        a method may rewrite them.
        """
        return labels

    def learn(self, student: Output, batch: Batch) -> Tensor:
        """Return l_seg, the term that a phase flips, of all that the student gives and the batch shows.

        Override `segmentation_loss` where logits and labels are enough. Where a method has a loss of its own
        for the memory, this is the mean over the images of both.
        """
        if batch.remembered is None or type(self).memory_loss is Method.memory_loss:
            return self.segmentation_loss(student.logits, batch.labels)
        losses = {False: self.segmentation_loss, True: self.memory_loss}
        terms = []
        for kind, loss in losses.items():
            own = stretches(batch.remembered, kind)
            if own:
                labels = joined(batch.labels, own)
                share = len(labels) / len(batch.labels)
                terms.append(loss(joined(student.logits, own), labels) * share)
        return sum(terms[1:], terms[0])

    def keep(self, student: Output, teacher: Output, batch: Batch) -> dict[str, Tensor]:
        """Return R as named terms, of all that both networks give and the batch shows.

        Override `retention_losses` where the two outputs are enough.
        """
        return self.retention_losses(student, teacher)

    def segmentation_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return l_seg of the logits."""
        return self.losses.cross_entropy(logits, labels, self.mean_over)

    def memory_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """l_seg on the images of a batch that come from the memory; if it is not overridden,
        they are images as any other.

        Their labels are those of the step that saw them: its new classes, and background for all else.
        """
        return self.segmentation_loss(logits, labels)

    def retention_losses(self, student: Output, teacher: Output) -> dict[str, Tensor]:
        """Return R as named terms, which only phase.flip=all flips.

        Called from step 1 on, with the outputs of both models, if `needs_teacher`.
        """
        return {}

    def after_backward(self, model: nn.Module, weights: Weights, learning_rate: float) -> dict[str, Tensor]:
        """Add the gradient of terms in parameter space to `p.grad`, and return their values by name.

        `learning_rate` is that of the update that follows.
        """
        return {}

    @property
    def reviews(self) -> bool:
        return type(self).review is not Method.review

    def review(self, images: Iterable[tuple[Tensor, Output]]) -> None:
        """Called after the last iteration of every step, if overridden: one epoch of (labels, output of the
        network that the step hands over, in eval). Under several ranks each sees its own images.
        """

    def end_step(self, model: nn.Module) -> None:
        """Called once after the last iteration of a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed step or the next one needs: tensors, numbers, text and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"method {self.name!r} keeps no state, but the checkpoint holds {sorted(state)}")

    def handover(self) -> dict[str, dict[str, Any]]:
        """Return what a finished step leaves to the next one, by the name of the method it is for: finite,
        or nothing is saved.
        """
        state = self.state_dict()
        return {self.name: state} if state else {}


def stretches(flags: Tensor, kind: bool) -> list[slice]:
    """Return where the images of one kind stand in a batch.

    Slices, because an index would be copied to the device, and its backward pass adds up in any order there.
    """
    found, first = [], 0
    for flag, images in groupby(flags.tolist()):
        last = first + len(list(images))
        if flag == kind:
            found.append(slice(first, last))
        first = last
    return found


def joined(x: Tensor, places: list[slice]) -> Tensor:
    parts = [x[place] for place in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class WithObservers(Method):
    """A method in whose step 0 others watch: each gathers its own statistics in
    the same pass and changes nothing.
    """

    def __init__(self, method: Method, observers: Sequence[Method]):
        self.name, self.method, self.observers = method.name, method, observers
        self.losses, self.parameter_groups = method.losses, method.parameter_groups  # type: ignore[method-assign]

    def learn(self, student: Output, batch: Batch) -> Tensor:
        return self.method.learn(student, batch)

    def begin_step(self, model: nn.Module, step) -> None:
        assert step.index == 0, "later, every method trains a model of its own"
        for method in (self.method, *self.observers):
            method.begin_step(model, step)

    def after_backward(self, model: nn.Module, weights: Weights, learning_rate: float) -> dict[str, Tensor]:
        for observer in self.observers:
            observer.after_backward(model, weights, learning_rate)
        return self.method.after_backward(model, weights, learning_rate)

    def end_step(self, model: nn.Module) -> None:
        for method in (self.method, *self.observers):
            method.end_step(model)

    def state_dict(self) -> dict[str, Any]:
        return self.handover()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for method in (self.method, *self.observers):
            method.load_state_dict(state.get(method.name, {}))

    def handover(self) -> dict[str, dict[str, Any]]:
        return {name: s for method in (self.method, *self.observers) for name, s in method.handover().items()}


def published_strength(name: str, protocol: str | None) -> float:
    strength = METHODS.find(name).strength
    if isinstance(strength, dict):
        strength = strength.get(protocol or "default", strength["default"])
    return float(strength)


def make_method(
    name: str, cross_entropy: str = "all", options: dict[str, Any] | None = None, losses: str = "plain"
) -> Method:
    make = METHODS.find(name)
    METHODS.check_options(name, options or {})
    method = make(cross_entropy, **(options or {}))
    method.losses = LOSSES[losses]
    return method
