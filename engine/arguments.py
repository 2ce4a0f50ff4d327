"""From the command line of train.py to a valid config."""

from configs.layers import FOLDER
from configs.schema import Config, ConfigError, load_config
from data.protocols import PROTOCOLS
from methods import METHODS, PHASES, UPDATES, make_method, published_strength
from models.segmenter import BODIES


def read_config(arguments: list[str]) -> Config:
    """Overlays and key.sub=value overrides as one config, the published lambda filled in, or ConfigError."""
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


def help_text(about: str) -> str:
    """`about`, every name to choose from, and every key with its default."""
    protocols = "\n".join(f"  {name}: {', '.join(PROTOCOLS[name])}" for name in PROTOCOLS)
    return (
        f"{about}\nMethods (method.name): {', '.join(sorted(METHODS))}\nPhases (phase.name): {', '.join(PHASES)}\n"
        f"Update rules (update.name): {', '.join(UPDATES)}\n"
        f"Bodies (model.body): {', '.join(BODIES)}\nProtocols (data.protocol), by data.dataset:\n{protocols}\n\n"
        f"Every key with its default:\n\n{(FOLDER / 'base.yaml').read_text(encoding='utf-8')}"
    )
