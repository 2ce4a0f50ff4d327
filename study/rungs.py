"""The ladder: the field's methods from fine-tuning on, and where one of them cannot be itself under the
recipe that all of them share.

A rung is a method, perhaps with a memory, and perhaps with something on top of it that goes with any method:
the average EWF, the phases AlterSGD and Consolidate.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]  # a resolved one


@dataclass(frozen=True)
class Rung:
    method: str
    plus: str | None = None  # an overlay of configs/
    memory: int = 0  # images


PHASES = ("altersgd", "consolidate")
ALONE = ("ft", "pi", "ewc", "rw", "lwf", "lwf_mc", "ilt", "mib", "plop", "dft", "dkd", "ssul", "star")
REMEMBERING = ("mib_augm", "dkd", "ssul")
MEMORY = 100  # images, as published with all three
# What goes with any method is tried over MiB and over the best others that have something to hold it back, R:
# SSUL and DFT* freeze instead, and an ascent on their l_seg alone would only unlearn.
FUSED = ("mib", "dkd", "star")
ALTERNATING = ("mib", "plop", "dkd", "star")
LADDER = (
    *(Rung(name) for name in ALONE),
    *(Rung(name, memory=MEMORY) for name in REMEMBERING),
    *(Rung(name, "ewf") for name in FUSED),
    *(Rung(name, phase) for name in ALTERNATING for phase in PHASES),
)
# For a first screen: without the methods that hold parameters and forget nearly all the same, and with what
# goes on top over MiB alone.
IN_BRIEF = tuple(
    rung
    for rung in LADDER
    if rung.method not in ("pi", "ewc", "rw", "lwf_mc") and (rung.plus is None or rung.method == "mib")
)


@dataclass(frozen=True)
class OwnRecipe:
    """A key that some methods have otherwise than all others: the value, None where it is the same, and
    why."""

    methods: tuple[str, ...]
    key: str
    value: Callable[[Config], Any]
    why: str


OWN_RECIPES = (
    OwnRecipe(
        ("dkd", "ssul", "star"),
        "method.options.body_lr",
        lambda config: 1.0 if config["model"]["pretrained"] is None else None,
        "the published tenth of the learning rate is for a pretrained backbone, and this one begins with "
        "random weights",
    ),
    OwnRecipe(
        ("ssul",),
        "optim.lr_later",
        lambda config: config["optim"]["lr"],
        "published with one learning rate for all steps: later ones train new heads alone",
    ),
    OwnRecipe(
        ("dkd",),
        "method.strength",
        lambda config: _as_published(5.0, 0.001, config["optim"]["lr_later"]),
        "lambda times the learning rate is the published 5 x 0.001: with lambda 5 and the higher learning "
        "rate of this recipe it diverges within a few iterations",
    ),
)


def _as_published(strength: float, published_lr: float, lr: float) -> float | None:
    """Return the lambda with which R moves weights as published, where the learning rate is higher."""
    return strength * published_lr / lr if lr > published_lr else None


def own_recipe(method: str, config: Config) -> dict[OwnRecipe, Any]:
    """Return what a method has of its own under a recipe, with the values."""
    found = {own: own.value(config) for own in OWN_RECIPES if method in own.methods}
    return {own: value for own, value in found.items() if value is not None}


def followed(config: Config) -> dict[OwnRecipe, Any]:
    """Return what a run has otherwise than others because its method has it so, with the values."""
    own = own_recipe(config["method"]["name"], config)
    return {part: value for part, value in own.items() if _value(config, part.key) == value}


def own_keys(config: Config) -> list[str]:
    """Return the keys of the recipe that a run's method has its own way."""
    return [own.key for own in followed(config) if not own.key.startswith("method.")]


def departures(config: Config) -> tuple[tuple[str, Any], ...]:
    """Return the keys in which a run does not follow what its method has of its own.

    Options of the method are not among them: what is changed of these, tables show anyway.
    """
    return tuple(
        (own.key.split(".")[-1], _value(config, own.key))
        for own, value in own_recipe(config["method"]["name"], config).items()
        if not own.key.startswith("method.") and _value(config, own.key) != value
    )


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part)
    return config
