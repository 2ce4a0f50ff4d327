"""A step checkpoint as a folder that travels: weights as safetensors, all else as JSON, nothing to execute.

model.safetensors       the network's weights under their own names
statistics.safetensors  every other tensor of the step, such as what EWC keeps; only if there are any
config.json             the rest of the step (network, classes, how it was trained), how images are normalised
results.json            the metrics of this and earlier steps, where they are known
README.md               the model card

Whatever a step checkpoint holds comes back as it was by `read_export`, which refuses files that were
changed or cut.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from data.files import write_atomically
from data.transforms import MEAN, STD

FORMAT, VERSION = "a step of continual segmentation", 1
CONFIG, CARD, RESULTS = "config.json", "README.md", "results.json"
WEIGHTS, STATISTICS = "model.safetensors", "statistics.safetensors"
MARKS = {"$tensor", "$tuple", "$items", "$float"}  # keys of what JSON has no word for


class ExportError(UserError, ValueError):
    """A folder that is not an export, or not a whole one; or a step that cannot become one."""


def is_export(path: Path) -> bool:
    """Return whether a folder claims to be an export, whole or not."""
    return (path / WEIGHTS).is_file() or (path / CONFIG).is_file()


# ---------------------------------------------------------------------------------------------------- writing


def write_export(
    folder: Path,
    state: Mapping[str, Any],
    card: str,
    *,
    method: str | None = None,
    results: Mapping[str, Any] | None = None,
) -> None:
    """Write a step's state and its model card: all of the folder or nothing."""
    as_bytes = _safetensors().save
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder}: is there already; name a folder that is new, or delete it first")
    beside = folder.with_name(f".{folder.name}.tmp")
    try:
        beside.mkdir(parents=True, exist_ok=True)
        statistics: dict[str, Tensor] = {}
        told = _encoded({key: value for key, value in state.items() if key != "model"}, "", statistics)
        tensors = {WEIGHTS: dict(state["model"])} | ({STATISTICS: statistics} if statistics else {})
        for name, content in tensors.items():
            # Copies: safetensors refuses tensors that share memory, or are views.
            copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in content.items()}
            write_atomically(beside / name, as_bytes(copies))
        config = {
            "format": FORMAT,
            "version": VERSION,
            "method": method,
            "normalisation": {"mean": list(MEAN), "std": list(STD), "of": "RGB from 0 to 1"},
            "files": {name: _digest((beside / name).read_bytes()) for name in tensors},
            "sha256": _digest(_canonical(told)),
            "state": told,
        }
        write_atomically(beside / CONFIG, _readable(config))
        if results is not None:
            write_atomically(beside / RESULTS, _readable(results))
        write_atomically(beside / CARD, card.encode())
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    except OSError as error:
        raise ExportError(
            f"{folder}: could not be written ({error}); make room, or name another place"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _encoded(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; its tensors go to `tensors`, under the keys that lead to them."""
    if isinstance(value, Tensor):
        while place in tensors:  # a key with a slash may lead to the same place
            place += "'"
        tensors[place] = value
        return {"$tensor": place}
    if isinstance(value, Mapping):
        pairs = [[key, _encoded(item, f"{place}/{key}".lstrip("/"), tensors)] for key, item in value.items()]
        is_plain = all(isinstance(key, str) and key not in MARKS for key in value)
        is_word = all(key is None or isinstance(key, str | int | float) for key in value)
        if is_word:
            return dict(pairs) if is_plain else {"$items": pairs}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ExportError(
        f"{place}: a {type(value).__name__} has no place in an export, which is JSON and tensors"
    )


# ---------------------------------------------------------------------------------------------------- reading


def read_export(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the state that `write_export` was given, or raise ExportError."""
    path = folder / CONFIG
    if not is_export(folder):
        raise ExportError(
            f"{folder}: no such checkpoint, but a folder without {CONFIG}; name a step_<i>.pt, or a folder "
            "that scripts.export has written"
        )
    try:
        config = json.loads(path.read_bytes())
        version, files, told, sha256 = (config[key] for key in ("version", "files", "state", "sha256"))
        is_ours = config["format"] == FORMAT and isinstance(told, dict) and isinstance(files, dict)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ExportError(
            f"{path}: not that of an export ({type(error).__name__}: {error}){AGAIN}"
        ) from error
    if not is_ours:
        raise ExportError(f"{path}: not that of an export{AGAIN}")
    if version != VERSION:
        raise ExportError(
            f"{path}: is of version {version!r}, and this code reads {VERSION}: take that of the export"
        )
    if _digest(_canonical(told)) != sha256:
        raise ExportError(f"{path}: was changed since it was written{AGAIN}")
    if WEIGHTS not in files or not files.keys() <= {WEIGHTS, STATISTICS}:
        raise ExportError(f"{path}: names other files than an export has{AGAIN}")
    tensors = {name: _read_tensors(folder / name, files[name], device) for name in files}
    return {**_decoded(told, tensors.get(STATISTICS, {}), path), "model": tensors[WEIGHTS]}


AGAIN = ": copy the folder once more, or export the step again"


def _read_tensors(path: Path, sha256: Any, device: torch.device | str) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ExportError(f"{path}: {error.strerror}, and the export needs it{AGAIN}") from error
    if _digest(content) != sha256:
        raise ExportError(f"{path}: is not what {CONFIG} says, it was cut off or changed{AGAIN}")
    try:
        tensors = _safetensors().load(content)
    except Exception as error:  # of a library in another language
        raise ExportError(f"{path}: not a file of safetensors ({error}){AGAIN}") from error
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _decoded(value: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors, path) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        match value:
            case {"$tensor": name}:
                return tensors[name]
            case {"$items": items}:
                return {key: _decoded(item, tensors, path) for key, item in items}
            case {"$tuple": items}:
                return tuple(_decoded(item, tensors, path) for item in items)
            case {"$float": text}:
                return float(text)
    except (LookupError, ValueError, TypeError) as error:
        raise ExportError(f"{path}: names what is not there ({error}){AGAIN}") from error
    return {key: _decoded(item, tensors, path) for key, item in value.items()}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ExportError("exports need a package that is not installed: pip install safetensors") from error
    return safetensors.torch


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(value: Any) -> bytes:
    """Return JSON of which there is only one way to write it, however a file is laid out."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _readable(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
