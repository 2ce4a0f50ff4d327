"""Networks of the package timm as backbones: model.body=timm/<name>, of any that offers its features.

Their norms are their own, scaled by the signed weight; model.norm says what the head has. Their features come
at the output stride where timm can build them so (ResNets, ConvNeXts, most convolutional networks). Others
(Swin, ViTs) keep their own, and the last stage is enlarged to the output stride.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.backbone import TIMM, Backbone, Colours
from models.norm import NormFactory
from models.upsample import enlarge

# How networks that have a size of images of their own are told to take any.
ANY_SIZE: tuple[dict[str, Any], ...] = ({"strict_img_size": False}, {"dynamic_img_size": True})
COMPUTED = ("relative_position_index", "attn_mask")  # buffers in older files, which timm now computes


def import_timm() -> Any:
    """Return the package timm, which imports torchvision: that wants data.vision before it."""
    from data.vision import torchvision

    assert torchvision
    import timm

    return timm


def why_not(name: str) -> str:
    """Return why timm/<name> cannot be had, and what to do; nothing if it can."""
    try:
        timm = import_timm()
    except ImportError as error:
        return f"{name!r} needs the package timm, which cannot be imported ({error}): pip install timm"
    theirs = name.removeprefix(TIMM)
    if timm.is_model(theirs):
        return ""
    close = difflib.get_close_matches(theirs, timm.list_models(), n=1)
    hint = f" (did you mean {TIMM}{close[0]}?)" if close else ""
    return f"{name!r} is no network of timm {timm.__version__}{hint}; timm.list_models() lists them"


class Timm:
    """What builds a network of timm as a backbone."""

    def __init__(self, name: str) -> None:
        self.name = name.removeprefix(TIMM)

    @property
    def colours(self) -> Colours:
        settings = import_timm().get_pretrained_cfg(self.name)
        return Colours(tuple(settings.mean), tuple(settings.std))

    def __call__(self, *, output_stride: int, norm: NormFactory) -> TimmBackbone:
        return TimmBackbone(self.name, output_stride)


class TimmBackbone(Backbone):
    """A network of timm that gives its features.

    Stages are compared as they are: what came before a ReLU cannot be computed back.
    """

    signed_norms = True
    net: Any

    def __init__(self, name: str, output_stride: int) -> None:
        super().__init__()
        self.net = _build(name, output_stride)
        self.channels = tuple(self.net.feature_info.channels())
        self.output_stride, self.reduction = output_stride, self.net.feature_info.reduction()[-1]
        self.channels_last = str(getattr(self.net, "output_fmt", "")).endswith("NHWC")
        if any(type(module).__module__ == "timm.models.resnet" for module in self.net.modules()):
            self.stride_in_1x1 = False
        if self.reduction < output_stride or self.reduction % output_stride:
            raise ValueError(
                f"model.body={TIMM}{name}: its features are {self.reduction} times smaller than the images, "
                f"which cannot be brought to model.output_stride={output_stride}; take the other output "
                "stride or another network"
            )
        if self.reduction > output_stride:
            self.note = (
                f"{TIMM}{name} gives features {self.reduction} times smaller than the images, and timm "
                f"cannot build it otherwise: they are enlarged to model.output_stride={output_stride}"
            )

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield what timm gives; the last stage is enlarged to the output stride if it is coarser.

        Images are padded with their mean colour to whole cells of that stage, which are cut off again.
        """
        height, width = x.shape[-2:]
        x = F.pad(x, (0, -width % self.reduction, 0, -height % self.reduction))
        stages = [self._channels_first(stage) for stage in self.net(x)]
        yield from stages[:-1]
        rows, columns = (side // self.output_stride for side in x.shape[-2:])
        last = enlarge(stages[-1], (rows, columns))
        yield last[..., : -(-height // self.output_stride), : -(-width // self.output_stride)]

    def _channels_first(self, stage: Tensor) -> Tensor:
        return stage.permute(0, 3, 1, 2) if self.channels_last else stage


def _build(name: str, output_stride: int) -> nn.Module:
    """Return the network at the output stride if it can be built so, else as it is, for images of any
    size.
    """
    timm = import_timm()
    size = timm.get_pretrained_cfg(name).input_size
    is_fixed = timm.get_pretrained_cfg(name).fixed_input_size
    problem = "it takes no arguments"
    for arguments in ({"output_stride": output_stride}, *ANY_SIZE, {}):
        if is_fixed and not arguments:
            raise ValueError(f"model.body={TIMM}{name}: takes images of {size[1]} x {size[2]} pixels only")
        try:
            return timm.create_model(name, features_only=True, **arguments)
        except (TypeError, AssertionError, NotImplementedError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"  # the network does not know this argument
    raise ValueError(f"model.body={TIMM}{name}: timm cannot give its features ({problem})")


# ---- weights -----------------------------------------------------------------------------------------------


def names_in_file(name: str, backbone: TimmBackbone) -> tuple[dict[str, str], set[str]]:
    """Return timm's name of each tensor -> its name in the backbone, and timm's names of what it leaves out.

    A network that gives its features has flattened names (layers_0.blocks for layers.0.blocks) and no
    classifier.
    """

    def canonical(name: str) -> str:
        return name.removeprefix("net.").removeprefix("model.").replace("_", ".")

    with torch.device("meta"):
        whole = import_timm().create_model(name.removeprefix(TIMM)).state_dict()
    ours = {canonical(key): key for key in backbone.state_dict()}
    pairs = {theirs: ours[canonical(theirs)] for theirs in whole if canonical(theirs) in ours}
    return pairs, whole.keys() - pairs.keys()


def backbone_part(
    name: str, backbone: TimmBackbone, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return a file's tensors, in timm's naming, under the backbone's names; and its other names."""
    pairs, left_out = names_in_file(name, backbone)
    state, ignored = {}, []
    for theirs, tensor in tensors.items():
        if theirs in left_out or theirs.rpartition(".")[2] in COMPUTED:
            ignored.append(theirs)
        else:
            state[pairs.get(theirs, theirs)] = tensor
    return state, ignored
