"""YAML with the scalars of the YAML 1.2 core schema.

PyYAML speaks YAML 1.1, where `1e-3` is text, `off` is false and `1:30` is ninety. Here `1e-3` is a number,
only `true` and `false` are booleans, and there are neither dates nor base 60. Aliases and tags other than the
core ones are refused, and so are keys that are repeated or not text.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_SCALARS = (  # tag, pattern, possible first characters; the first match wins
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}
    yaml_constructors: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            where = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not supported", where)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _error("expected a mapping", node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _error(f"the key {key!r} is not text", key_node)
            if key in result:
                raise _error(f"the key {key!r} occurs twice", key_node)
            result[key] = self.construct_object(value_node, deep=deep)
        return result


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else,
    so that other tools agree about `off`.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _error(message: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _text(loader: _Loader, node: yaml.Node) -> str:
    text = loader.construct_scalar(node)
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise _error("half of a surrogate pair is no character", node)
    return text


def _integer(loader: _Loader, node: yaml.Node) -> int:
    text = loader.construct_scalar(node)
    number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if abs(number) >= 2**63:
        raise _error("the whole number is too large", node)
    return number


def _float(loader: _Loader, node: yaml.Node) -> float:
    # Python writes .inf and .nan without the dot.
    return float(re.sub(r"\.(?=[a-zA-Z])", "", loader.construct_scalar(node)))


for _tag, _pattern, _first in _SCALARS:
    for _cls in (_Loader, _Dumper):
        _cls.add_implicit_resolver(_TAG + _tag, re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.add_constructor(_TAG + "null", lambda loader, node: None)
_Loader.add_constructor(_TAG + "bool", lambda loader, node: loader.construct_scalar(node).lower() == "true")
_Loader.add_constructor(_TAG + "int", _integer)
_Loader.add_constructor(_TAG + "float", _float)
_Loader.add_constructor(_TAG + "str", _text)
_Loader.add_constructor(_TAG + "seq", lambda loader, node: loader.construct_sequence(node, deep=True))
_Loader.add_constructor(_TAG + "map", lambda loader, node: loader.construct_mapping(node, deep=True))
_Loader.add_constructor(None, yaml.SafeLoader.construct_undefined)
_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence(_TAG + "seq", data, flow_style=True)
)


def parse(text: str) -> Any:
    """Return the value of one YAML document; ValueError says in one line what is wrong and where."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (ValueError, OverflowError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump(value: Any) -> str:
    """YAML text that `parse` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=float("inf"))


def plain(value: Any) -> Any:
    """Tuples as lists, as YAML knows them."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
