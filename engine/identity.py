"""What a number depends on, by content: the weights a run begins with, class names,
and what a model was trained with.

Two starts of a run, two runs, or a run and the model that it begins with are compared here. Where a file lies
never counts; what an older run folder or checkpoint does not tell is said and not held against it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs import yaml_core
from configs.schema import EVALUATION_KEYS, FREE_KEYS, Config, config_differences, with_defaults
from data.protocols import Step, steps_from_lists
from engine.checkpoint import CheckpointError
from engine.results import metrics_by_step
from methods import METHODS
from models.pretrained import sha256_of, weights_file

Facts = Mapping[str, Any]
MODEL_KEYS = ("step", "class_ids", "classes", "network", "model", "methods")  # not where a model comes from
# Of a recipe: all that a step is trained with but its objective, and what is compared in other ways or
# changes rounding alone.
NO_RECIPE = (
    *(*FREE_KEYS, *EVALUATION_KEYS, "method.", "data.void", "data.protocol", "data.steps", "data.order"),
    *(
        "model.body",
        "model.output_stride",
        "model.norm",
        "model.head",  # and model.head_channels
        "model.dilations",
        "model.pooling",
    ),
    *("model.pretrained", "train.accumulate", "train.channels_last", "train.losses", "train.deterministic"),
)
FIRST_KEYS = ("optim.lr", "train.epochs")
LATER_KEYS = ("optim.lr_later", "optim.lr_decay", "train.epochs_later")
SHOWN_CLASSES = 3


# --------------------------------------------------------------------------------------------------- contents


def state_digest(state: Facts) -> str:
    """sha256 of a step checkpoint's model, classes and statistics: whichever file they are in,
    and however long they took.
    """
    digest = hashlib.sha256()
    _feed(digest, {key: state[key] for key in MODEL_KEYS})
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(b"{")
        for key in sorted(value, key=str):
            digest.update(f"{key!r}:".encode())
            _feed(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, list | tuple):
        digest.update(b"[")
        for item in value:
            _feed(digest, item)
        digest.update(b"]")
    else:
        digest.update(f"{value!r},".encode())


def weights_of(config: Config, needed: bool = False) -> dict[str, str] | None:
    """Return file and sha256 of model.pretrained; None if there is none,
    or the file is not here and not `needed`.
    """
    source = config.model.pretrained
    if source is None:
        return None
    path = weights_file(config.model.body, source, fetch=needed)
    if not needed and not path.is_file():
        return None
    status = path.stat()
    return {"file": str(path), "sha256": _file_digest(path, status.st_size, status.st_mtime_ns)}


@lru_cache(maxsize=64)
def _file_digest(path: Path, size: int, changed: int) -> str:
    """Read once, however many runs of a plan begin with the file."""
    return sha256_of(path)


# ---------------------------------------------------------------------------------------------------- configs


def run_differences(
    before: Facts, recorded: Facts, config: Config, weights: Facts | None, free: tuple[str, ...] = FREE_KEYS
) -> tuple[list[str], list[str]]:
    """Return how a run's config differs from the one in its folder, and what could not be compared.

    `recorded` is the results.json of the folder, `weights` what `weights_of` finds now: weights count by
    content.
    """
    differences = config_differences(before, config.model_dump(), (*free, "model.pretrained"))
    old, new = before["model"]["pretrained"], config.model.pretrained
    known = recorded.get("weights")
    if old == new and old in (None, "imagenet"):
        return differences, []
    if known and weights:
        if known["sha256"] != weights["sha256"]:
            contents = f"sha256 {known['sha256'][:12]} -> {weights['sha256'][:12]}"
            differences.append(
                f"model.pretrained: {old!r} -> {new!r}, files of different content ({contents})"
            )
        return sorted(differences), []
    bodies = before["model"]["body"], config.model.body
    if old is None or new is None or weights_file(bodies[0], old).name != weights_file(bodies[1], new).name:
        differences.append(f"model.pretrained: {old!r} -> {new!r}")
        return sorted(differences), []
    why = "the file is not here" if known else "the run does not tell their content"
    return differences, [f"the weights of model.pretrained are compared by their file's name alone: {why}"]


# ---------------------------------------------------------------------------------------------------- classes


def class_differences(before: Mapping[int, str], now: Mapping[int, str]) -> list[str]:
    """Return class ids that have another name: "class 1: 'cat' -> 'train'"."""
    both = sorted(before.keys() & now.keys())
    return [f"class {c}: {before[c]!r} -> {now[c]!r}" for c in both if before[c] != now[c]]


def some(differences: Sequence[str]) -> str:
    rest = len(differences) - SHOWN_CLASSES
    return ", ".join(differences[:SHOWN_CLASSES]) + (f" and {rest} more" if rest > 0 else "")


def recorded_classes(results: Facts) -> dict[int, str]:
    """Return class names by id as a results.json tells; one of an older version
    tells those that it has metrics of.
    """
    if "classes" in results:
        return dict(enumerate(results["classes"]))
    metrics = metrics_by_step(results.get("steps", ()))
    if not metrics:
        return {}
    last = max(metrics)
    return dict(zip(steps_from_lists(results["protocol"])[last].seen, metrics[last]["classes"], strict=True))


def check_model(
    path: Path, state: Facts, architecture: Mapping[str, Any], step: Step, class_names: Sequence[str]
) -> None:
    """Raise CheckpointError unless a step checkpoint has the run's network and the classes,
    by id and name, of the step.
    """
    theirs = state["network"]["arguments"]
    if architecture != theirs or tuple(state["class_ids"]) != step.seen:
        raise CheckpointError(
            f"{path}: was trained as {theirs} on the classes {state['class_ids']}, this run wants "
            f"{architecture} on {list(step.seen)}"
        )
    check_class_names(path, state, class_names)


def check_class_names(path: Path, state: Facts, class_names: Sequence[str]) -> None:
    known = dict(zip(state["class_ids"], state["classes"], strict=False))
    renamed = class_differences(known, dict(enumerate(class_names)))
    if renamed:
        raise CheckpointError(
            f"{path}: its classes have other names in this data set: {some(renamed)}. A network knows the "
            "classes that it was trained on: restore their names, or train it again under another run.name"
        )


# ------------------------------------------------------------------------------- what a step was trained with


def trained_with(
    config: Facts, step: int, data: Facts, class_names: Sequence[str], weights: Facts | None
) -> dict:
    """Return what a step checkpoint says of its training: `config` is a resolved one,
    `data` the digests of the images.
    """
    facts = {
        "objective": objective_of(config, step),
        "recipe": recipe_of(config, step),
        "data": data.get("train"),
        "content": data.get("train_content"),
        "classes": list(class_names),
    }
    return facts | ({"weights": dict(weights)} if weights else {})


def objective_of(config: Facts, step: int) -> dict[str, dict]:
    """Return what is minimised, under the keys of the config;
    the options are those of every method that keeps statistics.
    """
    method = config["method"]
    others = method["also_observe"] if step == 0 else ()
    given = {**{name: {} for name in others}, method["name"]: method["options"]}
    options = {name: {**_options(name), **changed} for name, changed in given.items()}
    objective = {key: method[key] for key in ("name", "cross_entropy", "entropy")} | {"options": options}
    if step > 0:
        objective["strength"] = method["strength"]
    return {"method": objective, "data": {"void": config["data"]["void"]}}


def _options(name: str) -> dict[str, Any]:
    return METHODS[name].Options().model_dump() if name in METHODS else {}


def recipe_of(config: Facts, step: int) -> dict[str, dict]:
    """Return how it is minimised: the keys of the config that count in the step."""
    unused = LATER_KEYS if step == 0 else FIRST_KEYS
    recipe = {
        section: {
            key: config[section][key]
            for key in keys
            if f"{section}.{key}" not in unused and not f"{section}.{key}".startswith(NO_RECIPE)
        }
        for section, keys in with_defaults({}).items()
    }
    if recipe["data"]["mode"] != "partitioned":
        del recipe["data"]["split_seed"]  # it has no say
    for section, idle in (("phase", "descent"), ("update", "plain")):
        if recipe[section]["name"] == idle or step < recipe[section]["from_step"]:
            recipe[section] = {"name": idle}
    average = recipe["average"]
    if average["name"] == "none" or step < average["options"].get("from_step", 1):
        del recipe["average"]  # as in checkpoints from before it existed
    return recipe


def start_notes(path: Path, state: Facts, ours: Facts) -> list[str]:
    """Return what a run should know of the step that it starts from;
    `ours` is what it would have trained the step with.

    Raises CheckpointError if the objectives cannot follow on each other.
    """
    told, step = _told(state), state["step"]
    if not {"objective", "recipe"} <= told.keys():
        return [f"{path} does not tell with which objective, recipe and data it was trained"]
    method = ours["objective"]["method"]["name"]
    theirs = told["objective"]["method"]["name"]
    if theirs in METHODS and kind_of_step_0(theirs) != kind_of_step_0(method):
        raise CheckpointError(
            f"{path}: was trained with the objective of {theirs!r}, which is another one than that of "
            f"{method!r} from step 0 on: start from a step of a run with method.name={method}, or leave "
            "train.start_from out"
        )
    before, now = _comparable(told, method, step), _comparable(ours, method, step)
    if step == 0 and "options" not in before["method"]:  # trained for all that share it: none of them counted
        now["method"].pop("options", None)
    differences = config_differences(before, now)
    if any(told.get(key) not in (None, ours[key]) for key in ("data", "content")):
        differences.append("the training images")
    if "weights" in told and "weights" in ours and told["weights"]["sha256"] != ours["weights"]["sha256"]:
        differences.append(f"model.pretrained: {told['weights']['file']!r} -> {ours['weights']['file']!r}")
    if differences:
        return [
            f"{path} was trained otherwise than this run would train step {step}: {'; '.join(differences)}"
        ]
    return []


def _told(state: Facts) -> Facts:
    """Return what a checkpoint says of its training, keys that are newer at their defaults.

    An older one has the text of its config.
    """
    try:
        step, told = state["step"], state.get("trained", {})
        if "recipe" in told:
            return {**told, "recipe": recipe_of(with_defaults(told["recipe"]), step)}
        if "trained" in state:
            return dict(told)
        config = with_defaults(yaml_core.parse(state["config"]))
        return {"objective": objective_of(config, step), "recipe": recipe_of(config, step)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def kind_of_step_0(method: str) -> str:
    """Methods of one kind train step 0 alike."""
    return "shared" if METHODS[method].shares_first_step else method


def _comparable(trained: Facts, method: str, step: int) -> dict[str, dict]:
    """Return objective and recipe under the keys of the config.

    What several methods share in step 0 has no name.
    """
    objective = dict(trained["objective"]["method"])
    options = objective.pop("options")
    if method in options:
        objective["options"] = options[method]
    if step == 0:
        objective.pop("name")
    recipe = trained["recipe"]
    return {**recipe, "method": objective, "data": {**recipe["data"], **trained["objective"]["data"]}}
