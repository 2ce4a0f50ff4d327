"""Checkpoints that are either whole or not there.

A file is written beside its place, flushed to the disk, read back and checked against the CRC-32 that torch's
zip format keeps of every record, and only then renamed. `keep_previous` sets the file it replaces aside until
then, and `load` falls back to it. Loading never executes code from a file (`weights_only`).
"""

import os
import reprlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import UserError
from engine.exported import ExportError, read_export
from engine.ranks import Ranks, gather_objects
from methods import METHODS
from metrics.health import find_not_finite
from models.segmenter import Segmenter, rebuild_segmenter

FOLDER_MARK = 0x10  # in the attributes of a zip record
# What resume.pt of older versions lacks: nothing that they could train with had such a state.
NEWER_PARTS = ("update", "average")
STEP_FACTS = {"step", "classes", "class_ids", "network", "model", "methods", "costs"}


class CheckpointError(UserError, ValueError):
    pass


def previous_path(path: Path) -> Path:
    return path.with_suffix(".previous" + path.suffix)


def save(state: dict[str, Any], path: Path, keep_previous: bool = False) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        verify(temporary)
        if keep_previous and path.exists():
            os.replace(path, previous_path(path))
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path}: the checkpoint could not be written ({error}). The one before it is untouched: "
            "make room or repair the disk, then start the same command again"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def verify(path: Path) -> None:
    """Raise CheckpointError unless every record of the file matches its checksum.

    Reads no more than the file holds.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # torch neither compresses records nor lets them overlap. Who does either has something to unpack
            # without end.
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise CheckpointError("it is compressed, which torch never does")
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise CheckpointError("its records are larger than the file")
            damaged = archive.testzip()
            # A record marked as a folder has no content for torch, which then hands out memory nobody has
            # written.
            marked = (record.filename for record in records if record.external_attr & FOLDER_MARK)
            damaged = damaged or next(marked, None)
    except Exception as error:  # damaged files make zipfile and its decompressors raise a dozen types
        raise CheckpointError(f"{path}: not a whole checkpoint ({error})") from error
    if damaged is not None:
        raise CheckpointError(f"{path}: the record {damaged} does not match its checksum")


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what a file of torch or the folder of an export holds."""
    if path.is_dir():
        try:
            return read_export(path, device)
        except ExportError as error:
            raise CheckpointError(str(error)) from error
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    verify(path)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types for files that are not ours
        raise CheckpointError(f"{path}: not a checkpoint of this project ({_first_line(error)})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: not a checkpoint of this project (it holds a {type(state).__name__})")
    return state


def load_newest(path: Path, device: torch.device | str, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the checkpoint at `path`, or the one set aside before it if that one
    is damaged or not finite, or None.
    """
    for candidate in (path, previous_path(path)):
        if candidate.exists():
            try:
                state = load(candidate, device)
                refuse_not_finite(candidate, trained_parts(state.get("parts")))
                return state
            except CheckpointError as error:
                warn(f"{error}; falling back to an older state")
    return None


def trained_parts(parts: Any) -> dict[str, Any]:
    """Return weights and momentum.

    What a method keeps within a step is its own matter: thresholds of PLOP may be infinite.
    """
    return {name: parts.get(name) for name in ("model", "optimizer")} if isinstance(parts, dict) else {}


def refuse_not_finite(path: Path, state: Any, advice: str = "") -> None:
    """Raise CheckpointError for weights that are not finite, which older versions did not look for."""
    broken = find_not_finite(state)
    if broken is not None:
        raise CheckpointError(f"{path}: holds weights that are not finite ({broken}){advice}")


def step_state(
    model: Segmenter,
    architecture: dict[str, Any],
    *,
    step: int,
    class_ids: Sequence[int],
    class_names: Sequence[str],
    methods: dict[str, Any],
    costs: dict[str, float],
    config: str,
    trained: dict[str, Any] | None = None,
    num_new: int | None = None,
    rule: str | None = None,
    colours: Sequence[tuple[int, int, int]] = (),
) -> dict[str, Any]:
    """Return a step checkpoint: all that the next step, an evaluation or a prediction needs,
    without asking anybody else.

    `rule` names the method whose rule makes scores of classes from logits, if it has one. `methods` holds
    the statistics of importance methods by name; `costs`, `config` and `trained` (engine.identity) say where
    the model comes from; `colours` are those of all classes, if they have their own.
    """
    network = {"arguments": architecture, **model.outline()} | ({} if rule is None else {"rule": rule})
    state = {
        "step": step,
        "class_ids": list(class_ids),
        "classes": [class_names[c] for c in class_ids],
        "network": network,
        "model": model.state_dict(),
        "methods": methods,
        "costs": costs,
        "config": config,
    }
    drawn = [list(colours[c]) for c in class_ids] if colours else None
    known = {"trained": trained, "num_new": num_new, "colours": drawn}
    return state | {key: value for key, value in known.items() if value is not None}


def num_new(state: dict[str, Any]) -> int:
    """Return how many of a step checkpoint's classes are its step's own; in step 0 the background is one."""
    return state.get("num_new", state["network"]["classifiers"][-1])


def load_segmenter(
    path: Path,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    norm: str | None = None,
) -> tuple[Segmenter, dict[str, Any]]:
    """Return the model of a step checkpoint, built as the file says, and everything else the file holds.

    `norm` builds it with another norm, whose state is the same.
    """
    state = load(path, device)
    check_step(path, state)
    try:
        chosen = {} if norm is None else {"norm": norm}
        network = state["network"]
        model = rebuild_segmenter(network["arguments"] | chosen, network, state.pop("model"), group)
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        raise CheckpointError(f"{path}: the weights do not fit the network it names ({error})") from error
    classes = len(state["class_ids"])
    if "rule" in network:
        if network["rule"] not in METHODS:
            raise CheckpointError(
                f"{path}: predicts by the rule of method {network['rule']!r}, which is not among "
                f"{', '.join(METHODS)}; put its file into methods/"
            )
        model.rule = METHODS[network["rule"]].rule(classes)
    scored = model.rule(torch.zeros(1, model.num_classes, 1, 1)).shape[1] if model.rule else model.num_classes
    if scored != classes:
        raise CheckpointError(f"{path}: its network scores {scored} classes, but it lists {classes}")
    return model.to(device), state


def check_step(path: Path, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the state is that of a step,
    and what it says of itself is usable and finite.
    """
    missing = STEP_FACTS - state.keys()
    if missing:
        raise CheckpointError(
            f"{path}: not a step checkpoint of this project (no {', '.join(sorted(missing))})"
        )
    if not _is_number(state["step"]):
        raise CheckpointError(f"{path}: {reprlib.repr(state['step'])} is not the number of a step")
    ids, names = state["class_ids"], state["classes"]
    if not isinstance(ids, list) or not all(_is_number(class_id) and class_id < 255 for class_id in ids):
        raise CheckpointError(f"{path}: {reprlib.repr(ids)} are not the ids of classes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: {reprlib.repr(names)} are not the names of classes")
    if len(names) != len(ids):
        raise CheckpointError(
            f"{path}: names {len(names)} of its {len(ids)} classes; it was changed since it was written"
        )
    colours = state.get("colours", [[0, 0, 0]] * len(ids))
    if not isinstance(colours, list) or len(colours) != len(ids) or not all(map(_is_colour, colours)):
        raise CheckpointError(f"{path}: {reprlib.repr(colours)} are not the colours of its classes")
    refuse_not_finite(path, state["model"], "; move it away and train its step again")


def save_training(path: Path, parts: dict[str, Any], ranks: Ranks, **position: Any) -> None:
    """The state inside a step: every part's state_dict, the random generators of every rank,
    and where training stands.
    """
    rng = gather_objects(ranks, random_state(ranks.device))
    if ranks.is_main:
        states = {name: part.state_dict() for name, part in parts.items()}
        save({"parts": states, "rng": rng, "position": position}, path, keep_previous=True)


def restore_training(
    path: Path, parts: dict[str, Any], ranks: Ranks, say: Callable[[str], None], step: int
) -> dict:
    """Bring the parts back to the newest state inside `step` and return its position; {} if there is none."""
    state = load_newest(path, ranks.device, say)
    if state is None:
        return {}
    try:
        position = state["position"]
        if not _is_number(position["step"]) or not _is_number(position["iteration"]):
            raise TypeError("its position is no number")
        if position["step"] != step:
            return {}
        saved = {name: {} for name in NEWER_PARTS} | state["parts"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a state inside a step of this run ({type(error).__name__}: {_first_line(error)}); "
            f"move it and {previous_path(path).name} away, and the same command begins the step anew"
        ) from error
    if len(state["rng"]) == ranks.world:
        set_random_state(state["rng"][ranks.rank], ranks.device)
    else:
        say(f"note: what ran on {len(state['rng'])} ranks resumes on {ranks.world}: not the same bits")
    return position


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_number(value: Any) -> bool:
    """Return whether the value is a number; text might name a path, and never is."""
    return type(value) is int and 0 <= value < 2**31


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_is_number(v) and v <= 255 for v in value)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
