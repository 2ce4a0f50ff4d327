"""Weights from elsewhere -> our names: torchvision's, timm's and InPlaceABN's ImageNet backbones,
MiB-family step checkpoints.

A file is only ever read as tensors (`weights_only`), fits completely or is refused, and the report says what
was used.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import UserError
from models import from_timm, strides
from models.backbone import TIMM
from models.from_timm import TimmBackbone
from models.segmenter import Segmenter
from models.signs import negative_scales, without_signs

State = dict[str, Tensor]

# torchvision writes the start of the file's sha256 into its name.
_HASHED_NAME = re.compile(r"(?:resnet(?:18|34|50|101)|mobilenet_v2)-([0-9a-f]{8})\.pth")


class WeightsError(UserError, ValueError):
    """A weight file that cannot be used: what, where, what to do."""


@dataclass(frozen=True)
class Report:
    source: str
    format: str
    matched: list[str] = field(repr=False)  # our names
    ignored: list[str] = field(repr=False)  # the file's names
    missing: list[str]  # our names the file does not hold; they keep their values
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.source}: {self.format}, {len(self.matched)} tensors used"
        for verb, names in (("ignored", self.ignored), ("not in the file", self.missing)):
            if names:
                text += f", {len(names)} {verb} ({_some(names)})"
        return text + (f"\n{self.note}" if self.note else "")


def load_backbone_weights(segmenter: Segmenter, source: str | Path) -> Report:
    """Fills the backbone from a file of any known format, or with source
    "imagenet" from torchvision's download.
    """
    path = weights_file(segmenter.backbone_name, source, fetch=True)
    file = read(path)
    signed = getattr(segmenter.body, "signed_norms", False)
    if isinstance(segmenter.body, TimmBackbone):
        format_name, tensors = "timm", tensors_of(nested(file))
        state, ignored = from_timm.backbone_part(segmenter.backbone_name, segmenter.body, tensors)
    else:
        format_name, state, ignored = _backbone_part(path, file)
        if signed and format_name != "torchvision":
            raise WeightsError(
                f"{path}: the norms and activations of {format_name} files are not those of "
                f"{segmenter.backbone_name}: set model.body={segmenter.backbone_name.removesuffix('_relu')}"
            )
    state = counters(segmenter.body) | state
    check_fits(path, format_name, state, shapes(segmenter.body))
    note = _check_stride(path, segmenter, file, format_name, state)
    if format_name == "torchvision" and not signed:
        state = without_signs(segmenter.body, state)
    elif format_name == "MiB":
        remedy = "scripts.import_mib --norm-act abn and train.start_from"
        note = negative_scales(segmenter.body, state, remedy)
    segmenter.body.load_state_dict(state)
    missing = [name for name in segmenter.state_dict() if not name.startswith("body.")]
    return Report(str(path), format_name, [f"body.{name}" for name in state], ignored, missing, note)


def import_mib_checkpoint(path: str | Path, segmenter: Segmenter, *, signed_norms: bool = False) -> Report:
    """Fills backbone, head and classifiers from a step checkpoint of MiB, PLOP or their relatives.

    Classifiers the segmenter does not have yet are added; those it has must be the file's first ones.
    `signed_norms`: the file was trained with norms that scale by the weight itself, not by |weight| + eps,
    which nothing in it tells.
    """
    path = Path(path)
    file = read(path)
    if not isinstance(file.get("model_state"), Mapping):
        raise WeightsError(f"{path}: not a step checkpoint of the MiB family, it has no `model_state`")
    found = tensors_of(file["model_state"])
    if "cls.0.weight" in found and ("scalar" in found or "cls.0.bias" not in found):
        raise WeightsError(
            f"{path}: its classifiers have no bias, as with PLOP's option --cosine, which does not exist here"
        )
    state, ignored = _rename(found, _name_from_mib)
    sizes = _classifier_sizes(path, state)
    present = [classifier.out_channels for classifier in segmenter.classifiers]
    if present != sizes[: len(present)]:
        raise WeightsError(
            f"{path}: its classifiers have {sizes} classes, the segmenter's {present}: "
            "use the protocol and the step of the checkpoint"
        )
    wanted = shapes(segmenter)
    for index, num in enumerate(sizes):
        wanted[f"classifiers.{index}.weight"] = (num, segmenter.head.out_channels, 1, 1)
        wanted[f"classifiers.{index}.bias"] = (num,)
    check_fits(path, "MiB", state, wanted)

    for num in sizes[len(present) :]:
        segmenter.add_classes(num)
    note = "" if signed_norms else negative_scales(segmenter, state, "--norm-act abn")
    segmenter.load_state_dict(without_signs(segmenter, state) if signed_norms else state)
    return Report(str(path), "MiB", list(state), ignored, [], note)


# ---- reading -----------------------------------------------------------------------------------------------


def weights_file(backbone_name: str, source: str | Path, fetch: bool = False) -> Path:
    """Return the file that `source` stands for; with `fetch` it is there, downloaded if need be,
    or WeightsError.
    """
    find = _timm_file if backbone_name.startswith(TIMM) else _imagenet_file
    path = find(backbone_name, fetch) if str(source) == "imagenet" else Path(source)
    if fetch:
        _check_is_there(path)
    return path


def _check_is_there(path: Path) -> None:
    if not path.is_file():
        raise WeightsError(
            f"{path}: no such file; model.pretrained is a path, or imagenet to download the weights"
        )


def read(path: Path) -> dict:
    _check_is_there(path)
    hashed = _HASHED_NAME.fullmatch(path.name)
    if hashed and not sha256_of(path).startswith(hashed[1]):
        raise WeightsError(
            f"{path}: damaged, its sha256 does not start with {hashed[1]} as its name says; "
            "get the file again, or rename it if its content was changed on purpose"
        )
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with torch.serialization.safe_globals(_NUMPY_SCALARS):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the unpickler
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise WeightsError(
                f"{path}: refused, it holds objects ({foreign[1]}) that could run code when read; "
                "save it again as a plain state_dict"
            ) from error
        raise WeightsError(
            f"{path}: cannot be read, it is truncated or no PyTorch file; get it again"
        ) from error
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path}: holds a {type(content).__name__}, not a mapping of names to tensors")
    return dict(content)


# Step checkpoints keep their scores as NumPy numbers, which are data and run nothing when they are read.
_numpy_scalar = np.float64().__reduce__()[0]
_NUMPY_SCALARS: list[Any] = [
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)),
    (_numpy_scalar, "numpy._core.multiarray.scalar"),
    (_numpy_scalar, "numpy.core.multiarray.scalar"),
]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_safetensors(path: Path) -> dict:
    """Return the tensors of a file as timm publishes them; the package comes with timm."""
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise WeightsError(f"{path}: needs the package safetensors ({error}): pip install timm") from error
    return load_file(path)


def _timm_file(backbone_name: str, fetch: bool) -> Path:
    """Return the file of this backbone in the cache of timm's hub; `fetch` downloads it."""
    if problem := from_timm.why_not(backbone_name):
        raise WeightsError(f"model.pretrained=imagenet: {problem}")
    settings = from_timm.import_timm().get_pretrained_cfg(backbone_name.removeprefix(TIMM))
    if not settings.hf_hub_id:
        raise WeightsError(
            f"timm publishes no weights of {backbone_name}: set model.pretrained to null or to a path"
        )
    import huggingface_hub

    name = settings.hf_hub_filename or "model.safetensors"
    try:
        return Path(huggingface_hub.hf_hub_download(settings.hf_hub_id, name, local_files_only=not fetch))
    except Exception as error:  # it raises those of its HTTP library too
        if not fetch:
            return Path(torch.hub.get_dir(), settings.hf_hub_id, name)  # where nothing is
        raise WeightsError(
            f"{settings.hf_hub_id}/{name}: cannot be downloaded ({str(error).splitlines()[0]}); "
            "fetch it on another machine and set model.pretrained to the path of the file"
        ) from error


def _imagenet_file(backbone_name: str, fetch: bool) -> Path:
    """torchvision's file of this backbone in the cache of torch.hub;
    `fetch` downloads it when it is not there.
    """
    from data.vision import torchvision

    if backbone_name not in torchvision.models.list_models():
        raise WeightsError(
            f"no ImageNet weights exist for {backbone_name}: set model.pretrained to null or to a path"
        )
    url = torchvision.models.get_model_weights(backbone_name)["IMAGENET1K_V1"].url
    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlparse(url).path).name)
    if fetch and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path), hash_prefix=path.stem.rpartition("-")[2])
        except (OSError, RuntimeError) as error:
            raise WeightsError(
                f"{url}: cannot be downloaded ({error}); fetch it on another machine "
                "and set model.pretrained to the path of the file"
            ) from error
    return path


# ---- names -------------------------------------------------------------------------------------------------


def nested(file: Mapping) -> Mapping:
    """Return the state dict in a file, which may be the file itself."""
    for key in ("model_state", "state_dict"):
        if isinstance(file.get(key), Mapping):
            file = file[key]
    return file


def tensors_of(state: Mapping) -> State:
    """Return the tensors under their names without the `module.` of a distributed wrapper,
    and without the batches that norms counted.
    """
    return {
        name.removeprefix("module."): value
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.endswith(".num_batches_tracked")
    }


def counters(network: nn.Module) -> State:
    """Return what PyTorch's norms count, and no network computes with; ours count nothing."""
    return {name: t for name, t in network.state_dict().items() if name.endswith(".num_batches_tracked")}


def _backbone_part(path: Path, file: dict) -> tuple[str, State, list[str]]:
    """(format, backbone tensors under our names, other names of the file)."""
    tensors = tensors_of(nested(file))
    if "conv1.weight" in tensors or "features.0.0.weight" in tensors:
        format_name, rename = "torchvision", _name_from_torchvision
    elif "mod1.conv1.weight" in tensors:
        format_name, rename = "InPlaceABN", _name_from_iabn
    elif "body.mod1.conv1.weight" in tensors:
        format_name, rename = "MiB", _backbone_name_from_mib
    else:
        raise WeightsError(
            f"{path}: no known backbone in it (its names: {_some(tensors) or 'none'}); expected are a "
            "torchvision ResNet or MobileNetV2, an InPlaceABN ResNet, or a step checkpoint of the MiB family"
        )
    return format_name, *_rename(tensors, rename)


def _rename(tensors: State, rename: Callable[[str], str | None]) -> tuple[State, list[str]]:
    """(tensors under their new names, old names of those without one)."""
    names = {name: rename(name) for name in tensors}
    state = {new: tensors[name] for name, new in names.items() if new is not None}
    return state, [name for name, new in names.items() if new is None]


def _name_from_torchvision(name: str) -> str | None:
    # The classifier, and MobileNetV2's last layer, which our backbone leaves out.
    return None if name.startswith(("fc.", "classifier.", "features.18.")) else name


def _name_from_iabn(name: str) -> str | None:
    """mod2.block1.convs.conv1.weight -> layer1.0.conv1.weight; None for what is not of the backbone."""
    if match := re.fullmatch(r"mod1\.((?:conv1|bn1)\.\w+)", name):
        return match[1]
    if match := re.fullmatch(r"mod([2-5])\.block(\d+)\.(?:convs\.)?(\w+)\.(\w+)", name):
        stage, block, unit, tensor = match.groups()
        unit = {"proj_conv": "downsample.0", "proj_bn": "downsample.1"}.get(unit, unit)
        return f"layer{int(stage) - 1}.{int(block) - 1}.{unit}.{tensor}"
    return None


def _name_from_mib(name: str) -> str | None:
    part, _, rest = name.partition(".")
    if part == "body":
        ours = _name_from_iabn(rest)
        return ours and f"body.{ours}"
    return {"head": f"head.{rest}", "cls": f"classifiers.{rest}"}.get(part)


def _backbone_name_from_mib(name: str) -> str | None:
    return _name_from_iabn(name.removeprefix("body."))


def _classifier_sizes(path: Path, state: State) -> list[int]:
    """Return classes per step, from classifiers.0.weight, classifiers.1.weight, ..."""
    sizes: list[int] = []
    while (weight := state.get(f"classifiers.{len(sizes)}.weight")) is not None:
        sizes.append(len(weight))
    if not sizes:
        raise WeightsError(f"{path}: no classifier in it (`cls.0.weight`); it is not a trained step")
    return sizes


def _check_stride(path: Path, segmenter: Segmenter, file: dict, format_name: str, state: State) -> str:
    """Return a note if nothing tells which convolution of the file's bottlenecks strides;
    WeightsError if it is the other one.
    """
    wanted = getattr(segmenter.body, "stride_in_1x1", None)
    if wanted is None:
        return ""
    names = {name.removeprefix("net."): tensor for name, tensor in state.items()}
    found = strides.stride_of(file, names, format_name, lambda: sha256_of(path))
    other = strides.other_body(segmenter.backbone_name)
    if found is None:
        return (
            f"note: {path.name} does not tell which convolution of its blocks strides; it is taken as "
            f"{segmenter.backbone_name}, {strides.KINDS[wanted]}. If its network strides "
            f"{strides.KINDS[not wanted]}, use model.body={other}"
        )
    if found is not wanted:
        raise WeightsError(
            f"{path}: its network strides {strides.KINDS[found]}, {segmenter.backbone_name} "
            f"{strides.KINDS[wanted]}: names and shapes fit, the function does not; set model.body={other}"
        )
    return ""


# ---- what fits ---------------------------------------------------------------------------------------------


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def check_fits(path: Path, format_name: str, state: State, wanted: dict[str, tuple[int, ...]]) -> None:
    """Every wanted name is there in the wanted shape, and nothing is left over:
    a deeper network is another one.
    """
    problems = {
        "missing": [name for name in wanted if name not in state],
        "left over": [name for name in state if name not in wanted],
        "other shapes": [
            f"{name} {tuple(state[name].shape)} instead of {shape}"
            for name, shape in wanted.items()
            if name in state and state[name].shape != shape
        ],
    }
    found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
    if found:
        raise WeightsError(
            f"{path}: this {format_name} file is of another architecture ({found}); "
            "set model.body and model.head_channels as in the file, or take another file"
        )


def _some(names: Iterable[str], limit: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
