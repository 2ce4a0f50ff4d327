"""The figures of the paper (Huang et al. 2021, arXiv 2107.05804) as data, and which of its rows a run belongs to.

mIoU in percent on the VOC 2012 validation set, 15-1 disjoint, ResNet-101. "1-15", "16-20" and "all" are means over
foreground classes.

    row_of(results["config"])    "MiB", "AlterSGD", ... or None for a variant that is no row of table 1
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

# ------------------------------------------------------------------------------------------------------- what is printed

SETTING: dict[str, dict[str, Any]] = {
    "data": {"dataset": "voc", "protocol": "15-1", "mode": "disjoint"},
    "model": {"body": "resnet101"},
    "optim": {"lr": 0.01, "lr_later": 0.001},
    "train": {"epochs": 30, "epochs_later": 30},
}
SETTING_IN_WORDS = "VOC, ResNet-101"

# fmt: off
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog", "horse",
    "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
GROUPS = ("1-15", "16-20", "all")
NUM_OLD = 15

# Tables 1 and 2: IoU of each class, in the order of CLASSES.
PER_CLASS = {
    "FT":       (0.3, 0.0, 0.0, 2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.8),
    "PI":       (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 8.6),
    "EWC":      (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.3, 7.0, 7.4),
    "RW":       (0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.1, 10.5, 8.2),
    "LwF":      (0.0, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.9, 8.2, 7.9),
    "LwF-MC":   (0.0, 6.3, 0.8, 0.0, 1.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.9, 11.9, 11.0),
    "ILT":      (3.7, 0.0, 2.9, 0.0, 12.8, 0.0, 0.0, 0.1, 0.0, 0.0, 21.2, 0.1, 0.4, 0.6, 13.6, 0.0, 0.0, 11.6, 8.3, 8.5),
    "MiB":      (53.8, 38.7, 35.5, 25.9, 45.3, 14.2, 71.5, 71.5, 0.3, 22.6, 12.6, 62.6, 52.3, 48.8, 79.8,
                 10.9, 13.3, 10.7, 18.1, 10.1),
    "AlterSGD": (64.6, 39.4, 44.5, 39.1, 56.4, 57.4, 78.5, 74.5, 2.4, 51.7, 14.2, 66.2, 60.2, 62.5, 78.6,
                 8.4, 13.6, 8.8, 22.9, 10.7),
    "Joint":    (90.2, 42.2, 89.5, 69.1, 82.3, 92.5, 90.0, 94.2, 39.2, 87.6, 56.4, 91.2, 86.8, 88.0, 86.8,
                 62.3, 88.4, 49.5, 85.0, 78.0),
}
# Tables 1 and 2: the printed means of GROUPS.
MEANS = {
    "FT": (0.2, 1.8, 0.6), "PI": (0.0, 1.8, 0.4), "EWC": (0.3, 4.3, 1.3), "RW": (0.2, 5.4, 1.5), "LwF": (0.8, 3.6, 1.5),
    "LwF-MC": (4.5, 7.0, 5.2), "ILT": (3.7, 5.7, 4.2), "MiB": (42.4, 12.6, 34.9), "AlterSGD": (52.7, 12.9, 42.7),
    "Joint": (79.1, 72.6, 77.4),
}
CONTRADICTORY = ("LwF", "LwF-MC")  # their printed means do not follow from their printed classes

# Table 3: lambda -> the means of GROUPS.
TABLE_3: dict[float, dict[str, tuple[float, ...]]] = {
    1:    {"MiB": (30.9, 11.4, 26.1), "AlterSGD": (36.1, 11.8, 30.0)},
    10:   {"MiB": (36.3, 13.9, 30.7), "AlterSGD": (48.9, 13.7, 40.1)},
    100:  {"MiB": (42.4, 12.6, 34.9), "AlterSGD": (52.7, 12.9, 42.7)},
    1000: {"MiB": (16.8, 5.6, 13.9), "AlterSGD": (19.5, 5.6, 16.0)},
}
LAMBDAS = tuple(TABLE_3)

# Table 4: group -> lambda_b (of ascents) -> one figure for each lambda_a (of descents) in LAMBDAS.
TABLE_4: dict[str, dict[float, tuple[float, ...]]] = {
    "1-15": {
        1: (36.1, 45.2, 55.1, 18.4), 10: (46.7, 48.9, 55.0, 17.7),
        100: (46.2, 53.2, 52.7, 17.2), 1000: (42.3, 51.1, 49.0, 19.5),
    },
    "16-20": {
        1: (11.8, 14.4, 9.5, 3.9), 10: (11.9, 13.7, 9.7, 4.2),
        100: (9.6, 14.8, 12.9, 4.9), 1000: (2.3, 8.5, 13.7, 5.6),
    },
    "all": {
        1: (30.0, 37.5, 43.7, 14.8), 10: (38.0, 40.1, 43.7, 14.4),
        100: (37.1, 43.6, 42.7, 14.1), 1000: (32.3, 40.5, 40.2, 16.0),
    },
}

# The figure over p, as far as the text gives its points: p -> the means of GROUPS. At p = 1 nothing alternates: MiB.
ALMOST_ZERO = "≈ 0"
FIGURE_P: dict[Fraction, tuple[float | str | None, ...]] = {
    Fraction(5, 30): (ALMOST_ZERO, ALMOST_ZERO, ALMOST_ZERO),
    Fraction(10, 30): (ALMOST_ZERO, ALMOST_ZERO, ALMOST_ZERO),
    Fraction(15, 30): (14.1, ALMOST_ZERO, None),
    Fraction(20, 30): (None, None, None),
    Fraction(25, 30): MEANS["AlterSGD"],
    Fraction(30, 30): MEANS["MiB"],
}
DEFAULT_P = Fraction(25, 30)
# fmt: on

# How the paper may be read and what it leaves open, as keys of `phase` in the config; the first choice is the default.
READING = {"flip": ("seg", "all"), "every": ("iteration", "epoch")}
OPEN: dict[str, tuple[Any, ...]] = {
    "momentum": ("keep", "reset", "off"),
    "batch": ("next", "same"),
    "weight_decay": ("always", "signed"),
    "lr": ("decay", "hold"),
    "from_step": (1, 0),
}
CHOICES = READING | OPEN
RADIUS = 0.01  # the default of update.radius, which names leave out

# Row -> method.name and published lambda; the Joint row is fine-tuning on all classes at once.
METHODS = {
    "FT": ("ft", 0.0),
    "PI": ("pi", 500.0),
    "EWC": ("ewc", 500.0),
    "RW": ("rw", 100.0),
    "LwF": ("lwf", 100.0),
    "LwF-MC": ("lwf_mc", 10.0),
    "ILT": ("ilt", 100.0),
    "MiB": ("mib", 10.0),
}
MIB_STRENGTH_15_1 = 100.0
OTHERS = {"PLOP": ("plop", 0.01)}  # not in the paper
PHASES = {"altersgd": "AlterSGD", "consolidate": "Consolidate", "pause": "Pause", "stop": "Stop"}


# --------------------------------------------------------------------------------------------- which row a run belongs to


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
    beside: tuple[str, ...] = ()  # what else looks for flat minima: "SAM 0.05"


def setting_of(config: Mapping[str, Any]) -> Setting:
    return replace(_setting_of(config), beside=_beside(config))


def _beside(config: Mapping[str, Any]) -> tuple[str, ...]:
    update, optim, names = config["update"], config["optim"], []
    if update["name"] == "sam":
        names.append(f"SAM {update['rho']:g}")
    if update["name"] == "gradient_penalty":
        radius = f", radius {update['radius']:g}" if update["radius"] != RADIUS else ""
        names.append(f"gradient penalty {update['penalty']:g}{radius}")
    if update["name"] != "plain" and update["from_step"] != 1:
        names[-1] += f" from step {update['from_step']}"
    if config["method"]["entropy"]:
        names.append(f"CPR {config['method']['entropy']:g}")
    if is_stable_sgd(config):
        pieces = f"dropout {config['model']['dropout']:g}, rate x {optim['lr_decay']:g}, batch {config['train']['batch_size']}"
        names.append(f"Stable SGD ({pieces})")
    return tuple(names)


def plain_name(config: Mapping[str, Any]) -> str:
    """Method, phase and neighbours without their numbers, as the overlays are called: "mib + sam"."""
    method, phase, update = (config[section]["name"] for section in ("method", "phase", "update"))
    parts = {
        method: True,
        phase: phase != "descent",
        update: update != "plain",
        "cpr": config["method"]["entropy"] > 0,
        "stable_sgd": is_stable_sgd(config),
    }
    return " + ".join(name for name, is_on in parts.items() if is_on)


def is_stable_sgd(config: Mapping[str, Any]) -> bool:
    """Its small batch alone is another recipe, not Stable SGD."""
    return config["model"]["dropout"] > 0 or config["optim"]["lr_decay"] < 1


def _setting_of(config: Mapping[str, Any]) -> Setting:
    method, phase = config["method"], config["phase"]
    name, strength = method["name"], float(method["strength"] or 0.0)
    changes: tuple[tuple[str, Any], ...] = tuple(
        (option, str(value)) for option, value in sorted(method["options"].items())
    )
    if _is_offline(config):
        if name == "ft" and phase["name"] == "descent":
            return Setting("joint", changes=changes)
        changes += (("protocol", "offline"),)
    lambda_a, lambda_b = (
        0.0 if name == "ft" else strength if value is None else float(value)
        for value in (phase["lambda_a"], phase["lambda_b"])
    )
    if phase["name"] == "descent":
        return Setting(name, strength if name != "ft" else 0.0, changes=changes)
    if phase["from_step"] > 1 and lambda_a != strength:  # the steps before the phase have another lambda
        changes += (("strength", strength),)
    p = Fraction(phase["p"]).limit_denominator(1_000_000)
    if p == 1:
        return Setting(name, lambda_a, changes=changes)
    if phase["name"] in ("pause", "stop"):
        lambda_b = lambda_a
    if phase["every"] == 1:
        phase = {**phase, "every": "iteration"}
    effective = _effective_choices(phase, lambda_a == lambda_b)
    changes += tuple((key, phase[key]) for key in effective if phase[key] != CHOICES[key][0])
    return Setting(name, lambda_a, phase["name"], p, lambda_b, changes)


def _effective_choices(phase: Mapping[str, Any], same_lambda: bool) -> list[str]:
    """The keys of CHOICES that make a difference under this phase."""
    if phase["name"] in ("pause", "stop"):  # nothing is updated there
        return ["from_step"]
    alike = same_lambda and (phase["batch"], phase["weight_decay"]) == ("next", "always")
    if phase["name"] == "consolidate" and alike:  # its halves differ in nothing
        return [key for key in CHOICES if key != "every"]
    return list(CHOICES)


def rows(protocol: str | None) -> dict[str, Setting]:
    """The rows of table 1 from top to bottom; MiB's lambda depends on the protocol."""
    settings = {row: Setting(name, strength) for row, (name, strength) in METHODS.items()}
    settings["MiB"] = Setting("mib", mib_strength(protocol))
    settings["AlterSGD"] = alternating(settings["MiB"])
    return settings | {"Joint": Setting("joint")}


def row_of(config: Mapping[str, Any]) -> str | None:
    """The row of table 1 that a run with this (resolved) config belongs to; None for a variant."""
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
    """The setting `base`, which descends only, with a phase at the end of each step."""
    if p == 1:
        return base
    lambda_b = base.lambda_a if lambda_b is None else lambda_b
    return Setting(base.method, base.lambda_a, phase, p, lambda_b, tuple(changes.items()))


def label(setting: Setting, protocol: str | None) -> str:
    """How a setting is called in tables: "MiB", "AlterSGD, momentum reset", "LwF + AlterSGD"."""
    settings = rows(protocol)
    if setting.beside:
        return " + ".join([label(replace(setting, beside=()), protocol), *setting.beside])
    row = next((row for row, s in settings.items() if s == setting), None)
    if row is not None:
        return row
    names = {name: row for row, (name, _) in (METHODS | OTHERS).items()} | {"joint": "Joint"}
    name = names.get(setting.method, setting.method)
    published = settings[name].lambda_a if name in settings else OTHERS.get(name, (name, None))[1]
    if setting.phase != "descent":
        phase = PHASES.get(setting.phase, setting.phase)
        name = phase if setting.method == "mib" else f"{name} + {phase}"
    parts = [name]
    if setting.lambda_b != setting.lambda_a and setting.phase != "descent":
        parts.append(f"λ_a {setting.lambda_a:g}, λ_b {setting.lambda_b:g}")
    elif setting.lambda_a != published:
        parts.append(f"λ {setting.lambda_a:g}")
    if setting.phase != "descent" and setting.p != DEFAULT_P:
        parts.append(f"p {show_p(setting.p)}")
    return ", ".join([*parts, *(f"{key} {value}" for key, value in setting.changes)])


def show_p(p: Fraction) -> str:
    """In thirtieths where that is exact, as the paper writes it."""
    return f"{p * 30}/30" if (p * 30).denominator == 1 else f"{float(p):g}"


def is_papers(config: Mapping[str, Any]) -> bool:
    """Does the config agree with all that the paper says of its experiments?"""
    return all(
        config[section][key] == value for section, keys in SETTING.items() for key, value in keys.items()
    )


def is_of_its_data(config: Mapping[str, Any]) -> bool:
    """Whether the paper's figures may stand beside those of a run: VOC 15-1 disjoint, or all its classes at once.

    By the config: the embedded data are in VOC's place, classes and protocol included, and the title above the paper's
    figures says on what they were made. Other protocols and data sets of a user's own share no class group with them.
    """
    data = config["data"]
    setting = data["dataset"], data["protocol"], data["mode"]
    papers = tuple(SETTING["data"].values())
    return setting == papers or (data["dataset"] == papers[0] and _is_offline(config))


def _is_offline(config: Mapping[str, Any]) -> bool:
    steps = config["data"]["steps"]
    return config["data"]["protocol"] == "offline" if steps is None else len(steps) == 1
