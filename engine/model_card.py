"""The model card of an export: README.md with the YAML front matter that model hubs read."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from configs import yaml_core
from configs.schema import with_defaults
from engine.identity import recipe_of
from engine.results import metrics_by_step
from tracking.tables import percent
from tracking.text import markdown

DATA_SETS = {"voc": "PASCAL VOC 2012", "ade": "ADE20K"}
UNKNOWN = "not recorded"
ABOUT = """The network after step {step} of class-incremental semantic segmentation. It tells {classes}
classes apart, the background included, which it learned one step after another."""
USE = """## Use

```python
from engine.api import load_segmenter

segmenter = load_segmenter("path/to/this/folder")
masks = segmenter.predict(["image.jpg"])  # class ids at every pixel
print({segmenter.names[c] for c in set(masks[0].flat)})
```

The code is that of the commit below. `train.start_from=<this folder>` trains the next step, and
`python -m scripts.predict <this folder> <images> --out <folder>` writes masks. Images are RGB, normalised as
`config.json` says, which holds the whole config, too. Nothing here is a pickle."""
LICENCE = """## Licence

{}, as far as the weights are concerned; the images and annotations that they were trained on have terms of
their own."""


def config_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that a step was trained with, {} if its checkpoint does not tell."""
    try:
        config = yaml_core.parse(state["config"])
        return with_defaults(config) if config else {}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def model_card(state: Mapping[str, Any], results: Mapping[str, Any] | None, licence: str) -> str:
    """Return the text of README.md; `results` are those of the run, None where nobody has them."""
    config, step = config_of(state), state["step"]
    recorded = metrics_by_step(results["steps"]).get(step) if results else None
    front = front_matter(state, config, recorded, licence)
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {markdown(title(state, config))}",
        ABOUT.format(step=step, classes=len(state["class_ids"])),
        USE,
        "## What it is",
        table(("", ""), facts(state, config, results)),
        "## Classes",
        table(("step", "classes"), classes_by_step(state)),
    ]
    if recorded and results:
        parts += ["## Metrics", *metrics(recorded, results)]
    if config:
        parts += ["## Recipe", table(("key", "value"), recipe(config, step))]
    return "\n\n".join([*parts, LICENCE.format(markdown(licence))]) + "\n"


def title(state: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if not config:
        return f"Continual semantic segmentation, step {state['step']}"
    names = [config["method"]["name"], *(n for n in (config["phase"]["name"],) if n != "descent")]
    return f"{' + '.join(names)} on {data_set(config)} {protocol(config)}, step {state['step']}"


def data_set(config: Mapping[str, Any]) -> str:
    name = config["data"]["dataset"]
    return DATA_SETS.get(name, name)


def protocol(config: Mapping[str, Any]) -> str:
    return f"{config['data']['protocol'] or 'own steps'} ({config['data']['mode']})"


def front_matter(
    state: Mapping[str, Any], config: Mapping[str, Any], recorded: Mapping | None, licence: str
) -> dict:
    """Return what hubs search by."""
    tags = ["semantic-segmentation", "continual-learning", "class-incremental-learning"]
    front: dict[str, Any] = {
        "license": licence,
        "library_name": "pytorch",
        "pipeline_tag": "image-segmentation",
        "tags": tags,
    }
    if config:
        tags += [name for name in (config["method"]["name"], config["phase"]["name"]) if name != "descent"]
        front["datasets"] = [config["data"]["dataset"]]
    if recorded and config:
        known = {group: value for group, value in recorded["miou"].items() if value is not None}
        result = {
            "task": {"type": "image-segmentation", "name": "Class-incremental semantic segmentation"},
            "dataset": {
                "name": data_set(config), "type": config["data"]["dataset"], "config": protocol(config),
                "split": "test",
            },
            "metrics": [
                {"type": "mean_iou", "name": f"mIoU of {group} classes", "value": round(100 * value, 2)}
                for group, value in known.items()
            ],
        }  # fmt: skip
        front |= {
            "metrics": ["mean_iou"],
            "model-index": [{"name": title(state, config), "results": [result]}],
        }
    return front


def facts(
    state: Mapping[str, Any], config: Mapping[str, Any], results: Mapping[str, Any] | None
) -> Iterator[tuple[str, Any]]:
    trained, environment = state.get("trained") or {}, (results or {}).get("environment", {})
    yield "network", ", ".join(f"{key} {value}" for key, value in state["network"]["arguments"].items())
    if config:
        images = f"training images sha256 {trained.get('data') or UNKNOWN}"
        yield "trained on", f"{data_set(config)}, {protocol(config)}; {images}"
        strength = config["method"]["strength"]
        yield (
            "method",
            config["method"]["name"] + (f", strength {strength:g}" if strength is not None else ""),
        )
        for key in ("phase", "update", "average"):
            yield key, config[key]["name"]
        yield "seed", config["train"]["seed"]
    weights = trained.get("weights")
    yield (
        "backbone began as",
        f"weights with sha256 {weights['sha256']}" if weights else "random weights, or it does not tell",
    )
    if "imported" in trained:
        yield "imported from", trained["imported"]
    yield "statistics", ", ".join(state["methods"]) or "none: EWC, PI and RW cannot go on from here"
    yield "iterations of the step", state["costs"].get("iterations", UNKNOWN)
    yield "commit", environment.get("commit") or UNKNOWN
    yield "torch", environment.get("torch") or UNKNOWN


def classes_by_step(state: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the classes that each step added, or all at once if their outputs do not tell."""
    named = [f"{name} ({i})" for i, name in zip(state["class_ids"], state["classes"], strict=True)]
    sizes = state["network"].get("classifiers", ())
    if not all(isinstance(size, int) for size in sizes) or sum(sizes) != len(named):
        yield "all", ", ".join(named)
        return
    for step, size in enumerate(sizes):
        yield step, ", ".join(named[:size])
        named = named[size:]


def metrics(recorded: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    evaluate = results["config"]["data"]["evaluate"]
    yield f"In percent, on test images that show a class learned so far (`data.evaluate={evaluate}`)."
    rows = [
        (f"mIoU of {group} classes", percent(value), percent(recorded["miou_with_background"][group]))
        for group, value in recorded["miou"].items()
    ]
    yield table(("", "without background", "with"), rows)
    yield table(("class", "IoU"), [(name, percent(value)) for name, value in recorded["iou"].items()])


def recipe(config: Mapping[str, Any], step: int) -> Iterator[tuple[str, Any]]:
    for section, keys in recipe_of(config, step).items():
        for key, value in keys.items():
            yield f"{section}.{key}", value


def table(head: Sequence[str], rows: Any) -> str:
    """Return a table of Markdown, in which every cell is text."""
    lines = [head, ["---"] * len(head), *([markdown(str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
