"""What a value of the config may be: the types of its keys, with what is said of a value that is none."""

import math
import os
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from configs.registry import Probability, Size


def _fraction(value: Any) -> Any:
    """25/30 is text in YAML: read it as a number."""
    match = re.fullmatch(r"([0-9]{1,18}) ?/ ?([0-9]{1,18})", value) if isinstance(value, str) else None
    if match is None:
        return value
    part, whole = int(match[1]), int(match[2])
    if part > whole or whole == 0:
        raise ValueError("is not between 0 and 1")
    return part / whole


def _class(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError("is neither the name nor the id of a class")
    if isinstance(value, int) and not 1 <= value <= 254:
        raise ValueError("is no class id: they go from 1 to 254 (0 is background, 255 is void)")
    return value


def _mask_label(value: Any) -> Any:
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255
    if value is not None and not is_id and not (isinstance(value, str) and value):
        raise ValueError("is no class name, class id, background, void or null")
    return value


def _mask_labels(labels: tuple) -> tuple:
    if len(_not_empty(labels)) > 256:
        raise ValueError("has more entries than masks have values, 256")
    return labels


def _half(value: Any) -> Any:
    if value in ("iteration", "epoch") or (isinstance(value, int) and value is not True and value >= 1):
        return value
    raise ValueError("is not one of iteration, epoch or a number of iterations from 1 on")


def _not_empty(values: tuple) -> tuple:
    if not values:
        raise ValueError("is empty")
    return values


def _no_repeats(steps: tuple[tuple[int | str, ...], ...]) -> tuple[tuple[int | str, ...], ...]:
    classes = [name for step in steps for name in step]
    repeated = sorted({str(name) for name in classes if classes.count(name) > 1})
    if repeated:
        raise ValueError(f"learns a class twice: {', '.join(repeated)}")
    return steps


def _order(value: Any) -> Any:
    is_seed = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_seed and not isinstance(value, list | tuple):
        raise ValueError("is neither a seed (a whole number from 0 on) nor a list of classes")
    return value if is_seed else _no_repeats((tuple(map(_class, value)),))[0]


def _no_name_twice(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names one twice")
    return names


def _simple_values(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, list | dict) or (isinstance(item, float) and not math.isfinite(item)):
                wanted = "finite number, text, true, false, null or list of these"
                raise ValueError(f"has an option {name!r} that is no {wanted}")
    return options


def _at_home(path: str) -> str:
    """~ written out: a shell leaves it alone behind `key.sub=`."""
    place = os.path.expanduser(path)
    if place.startswith("~"):
        raise ValueError("is in the home of nobody known here; a folder of this name is written ./~...")
    return place


def _names(value: Any) -> Any:
    """A single name stands for the list of it."""
    return [value] if isinstance(value, str) else value


def _folder_name(value: str) -> str:
    if value in {".", ".."} or set(value) & set("/\\\0"):
        raise ValueError("cannot be the name of a folder")
    return value


Text = Annotated[str, Field(min_length=1)]
Place = Annotated[Text, AfterValidator(_at_home)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
# YAML has lists, a frozen config tuples: hence not strict, which goes for the tuple and not its items.
ClassName = Annotated[int | str, BeforeValidator(_class)]
StepClasses = Annotated[tuple[ClassName, ...], Strict(False), AfterValidator(_not_empty)]
OwnSteps = Annotated[
    tuple[StepClasses, ...], Strict(False), AfterValidator(_not_empty), AfterValidator(_no_repeats)
]
ClassOrder = Annotated[int | tuple[int | str, ...], BeforeValidator(_order)]
MaskLabel = Annotated[int | str | None, BeforeValidator(_mask_label)]
MaskLabels = Annotated[tuple[MaskLabel, ...], Strict(False), AfterValidator(_mask_labels)]
ScaleRange = Annotated[tuple[Positive, Positive], Strict(False)]
Scales = Annotated[tuple[Positive, ...], Strict(False), AfterValidator(_not_empty)]
Options = Annotated[dict[str, Any], AfterValidator(_simple_values)]
Names = Annotated[tuple[Text, ...], Strict(False), BeforeValidator(_names), AfterValidator(_no_name_twice)]
Dilations = Annotated[tuple[Size, Size, Size], Strict(False)]
Share = Annotated[Probability, BeforeValidator(_fraction)]
Half = Annotated[int | str, BeforeValidator(_half)]
FolderName = Annotated[Text, AfterValidator(_folder_name)]
