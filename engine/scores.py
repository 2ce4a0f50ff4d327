"""Scores belong to the evaluation setting in which they were made: the run's own,
or another that is kept beside it by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.schema import EVALUATION_KEYS, with_defaults
from data.protocols import Step
from engine.results import summarise


def evaluation_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a resolved config that say how a model is scored,
    with their values as JSON knows them.
    """
    data = {f"data.{name}": value for name, value in with_defaults(config)["data"].items()}
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in data.items()
        if key.startswith(EVALUATION_KEYS)
    }


def evaluation_name(results: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Under which name scores by this config are kept: "flip_scales=0.75-1-1.25";
    None in the run's own setting.
    """
    own, asked = evaluation_settings(results["config"]), evaluation_settings(config)
    if asked == own:
        return None
    others = results.get("evaluations", {})
    known = next((name for name, other in others.items() if other["settings"] == asked), None)
    if known is not None:
        return known
    name = "_".join(_words(key, value) for key, value in sorted(asked.items()) if value != own[key])
    # Taken after run.force gave the run another setting of its own: what differs was counted from the old
    # one.
    return (
        name if name not in others else "_".join(_words(key, value) for key, value in sorted(asked.items()))
    )


def _words(key: str, value: Any) -> str:
    """Return a key and its value, short and fit for the name of a folder."""
    name = key.removeprefix("data.").removeprefix("evaluate_")
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, list):
        return f"{name}={'-'.join(str(item).removesuffix('.0') for item in value)}"
    return value if name == "evaluate" else f"{name}={value}"


def scores_of(results: dict[str, Any], name: str | None, config: Mapping[str, Any]) -> list[dict]:
    """Return the list in `results` that holds the scores of this name, to which others may be added."""
    if name is None:
        return results["steps"]
    others = results.setdefault("evaluations", {})
    return others.setdefault(name, {"settings": evaluation_settings(config), "steps": []})["steps"]


def same_metrics(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two scorings of a step agree, by everything that both hold and the rest follows from."""
    return all(one[key] == other[key] for key in ("iou", "confusion") if key in one and key in other)


def put(scores: list[dict], new: dict, steps: Sequence[Step], class_names: Sequence[str]) -> list[dict]:
    """Take up the scores of a step.

    Returns what changed: the step, and later ones that are measured against it.
    """
    before = [score for score in scores if score["step"] < new["step"]]
    after = [score for score in scores if score["step"] > new["step"]]
    changed: list[dict] = []
    for score in (new, *after):
        changed.append(score | summarise(score, [*before, *changed], steps, class_names))
    scores[:] = [*before, *changed]
    return changed


def drop_from(results: dict[str, Any], step: int) -> list[str]:
    """Forget the scores in other settings from a step on, which is going to be trained anew;
    returns their names.
    """
    others = results.get("evaluations", {})
    dropped = [name for name, other in others.items() if any(s["step"] >= step for s in other["steps"])]
    for name in dropped:
        others[name]["steps"] = [score for score in others[name]["steps"] if score["step"] < step]
        if not others[name]["steps"]:
            del others[name]
    return dropped
