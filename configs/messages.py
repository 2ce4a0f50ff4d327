"""Problems in plain language."""

import difflib
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

NICKNAMES = {"15-5s": "15-1"}  # another name of the protocol, for which difflib would point to 15-5

_WANTED = {
    "float_type": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
}


def explain(detail: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors in our words."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        return not_one_of(value, [text or number for text, number in names])
    if kind == "value_error":
        return f"{show(value)} {context['error']}"
    if kind == "missing":
        return f"{show(value)} has too few values"
    if kind == "too_long":
        return f"{show(value)} has more than {context['max_length']} values"
    if kind == "string_too_short":
        return "the text is empty"
    if kind not in _WANTED:
        return f"{show(value)} {detail['msg'].replace('Input should', 'should')}"
    advice = ""
    if kind == "string_type" and isinstance(value, int | float):
        advice = "; in YAML text that looks like a number or truth value needs quotes"
    elif isinstance(value, str) and kind in ("float_type", "int_type", "bool_type"):
        advice = " but text"
    return f"{show(value)} is not {_WANTED[kind]}{advice}"


def not_one_of(value: Any, names: Sequence[str]) -> str:
    guess = did_you_mean(value, names) if isinstance(value, str) else ""
    return f"{show(value)} is not one of {', '.join(names)}{guess}"


def did_you_mean(text: str, names: Sequence[str]) -> str:
    """ " (did you mean x?)", or nothing if no name is close."""
    if NICKNAMES.get(text) in names:
        close = [NICKNAMES[text]]
    elif len(text) < 200:  # difflib takes quadratic time, and more than this is no slip of the keyboard
        close = difflib.get_close_matches(text, names, n=1)
    else:
        close = []
    return f" (did you mean {close[0]}?)" if close else ""


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxlist = _repr.maxdict = 8


def show(value: Any) -> str:
    """Return a value on one line, scalars as in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _repr.repr(value)
