"""From the command line of train.py to a valid config."""

from collections.abc import Iterator

from configs.layers import FOLDER
from configs.registry import Registry
from configs.schema import Config, ConfigError, load_config
from data import DATASETS
from data.protocols import PROTOCOLS
from engine.optim import OPTIMIZERS, SCHEDULES, settings_of
from methods import AVERAGES, METHODS, PHASES, UPDATES, make_method, published_strength
from models import BACKBONES
from tracking.tracker import TRACKERS

REGISTRIES: tuple[Registry, ...] = (
    *(DATASETS, BACKBONES, METHODS, PHASES, UPDATES, AVERAGES),
    *(OPTIMIZERS, SCHEDULES, TRACKERS),
)


def read_config(arguments: list[str]) -> Config:
    """Return overlays and key.sub=value overrides as one config, the published lambda filled in,
    or ConfigError.
    """
    overlays = [a for a in arguments if "=" not in a]
    overrides = [a for a in arguments if "=" in a]
    config = load_config(overlays, overrides, REGISTRIES)
    check_observers(config)
    check_memory(config)
    strength = config.method.strength
    if strength is None:
        strength = published_strength(config.method.name, config.data.protocol)
    return config.model_copy(update={"method": config.method.model_copy(update={"strength": strength})})


def check_observers(config: Config) -> None:
    able = [name for name in METHODS if make_method(name).state_dict()]
    wrong = [name for name in config.method.also_observe if name not in able]
    if wrong:
        raise ConfigError([f"method.also_observe: {wrong[0]!r} is not one of {', '.join(able)}"])
    if config.method.also_observe and not METHODS[config.method.name].shares_first_step:
        raise ConfigError(
            [
                f"method.also_observe: step 0 of {config.method.name} has an objective of its own; leave the "
                "list empty"
            ]
        )


def check_memory(config: Config) -> None:
    """Raise ConfigError for a memory that the method would not use."""
    name, size = config.method.name, config.method.memory
    if size and METHODS[name].memory is None:
        able = ", ".join(other for other in METHODS if METHODS[other].memory) or "none"
        raise ConfigError(
            [
                f"method.memory: {size} images are kept, but method.name {name} uses none; those that do: "
                f"{able}"
            ]
        )


def without_effect(config: Config) -> Iterator[str]:
    """Yield a notice for each setting of phase, update rule or optimizer that is no default,
    but that the chosen one does not use.
    """
    default, phase, update, optim = load_config([]), config.phase, config.update, config.optim
    measured = (
        {"p", "every"} if config.run.flatness else set()
    )  # where run.flatness looks, whatever the phase
    # The lambda of plain training is method.strength.
    keys = set() if phase.name == "descent" else set(PHASES.find(phase.name).keys)
    used = {"phase": keys | measured, "update": set(UPDATES.find(update.name).keys)}
    for section, ours, usual in (("phase", phase, default.phase), ("update", update, default.update)):
        for key, value in ours:
            is_used = key in used[section] or key in ("name", "from_step", "options")
            if not is_used and value != getattr(usual, key):
                yield f"{section}.{key}={value} has no effect with {section}.name={ours.name}"
    known = settings_of(OPTIMIZERS.find(optim.name), config)
    for key in ("momentum", "nesterov", "weight_decay"):
        if key not in known and getattr(optim, key) != getattr(default.optim, key):
            yield f"optim.{key}={getattr(optim, key)} has no effect with optim.name={optim.name}"


def help_text(about: str) -> str:
    """`about`, every name to choose from, and every key with its default."""
    protocols = "\n".join(f"  {name}: {', '.join(PROTOCOLS[name])}" for name in DATASETS if name in PROTOCOLS)
    return (
        f"{about}\n"
        f"Methods (method.name): {', '.join(METHODS)}\n"
        f"Phases (phase.name): {', '.join(PHASES)}\n"
        f"Update rules (update.name): {', '.join(UPDATES)}\n"
        f"Averages (average.name): {', '.join(AVERAGES)}\n"
        f"Optimizers (optim.name): {', '.join(OPTIMIZERS)}\n"
        f"Schedules (optim.schedule): {', '.join(SCHEDULES)}\n"
        f"Backbones (model.body): {', '.join(BACKBONES)}, timm/<name>\n"
        f"Trackers (run.tracker): {', '.join(TRACKERS)}\n"
        f"Data sets (data.dataset): {', '.join(DATASETS)}\n"
        "Protocols (data.protocol), by data.dataset:\n"
        f"{protocols}\n"
        "\n"
        "Every key with its default:\n"
        "\n"
        f"{(FOLDER / 'base.yaml').read_text(encoding='utf-8')}"
    )
