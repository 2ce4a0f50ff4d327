"""How a run is called by its config alone: in the terminal, and as a folder.

Tables have longer names (study/identity.py).
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from configs import yaml_core

RECIPES = Path(__file__).parent / "recipes"
# Of a recipe: where the weights lie, what changes speed and rounding alone.
NO_PART = {("model", "pretrained"), ("data", "workers"), ("train", "evaluate_batch"), ("train", "amp")}
LEAKY = ("abn", "abn_lean", "iabn")  # norms that compute the same


def short_name(config: Mapping[str, Any]) -> str:
    """Method, phase and what else forms the weights, without their numbers, as the overlays are called:
    "mib + sam".
    """
    names = _names(config)
    if config["method"].get("entropy", 0) > 0:  # .get: configs of runs that are older than the key
        names.append("cpr")
    if is_stable_sgd(config):
        names.append("stable_sgd")
    return " + ".join(names)


def run_name(config: Mapping[str, Any]) -> str:
    """Return the name of a run's folder where the user gives none."""
    data, seed = config["data"], config["train"]["seed"]
    protocol = data["protocol"] if data["steps"] is None else "own-steps"
    if data.get("order") is not None:
        protocol = f"{protocol}_order-{order_name(data['order'])}"
    mode = data["mode"]
    if mode == "partitioned" and data["split_seed"]:
        mode = f"{mode}-{data['split_seed']}"
    made = f"{data['dataset']}_{protocol}_{mode}_{'-'.join(_names(config))}_seed{seed}"
    return config["run"]["name"] or made


def recipe_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the overlay in configs/recipes that a resolved config agrees with;
    None for a recipe of one's own.
    """
    return next((name for name, recipe in _recipes().items() if _agrees(config, recipe)), None)


@cache
def _recipes() -> dict[str, dict[str, dict[str, Any]]]:
    paths = sorted(RECIPES.glob("*.yaml"))
    return {path.stem: yaml_core.parse(path.read_text(encoding="utf-8")) for path in paths}


def _agrees(config: Mapping[str, Any], recipe: Mapping[str, Mapping[str, Any]]) -> bool:
    return all(
        _shown(config[section].get(key)) == _shown(value)
        for section, keys in recipe.items()
        for key, value in keys.items()
        if (section, key) not in NO_PART
    )


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else LEAKY[0] if value in LEAKY else value


def order_name(order: int | Sequence[int | str]) -> str:
    """Return how an order of classes (data.order) is called: by its seed,
    a list by the start of its digest.
    """
    if isinstance(order, int):
        return str(order)
    return hashlib.blake2b(repr(list(order)).encode(), digest_size=3).hexdigest()


def _names(config: Mapping[str, Any]) -> list[str]:
    """Method, phase, update rule and average, as far as they are not the plain ones."""
    method, *others = (
        config.get(section, {}).get("name") for section in ("method", "phase", "update", "average")
    )
    if method is None:
        raise KeyError("method.name")
    return [method, *(name for name in others if name not in (None, "descent", "plain", "none"))]


def is_stable_sgd(config: Mapping[str, Any]) -> bool:
    """Return whether a run is Stable SGD; its small batch alone is another recipe, not Stable SGD."""
    return config.get("model", {}).get("dropout", 0) > 0 or config.get("optim", {}).get("lr_decay", 1) < 1


def is_offline(config: Mapping[str, Any]) -> bool:
    """Return whether all classes are learned at once."""
    steps = config["data"]["steps"]
    return config["data"]["protocol"] == "offline" if steps is None else len(steps) == 1
