"""Typed configuration: YAML overlays merged left to right over `base.yaml`, then `key.sub=value` overrides.

    config = load_config(["configs/voc/15-1.yaml", "configs/methods/mib.yaml"], ["train.seed=1"])
    config.optim.lr

Every default stands in `base.yaml`, none here. All problems are collected into one `ConfigError`, each with
the key, the value, the choices and the file (or the command line) that the value came from.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Strict, ValidationError

from configs import yaml_core
from configs.errors import UserError
from configs.fields import (
    ClassOrder,
    Count,
    Dilations,
    FolderName,
    Half,
    MaskLabels,
    Names,
    Options,
    OwnSteps,
    Place,
    Positive,
    ScaleRange,
    Scales,
    Share,
    Text,
)
from configs.layers import Layers
from configs.messages import explain, show
from configs.registry import NonNegative, Probability, Registry, Settings, Size
from configs.rules import RULES


class ConfigError(UserError, ValueError):
    """Everything that is wrong with a configuration; `problems` holds one line each."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def report(self) -> str:
        return "\n".join(f"config error: {problem}" for problem in self.problems)


# --------------------------------------------------------------------------------------------- the typed tree


class Section(BaseModel):
    # defer_build: the sections are only validated as parts of Config, so none needs a validator of its own
    model_config = Settings.model_config


class DataConfig(Section):
    dataset: Text
    root: Place | None
    protocol: Text | None  # None with own steps
    mode: Literal["disjoint", "overlapped", "sequential", "partitioned"]
    split_seed: Count
    train_list: Literal["auto", "train", "train_aug"]
    steps: OwnSteps | None
    order: ClassOrder | None
    void: Literal["background", "ignore"]
    unseen: Literal["ignore", "background"]
    unnamed: Literal["refuse", "void"]
    labels: MaskLabels | None
    background: bool
    augment: Literal["resized_crop", "scale_crop"]
    crop: Size
    scale: ScaleRange
    flip: Probability
    evaluate: Literal["crop", "full", "slide"]
    evaluate_size: Size
    evaluate_scales: Scales
    evaluate_flip: bool
    workers: Count
    cache: Place | None


class ModelConfig(Section):
    body: Text
    output_stride: Literal[8, 16]
    norm: Literal["abn", "abn_lean", "iabn"]
    sync: bool
    head: Literal["deeplab", "aspp"]
    head_channels: Size
    dilations: Dilations | None
    pooling: Size | None
    dropout: Annotated[float, Field(ge=0, lt=1)]
    pretrained: Place | None

    @property
    def architecture(self) -> dict[str, Any]:
        """The arguments that the network is built with, which a checkpoint records."""
        newer = {"pooling": None, "head": "deeplab"}  # left out where they say nothing: older checkpoints fit
        said = {key: value for key, value in self if key in newer and value != newer[key]}
        return self.model_dump(include={"body", "output_stride", "norm", "head_channels", "dilations"}) | said


class MethodConfig(Section):
    name: Text
    strength: NonNegative | None
    cross_entropy: Literal["all", "valid"]
    entropy: NonNegative
    options: Options
    also_observe: Annotated[tuple[Text, ...], Strict(False)]
    memory: Count


class PhaseConfig(Section):
    name: Text
    p: Share
    lambda_a: NonNegative | None
    lambda_b: NonNegative | None
    flip: Literal["seg", "all"]
    every: Half
    momentum: Literal["keep", "reset", "off"]
    batch: Literal["next", "same"]
    weight_decay: Literal["always", "signed"]
    lr: Literal["decay", "hold"]
    from_step: Count
    options: Options


class UpdateConfig(Section):
    name: Text
    rho: Positive
    penalty: NonNegative
    radius: Positive
    from_step: Count
    options: Options


class AverageConfig(Section):
    name: Text
    options: Options


class OptimConfig(Section):
    name: Text
    lr: Positive
    lr_later: Positive
    lr_decay: Annotated[float, Field(gt=0, le=1)]
    momentum: Annotated[float, Field(ge=0, lt=1)]
    nesterov: bool
    weight_decay: NonNegative
    schedule: Text
    power: NonNegative


class TrainConfig(Section):
    epochs: Size
    epochs_later: Size
    batch_size: Size
    accumulate: Size
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    amp: Literal["off", "bf16", "fp16"]
    channels_last: bool
    losses: Literal["fused", "plain", "compiled"]
    device: Literal["auto", "cpu", "cuda"]
    first_step: Count
    last_step: Count | None
    start_from: Place | None
    evaluate_only: bool
    evaluate_batch: Size
    deterministic: bool


class RunConfig(Section):
    folder: Place
    name: FolderName | None
    log_every: Size
    pictures: Count
    tracker: Names
    flatness: Count
    checkpoint_every: Count
    checkpoint_minutes: NonNegative
    force: bool


class Config(Section):
    data: DataConfig
    model: ModelConfig
    method: MethodConfig
    phase: PhaseConfig
    update: UpdateConfig
    average: AverageConfig
    optim: OptimConfig
    train: TrainConfig
    run: RunConfig


# Keys that may differ between two starts of one run, for they do not change what it computes.
FREE_KEYS = (
    *("run.", "data.root", "data.cache", "data.workers"),
    *("train.device", "train.first_step", "train.last_step", "train.start_from", "train.evaluate_"),
)
EVALUATION_KEYS = ("data.evaluate", "data.unseen")


# ---------------------------------------------------------------------------------------- loading and dumping


def load_config(
    overlays: Sequence[str | Path],
    overrides: Sequence[str] = (),
    registries: Sequence[Registry] = (),
) -> Config:
    """Merge `base.yaml`, the overlays and the overrides into one valid Config, or raise ConfigError.

    The `registries` know the names that some keys choose from, and which settings go with each.
    """
    layers = Layers()
    for overlay in overlays:
        layers.add_overlay(overlay)
    layers.add_overrides(overrides)
    _settle_protocol(layers)

    config = None
    invalid: set[str] = set()
    try:
        config = Config.model_validate(layers.tree)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            section, name, *place = detail["loc"]
            invalid.add(f"{section}.{name}")
            inside = "".join(f"[{index}]" for index in place if detail["type"] != "missing")
            layers.problem(explain(detail), f"{section}.{name}", place=inside)

    for registry in registries:
        if registry.key not in invalid:
            invalid |= _check_choice(registry, layers, invalid)
    for keys, check in RULES:
        if not layers.incomplete and invalid.isdisjoint(keys) and (text := check(*map(layers.value, keys))):
            layers.problem(text, *keys)
    if config is not None and not layers.problems:
        for registry in registries:
            for name in _chosen(registry, layers):
                for key, text in registry.conflicts(name, config):
                    layers.problem(text, key, registry.key)
    if layers.problems:
        raise ConfigError(layers.problems)
    assert config is not None
    return config


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back to an equal Config."""
    return yaml_core.dump(yaml_core.plain(config.model_dump()))


def with_defaults(tree: Mapping[str, Mapping]) -> dict[str, dict]:
    """Return a resolved config with the defaults of the keys that are newer than it."""
    defaults = Layers().tree
    return {section: {**keys, **tree.get(section, {})} for section, keys in defaults.items()}


def config_differences(old: Mapping, new: Mapping, free: tuple[str, ...] = ()) -> list[str]:
    """Return what changed, "optim.lr: 0.01 -> 0.02", sorted by key; not what begins like `free`."""
    before, after = dict(_leaves(yaml_core.plain(old))), dict(_leaves(yaml_core.plain(new)))
    missing = object()

    def shown(leaves: dict[str, Any], key: str) -> str:
        return show(leaves[key]) if key in leaves else "not set"

    return [
        f"{key}: {shown(before, key)} -> {shown(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, missing) != after.get(key, missing) and not key.startswith(free)
    ]


def _settle_protocol(layers: Layers) -> None:
    """Keep the later one of a protocol and own steps, which exclude each other; the other becomes null."""
    if layers.value("data.protocol") is None or layers.value("data.steps") is None:
        return
    protocol, steps = layers.layer_of["data.protocol"], layers.layer_of["data.steps"]
    if protocol == steps:
        layers.problem("cannot be given together with data.protocol: set one of them to null", "data.steps")
    else:
        layers.tree["data"]["protocol" if protocol < steps else "steps"] = None


def _chosen(registry: Registry, layers: Layers) -> list[str]:
    """Return the names that the config gives where the registry has a say."""
    value = layers.value(registry.key)
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_choice(registry: Registry, layers: Layers, invalid: set[str]) -> set[str]:
    """Return the invalid keys: names that are unknown, options that do not fit the chosen thing."""
    names = _chosen(registry, layers)
    unknown = [name for name in names if name not in registry]
    for name in unknown:
        layers.problem(registry.unknown(name), registry.key)
    if unknown:
        return {registry.key}
    key = f"{registry.key.split('.')[0]}.options"
    if key not in layers.keys or key in invalid:
        return set()
    wrong = [found for name in names for found in registry.wrong_options(name, layers.value(key))]
    for option, text in wrong:
        layers.problem(text, key, place=f".{option}")
    return {key} if wrong else set()


def _leaves(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
