"""What a config chooses by name: methods, phases, update rules, averages, backbones, data sets, trackers,
launchers.

@register("mine")                           in a new file of the registry's folder, and nothing else to do
class Mine(AlterSGD):
    class Options(Settings):                its own settings, phase.options.<key>, typed and with defaults
        share: float = 0.5

    @classmethod
    def conflicts(cls, config):             what it cannot work with, by the key to blame
        if config.train.amp == "fp16":
            yield "train.amp", "'fp16' is too coarse for phase.name mine"
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import UserError
from configs.messages import did_you_mean, explain, not_one_of

Size = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]

REGISTERS = re.compile(r"^@register(_\w+)?\(", re.MULTILINE)

Thing = TypeVar("Thing")
Added = TypeVar("Added")
Conflicts = Iterator[tuple[str, str]]  # a key of the config, and what is wrong with its value


class RegistryError(UserError, ValueError):
    """A name that is unknown or taken, or options that do not fit."""


class Settings(BaseModel):
    """What a registered thing can be told beside the keys that it shares with others;
    every field has a default.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


class Registry(MutableMapping[str, Thing]):
    """All things that the config's `key` can name.

    Files of `package` that say @register are imported at the first look.
    """

    def __init__(self, key: str, package: str):
        self.key, self.package = key, package
        self._things: dict[str, Thing] = {}
        self._is_complete = False

    def register(
        self, name: str, conflicts: Callable[[Any], Conflicts] | None = None
    ) -> Callable[[Added], Added]:
        """Decorator: make a class or function selectable by name.

        A function is handed what a class says in `conflicts`.
        """

        def add(thing: Added) -> Added:
            known = self._things.get(name)
            if known is not None and _place(known) != _place(thing):
                raise RegistryError(
                    f"{self.key}: {_place(known)} and {_place(thing)} are both called {name!r}; rename one"
                )
            for option, field in getattr(thing, "Options", Settings).model_fields.items():
                if field.is_required():
                    raise RegistryError(f"{_place(thing)}: the option {option!r} needs a default")
            if conflicts is not None:
                thing.conflicts = conflicts  # type: ignore[attr-defined]  # a function, which has none of its own
            self._things[name] = thing  # type: ignore[assignment]  # the decorated thing keeps its own type
            return thing

        return add

    def discover(self) -> None:
        """Import the files of the folder that register something."""
        self._is_complete = True  # at once: a file may look at the registry itself
        try:
            for folder in importlib.import_module(self.package).__path__:
                for file in sorted(Path(folder).glob("*.py")):
                    if file.stem != "__init__" and REGISTERS.search(file.read_text(encoding="utf-8")):
                        importlib.import_module(f"{self.package}.{file.stem}")
        except BaseException:
            self._is_complete = False
            raise

    def __getitem__(self, name: str) -> Thing:
        return self._found()[name]

    def __setitem__(self, name: str, thing: Thing) -> None:
        """Without a question, as tests replace things; `register` is the way for all else."""
        self._found()[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._found()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found()))

    def __len__(self) -> int:
        return len(self._found())

    def find(self, name: str) -> Thing:
        """Return the thing of that name, or raise a RegistryError with the choices."""
        if name not in self:
            raise RegistryError(f"{self.key}: {self.unknown(name)}")
        return self[name]

    def unknown(self, name: Any) -> str:
        """Return what to say of a name that is none."""
        file = f"{self.package.replace('.', '/')}/{name}.py"
        folders = importlib.import_module(self.package).__path__
        is_there = "/" not in str(name) and any((Path(folder) / f"{name}.py").is_file() for folder in folders)
        hint = f"; {file} exists but registers no such name" if is_there else ""
        return not_one_of(name, list(self)) + hint

    def wrong_options(self, name: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield which of the options do not fit the thing of that name, and why."""
        declared = getattr(self[name], "Options", Settings)
        try:
            declared.model_validate(dict(options))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                option = str(detail["loc"][0])
                if detail["type"] == "extra_forbidden":
                    known, kind = list(declared.model_fields), self.key.split(".")[0]
                    has = f"{kind} {name!r} has no such option (it has: {', '.join(known) or 'none'})"
                    yield option, has + did_you_mean(option, known)
                else:
                    yield option, explain(detail)

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """RegistryError with all that `wrong_options` finds."""
        section = self.key.split(".")[0]
        wrong = [f"{section}.options.{option}: {text}" for option, text in self.wrong_options(name, options)]
        if wrong:
            raise RegistryError("\n".join(wrong))

    def conflicts(self, name: str, config: Any) -> Conflicts:
        """Yield what of the config the thing of that name cannot work with."""
        declared = getattr(self[name], "conflicts", None)
        return iter(()) if declared is None else declared(config)

    def _found(self) -> dict[str, Thing]:
        if not self._is_complete:
            self.discover()
        return self._things


def _place(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
