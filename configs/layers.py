"""Overlays and overrides merged over the defaults, remembering who set what."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from configs import yaml_core
from configs.messages import did_you_mean, show

FOLDER = Path(__file__).parent
OPTIONS = (
    "method.options",
    "phase.options",
    "update.options",
    "average.options",
)  # the mappings whose keys the chosen thing declares


class Layers:
    """The merged tree, for each dotted key the layer (0 = the defaults) that set it last,
    and all problems so far.
    """

    def __init__(self) -> None:
        self.tree = {section: dict(names) for section, names in _defaults().items()}
        self.keys = [f"{section}.{name}" for section, names in self.tree.items() for name in names]
        self.sources = ["default"]
        self.layer_of = dict.fromkeys(self.keys, 0)
        self.problems: list[str] = []
        self.incomplete = False  # an overlay could not be read, so that later complaints might mislead

    def value(self, key: str) -> Any:
        section, name = key.split(".")
        return self.tree[section][name]

    def problem(self, text: str, key: str, *others: str, place: str = "") -> None:
        """Report what is wrong with a key, and where its value and those of the `others` came from."""
        layers = sorted({self.layer_of[name] for name in (key, *others)} - {0})
        sources = ", ".join(self.sources[layer] for layer in layers) or self.sources[0]
        self.problems.append(f"{key}{place}: {text} [{sources}]")

    def add_overlay(self, path: str | Path) -> None:
        self.sources.append(str(path))
        problem = None
        try:
            layer = yaml_core.parse(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            advice = did_you_mean(str(path), _shipped_overlays())
            if not advice and not str(path).endswith((".yaml", ".yml")):  # epochs 1
                advice = " (an override is written key.sub=value)"
            problem = f"no such file{advice}"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        except ValueError as error:  # also text that is not UTF-8
            problem = f"not a valid YAML file ({error})"
        else:
            if isinstance(layer, dict):
                self._merge(layer)
            else:
                what = "is empty" if layer is None else f"holds {show(layer)}"
                problem = f"{what}, but an overlay is a mapping such as 'train: {{seed: 1}}'"
        if problem:
            self.problems.append(f"{path}: {problem}")
            self.incomplete = True

    def add_overrides(self, overrides: Sequence[str]) -> None:
        self.sources.append("command line")
        for override in overrides:
            key, equals, text = (part.strip() for part in override.partition("="))
            if not equals or not key:
                self._report(f"{show(override)}: an override is written key.sub=value")
            elif (
                key not in self.keys
                and key not in self.tree
                and not key.startswith(tuple(f"{options}." for options in OPTIONS))
            ):
                self._unknown(key)
            else:
                try:
                    layer = yaml_core.parse(text)
                except ValueError as error:
                    self._report(f"{key}: {show(text)} is not valid YAML ({error}); quotes may help")
                    continue
                for name in reversed(key.split(".", maxsplit=2)):
                    layer = {name: layer}
                self._merge(layer)

    def _merge(self, layer: dict[str, Any]) -> None:
        for section, names in layer.items():
            if section not in self.tree:
                self._unknown(section)
            elif not isinstance(names, dict):
                self._report(f"{section}: {show(names)} is not a group of keys")
            else:
                for name, value in names.items():
                    self._set(section, name, value)

    def _set(self, section: str, name: str, value: Any) -> None:
        key = f"{section}.{name}"
        if key not in self.layer_of:
            self._unknown(key)
            return
        if key in OPTIONS and isinstance(value, dict) and isinstance(self.value(key), dict):
            value = self.value(key) | value
        self.tree[section][name] = value
        self.layer_of[key] = len(self.sources) - 1

    def _unknown(self, key: str) -> None:
        if key in self.keys:  # "optim.lr: 0.1" in a file
            section, name = key.split(".")
            self._report(
                f"{key}: dotted keys are for the command line, write '{section}: {{{name}: ...}}' in a file"
            )
            return
        namesakes = [known for known in self.keys if known.split(".")[1] == key.rpartition(".")[2]]
        guess = did_you_mean(key, namesakes or [*self.tree, *self.keys])
        if namesakes and not guess:  # train.lr is like neither phase.lr nor optim.lr
            guess = f" (did you mean {' or '.join(namesakes)}?)"
        self._report(f"{key}: unknown key{guess}")

    def _report(self, problem: str) -> None:
        self.problems.append(f"{problem} [{self.sources[-1]}]")


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    return yaml_core.parse((FOLDER / "base.yaml").read_text(encoding="utf-8"))


def _shipped_overlays() -> list[str]:
    return [f"{FOLDER.name}/{path.relative_to(FOLDER).as_posix()}" for path in sorted(FOLDER.rglob("*.yaml"))]
