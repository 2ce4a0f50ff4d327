"""What a run is: what distinguishes it from others, how tables call it,
and which row of the paper it belongs to.

    setting_of(config)    configs that train alike have equal settings
    label(setting, ...)   "MiB", "AlterSGD, momentum reset", "LwF + AlterSGD"
    family(setting)       the same without options: "MiB", "AlterSGD", "LwF + AlterSGD"
    row_of(config)        "MiB", "AlterSGD", ... or None for a variant that is no row of table 1

Short names, for folders and the terminal, are in configs/identity.py; what a run's numbers depend on by
content is in engine/identity.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

from configs.identity import is_offline, is_stable_sgd
from configs.registry import Registry
from configs.schema import EVALUATION_KEYS, FREE_KEYS, config_differences, with_defaults
from engine.identity import class_differences
from methods import AVERAGES, UPDATES, published_strength
from methods import METHODS as REGISTERED
from study.paper import CHOICES, DEFAULT_P, METHODS, MIB_STRENGTH_15_1, SETTING
from study.rungs import departures, own_keys

RADIUS = 0.01  # the default of update.radius, which names leave out
# Not in the paper.
OTHERS = {
    "PLOP": ("plop", 0.01),
    "MiB-AugM": ("mib_augm", 10.0),
    "DFT*": ("dft", 0.0),
    "DKD": ("dkd", 5.0),
    "SSUL": ("ssul", 0.0),
    "STAR": ("star", 5.0),
}
NAMES = {method: row for row, (method, _) in (METHODS | OTHERS).items()} | {"joint": "Joint"}
PHASES = {"altersgd": "AlterSGD", "consolidate": "Consolidate", "pause": "Pause", "stop": "Stop"}
RULES = {"asam": "ASAM", "f_sam": "F-SAM", "c_flat": "C-Flat"}  # update rules with the option rho
OPTIONS = re.compile(r",| \(| \d")  # where they begin in an entry of Setting.beside
AVERAGED = {"ewf": "EWF", "ema": "EMA", "swa": "SWA"}
SPEED_KEYS = ("train.channels_last", "train.losses")
AXES = (
    *("method.name", "method.strength", "method.options", "phase.", "train.seed"),
    *("method.entropy", "method.memory", "update.", "average.", "model.dropout", "optim.lr_decay"),
)
# Learning all classes at once is a protocol of its own and has no later steps.
AXES_OF_JOINT = (
    "data.protocol",
    "data.steps",
    "data.order",
    "data.mode",
    "data.split_seed",
    "data.unseen",
    "optim.lr_later",
    "train.epochs_later",
)


@dataclass(frozen=True)
class Setting:
    """What a run does, as far as it has an effect: configs that train alike have equal settings."""

    method: str  # "joint": all classes at once
    lambda_a: float = 0.0
    phase: str = "descent"
    p: Fraction = Fraction(1)
    lambda_b: float = 0.0
    changes: tuple[
        tuple[str, Any], ...
    ] = ()  # of CHOICES and of the method's own options, where not the default
    beside: tuple[str, ...] = ()  # what else forms the weights: "SAM 0.05", "EWF"


def setting_of(config: Mapping[str, Any]) -> Setting:
    return replace(_setting_of(config), beside=_beside(config))


def _beside(config: Mapping[str, Any]) -> tuple[str, ...]:
    update, optim, names = config["update"], config["optim"], []
    if update["name"] != "plain":
        names.append(_rule(update))
        if update["from_step"] != 1:
            names[-1] += f" from step {update['from_step']}"
    if config["method"]["entropy"]:
        names.append(f"CPR {config['method']['entropy']:g}")
    if config["method"]["memory"]:
        names.append(f"memory {config['method']['memory']}")
    average = config["average"]
    if average["name"] != "none":
        called = AVERAGED.get(average["name"], average["name"])
        names.append(_with_options(called, _changed_options(AVERAGES, average)))
    if is_stable_sgd(config):
        dropout, batch = config["model"]["dropout"], config["train"]["batch_size"]
        names.append(
            f"Stable SGD (dropout {dropout:g}, learning rate x {optim['lr_decay']:g}, batch {batch})"
        )
    return tuple(names)


def _rule(update: Mapping[str, Any]) -> str:
    """Return how an update rule is called, with the number that all its runs show: "SAM 0.05"."""
    name, changed = update["name"], _changed_options(UPDATES, update)
    if name == "sam":
        called = f"SAM {update['rho']:g}"
    elif name == "gradient_penalty":
        radius = f", radius {update['radius']:g}" if update["radius"] != RADIUS else ""
        called = f"gradient penalty {update['penalty']:g}{radius}"
    elif name in RULES:
        rho = changed.pop("rho", UPDATES[name].Options().model_dump()["rho"])
        called = f"{RULES[name]} {rho:g}"
    else:  # a rule of one's own is made with the keys that it names
        usual = with_defaults({})["update"]
        keys = UPDATES[name].keys if name in UPDATES else ("rho", "penalty", "radius")
        called = _with_options(name, {key: update[key] for key in keys if update[key] != usual[key]})
    return _with_options(called, changed)


def _changed_options(registry: Registry, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are no default; all that are given for what this version does not know."""
    usual = registry[chosen["name"]].Options().model_dump() if chosen["name"] in registry else {}
    return {key: value for key, value in sorted(chosen["options"].items()) if usual.get(key) != value}


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{key} {value}" for key, value in options.items())])


def _setting_of(config: Mapping[str, Any]) -> Setting:
    method, phase = config["method"], config["phase"]
    name, strength = method["name"], float(method["strength"] or 0.0)
    changes: tuple[tuple[str, Any], ...] = tuple(
        (option, str(value)) for option, value in sorted(method["options"].items())
    )
    changes += departures(config)
    if is_offline(config):
        if name == "ft" and phase["name"] == "descent":
            return Setting("joint", changes=changes)
        changes += (("protocol", "offline"),)
    lambda_a, lambda_b = (
        0.0 if name == "ft" else strength if value is None else float(value)
        for value in (phase["lambda_a"], phase["lambda_b"])
    )
    if phase["name"] == "descent":
        return Setting(name, strength if name != "ft" else 0.0, changes=changes)
    changes += tuple((option, str(value)) for option, value in sorted(phase["options"].items()))
    if phase["from_step"] > 1 and lambda_a != strength:  # the steps before the phase have another lambda
        changes += (("strength", strength),)
    p = Fraction(phase["p"]).limit_denominator(1_000_000)
    if p == 1 and phase["name"] in PHASES:  # what a phase of one's own does with p is its own
        return Setting(name, lambda_a, changes=changes)
    if phase["name"] in ("pause", "stop"):
        lambda_b = lambda_a
    if phase["every"] == 1:
        phase = {**phase, "every": "iteration"}
    effective = _effective_choices(phase, lambda_a == lambda_b)
    changes += tuple((key, phase[key]) for key in effective if phase[key] != CHOICES[key][0])
    return Setting(name, lambda_a, phase["name"], p, lambda_b, changes)


def _effective_choices(phase: Mapping[str, Any], same_lambda: bool) -> list[str]:
    """Return the keys of CHOICES that make a difference under this phase."""
    if phase["name"] in ("pause", "stop"):  # nothing is updated there
        return ["from_step"]
    alike = same_lambda and (phase["batch"], phase["weight_decay"]) == ("next", "always")
    if phase["name"] == "consolidate" and alike:  # its halves differ in nothing
        return [key for key in CHOICES if key != "every"]
    return list(CHOICES)


def rows(protocol: str | None) -> dict[str, Setting]:
    """Return the rows of table 1 from top to bottom; MiB's lambda depends on the protocol."""
    settings = {row: Setting(name, strength) for row, (name, strength) in METHODS.items()}
    settings["MiB"] = Setting("mib", mib_strength(protocol))
    settings["AlterSGD"] = alternating(settings["MiB"])
    return settings | {"Joint": Setting("joint")}


def row_of(config: Mapping[str, Any]) -> str | None:
    """Return the row of table 1 that a run with this (resolved) config belongs to; None for a variant."""
    setting = setting_of(config)
    return next((row for row, s in rows(config["data"]["protocol"]).items() if s == setting), None)


def mib_strength(protocol: str | None) -> float:
    return MIB_STRENGTH_15_1 if protocol == "15-1" else METHODS["MiB"][1]


def alternating(
    base: Setting,
    *,
    phase: str = "altersgd",
    p: Fraction = DEFAULT_P,
    lambda_b: float | None = None,
    **changes: Any,
) -> Setting:
    """Return the setting `base`, which descends only, with a phase at the end of each step."""
    if p == 1:
        return base
    lambda_b = base.lambda_a if lambda_b is None else lambda_b
    return Setting(base.method, base.lambda_a, phase, p, lambda_b, tuple(changes.items()))


def label(setting: Setting, protocol: str | None) -> str:
    """Return how a setting is called in tables: "MiB", "AlterSGD, momentum reset", "LwF + AlterSGD"."""
    settings = rows(protocol)
    if setting.beside:
        return " + ".join([label(replace(setting, beside=()), protocol), *setting.beside])
    row = next((row for row, s in settings.items() if s == setting), None)
    if row is not None:
        return row
    name = _method_name(setting)
    published = settings[name].lambda_a if name in settings else OTHERS.get(name, (name, None))[1]
    if published is None and setting.method in REGISTERED:
        published = published_strength(setting.method, protocol)
    parts = [_with_phase(setting)]
    if setting.lambda_b != setting.lambda_a and setting.phase != "descent":
        parts.append(f"λ_a {setting.lambda_a:g}, λ_b {setting.lambda_b:g}")
    elif setting.lambda_a != published:
        parts.append(f"λ {setting.lambda_a:g}")
    if setting.phase != "descent" and setting.p != DEFAULT_P:
        parts.append(f"p {show_p(setting.p)}")
    return ", ".join([*parts, *(f"{key} {value}" for key, value in setting.changes)])


def family(setting: Setting) -> str:
    """Return how a setting is called without its options, whatever their number: "AlterSGD", "MiB + SAM"."""
    beside = (OPTIONS.split(part)[0] for part in setting.beside)
    return " + ".join([_with_phase(setting), *beside])


def _with_phase(setting: Setting) -> str:
    name = _method_name(setting)
    if setting.phase == "descent":
        return name
    phase = PHASES.get(setting.phase, setting.phase)
    return phase if setting.method == "mib" else f"{name} + {phase}"


def _method_name(setting: Setting) -> str:
    name = NAMES.get(setting.method, setting.method)
    is_taken = name in (*NAMES.values(), *PHASES.values())
    return f"method {name}" if is_own(setting) and is_taken else name  # no two rows share a name


def is_own(setting: Setting) -> bool:
    """Return whether the method or the phase is one that a user added."""
    return setting.method not in NAMES or setting.phase not in ("descent", *PHASES)


def show_p(p: Fraction) -> str:
    """In thirtieths where that is exact, as the paper writes it."""
    return f"{p * 30}/30" if (p * 30).denominator == 1 else f"{float(p):g}"


def is_papers(config: Mapping[str, Any]) -> bool:
    """Return whether the config agrees with all that the paper says of its experiments."""
    return all(
        config[section][key] == value for section, keys in SETTING.items() for key, value in keys.items()
    )


def is_of_its_data(config: Mapping[str, Any]) -> bool:
    """Return whether the paper's numbers may stand beside those of a run: VOC 15-1 disjoint,
    or all its classes at once.

    By the config: the embedded data are in VOC's place, classes and protocol included, and the title above
    the paper's numbers says on what they were made. Other protocols and data sets of a user's own share no
    class group with them.
    """
    data = config["data"]
    setting = data["dataset"], data["protocol"], data["mode"]
    papers = tuple(SETTING["data"].values())
    return (setting == papers and data["order"] is None) or (
        data["dataset"] == papers[0] and is_offline(config)
    )


class Comparable(Protocol):
    """What is compared of a run: its config, its setting, its classes,
    and the images it was trained and scored on.
    """

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def setting(self) -> Setting: ...

    @property
    def results(self) -> Mapping[str, Any]: ...

    @property
    def class_names(self) -> Mapping[int, str]: ...


def recipe_differences(one: Comparable, other: Comparable) -> list[str]:
    """Return what two runs do differently beyond method, phase, lambda and seed: "train.epochs: 30 -> 10"."""
    free: tuple[str, ...] = (*FREE_KEYS, *SPEED_KEYS, *AXES, "method.also_observe")
    free += (*own_keys(one.config), *own_keys(other.config))
    if "joint" in (one.setting.method, other.setting.method):
        free += AXES_OF_JOINT
    if is_stable_sgd(one.config) or is_stable_sgd(other.config):
        free += ("train.batch_size",)
    before, now = (run.results.get("data", {}) for run in (one, other))
    if before.keys() != now.keys():  # one of them is older than digests of the content
        free += ("pictures.train_content", "pictures.test_content")
    old, new = {**one.config, "pictures": before}, {**other.config, "pictures": now}
    if "weights" in one.results and "weights" in other.results:  # the same file may lie elsewhere
        free += ("model.pretrained",)
        old["weights"], new["weights"] = (
            {"sha256": run.results["weights"]["sha256"][:12]} for run in (one, other)
        )
    return config_differences(old, new, free) + class_differences(one.class_names, other.class_names)


# Of differences, by how their keys begin; the first that fits.
KINDS: dict[str, tuple[str, ...]] = {
    "evaluation": EVALUATION_KEYS,
    "data": ("data.", "pictures.", "class "),
    "backbone": ("model.", "weights."),
    "recipe": ("",),
}


def by_kind(differences: Sequence[str]) -> str:
    """Return what `recipe_differences` found, sorted: "backbone (model.body: 'a' -> 'b'), recipe (...)"."""
    found: dict[str, list[str]] = {}
    for difference in differences:
        kind = next(kind for kind, keys in KINDS.items() if difference.startswith(keys))
        found.setdefault(kind, []).append(difference)
    return ", ".join(f"{kind} ({'; '.join(found[kind])})" for kind in KINDS if kind in found)
