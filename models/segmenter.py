"""The network of a run: backbone, head, and one 1x1 classifier per step whose logits stand side by side."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from models.backbone import build_backbone
from models.deeplabv3 import DeepLabV3
from models.folding import fold_norms
from models.norm import make_norm
from models.upsample import Enlarged, enlarge

HEAD_DILATIONS = {8: (12, 24, 36), 16: (6, 12, 18)}
POOLING_PIXELS = 512  # side of the image-pooling window in eval, in input pixels: the published crop


class Output(NamedTuple):
    """What the network gives for a batch."""

    logits: Tensor  # B x C x H x W, at the resolution of the input
    features: Tensor  # what the backbone gives
    # Where they are asked for: each stage of the backbone before its activation, the head, the logits before
    # upsampling.
    stages: tuple[Tensor, ...] = ()


class Segmenter(nn.Module):
    """A backbone, a head, and one classifier per step."""

    body: Any  # the Backbone; step_<i>.pt calls its parameters body.<name>
    classifiers: Any  # a ModuleList of nn.Conv2d

    def __init__(self, backbone: nn.Module, head: DeepLabV3, backbone_name: str = "") -> None:
        super().__init__()
        self.backbone_name = backbone_name
        self.body = backbone
        self.head = head
        self.classifiers = nn.ModuleList()
        self.returns_stages = False
        self.dropout = 0.0  # of the head's output, in training

    @property
    def num_classes(self) -> int:
        return sum(classifier.out_channels for classifier in self.classifiers)

    def add_classes(self, num: int) -> None:
        """Append the classifier of a step; the first one's `num` includes the background,
        which is its channel 0.
        """
        if num < 1:
            raise ValueError(f"a step adds at least one class, not {num}")
        like = next(self.head.parameters())
        self.classifiers.append(
            nn.Conv2d(self.head.out_channels, num, 1, device=like.device, dtype=like.dtype)
        )

    @torch.no_grad()
    def init_new_from_background(self) -> None:
        """Start new classes as MiB does: they share the background's probability equally with it,
        all else is unchanged.

        w_new = w_bkg, b_new = b_bkg - log(|L| + 1), and b_bkg is lowered by the same amount.
        In the first step the background itself is new and nothing is done.
        """
        if len(self.classifiers) < 2:
            return
        first, new = self.classifiers[0], self.classifiers[-1]
        first.bias[0] -= math.log(new.out_channels + 1)
        new.weight.copy_(first.weight[:1].expand_as(new.weight))
        new.bias.copy_(first.bias[:1].expand_as(new.bias))

    def frozen_copy(self) -> Segmenter:
        """Return a copy in eval mode, without gradients and without a process group."""
        groups = (getattr(module, "group", None) for module in self.modules())
        # A process group cannot be copied; the memo tells deepcopy to put None in its place.
        copied = copy.deepcopy(self, {id(group): None for group in groups if group is not None})
        return copied.eval().requires_grad_(False)

    def teacher(self) -> Segmenter:
        """Return a frozen copy that says the same faster; its parameters are others,
        for its norms are folded.
        """
        teacher = self.frozen_copy()
        fold_norms(teacher)
        return teacher.requires_grad_(False)

    def forward(self, x: Tensor, enlarged: bool = True) -> Output:
        """With `enlarged` false the logits are enlarged when somebody asks, see models/upsample.py."""
        stages: list[Tensor] = []
        for features in self.body.stages(x):
            if self.returns_stages:
                stages.append(self.body.before_activation(features))
        hidden = self.head(features)
        dropped = F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden
        logits = torch.cat([classifier(dropped) for classifier in self.classifiers], dim=1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # upsampling and losses in full precision
        logits = logits.contiguous()  # losses go class by class: faster with the channels apart
        if self.returns_stages:
            stages += [hidden, logits]
        size = (x.shape[-2], x.shape[-1])
        whole: Any = enlarge(logits, size) if enlarged else Enlarged(logits, size)
        return Output(whole, features, tuple(stages))


def build_segmenter(
    body: str,
    *,
    output_stride: int = 16,
    norm: str = "abn",
    group: dist.ProcessGroup | None = None,
    head_channels: int = 256,
    dilations: Sequence[int] | None = None,
    pooling: int | None = None,
) -> Segmenter:
    """Return a segmenter without classifiers: `add_classes` comes next.

    `dilations` of the head: None takes those of the output stride (6, 12, 18 at 16; twice that at 8).
    `pooling` is the side of its image-pooling window in eval: None takes POOLING_PIXELS.
    """
    if output_stride not in HEAD_DILATIONS:
        raise ValueError(f"model.output_stride is 8 or 16, not {output_stride!r}")
    make = make_norm(norm, group)
    backbone: Any = build_backbone(body, output_stride=output_stride, norm=make)
    head = DeepLabV3(
        backbone.out_channels,
        head_channels,
        norm=make,
        dilations=HEAD_DILATIONS[output_stride] if dilations is None else dilations,
        pooling_size=POOLING_PIXELS // output_stride if pooling is None else pooling,
    )
    use_pointwise(backbone)
    use_pointwise(head)
    return Segmenter(backbone, head, body)


class Pointwise(nn.Conv2d):
    """A 1x1 convolution without stride, on a CPU always by oneDNN.

    PyTorch has its own, slower way for one thread and fewer than 16 images, unless the convolution is
    dilated; and a kernel of one place is the same with any dilation.
    """

    def forward(self, x: Tensor) -> Tensor:
        known = x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, self.weight, self.bias, dilation=2 if known and channels_last else 1)


def use_pointwise(network: nn.Module) -> None:
    """Every 1x1 convolution without stride, padding and groups becomes `Pointwise`,
    with the same parameters.
    """
    for module in network.modules():
        if type(module) is not nn.Conv2d or module.groups > 1:
            continue
        if module.kernel_size == module.stride == (1, 1) and module.padding == (0, 0):
            module.__class__ = Pointwise


def rebuild_segmenter(
    architecture: Mapping[str, Any],
    classifiers: Iterable[int],
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> Segmenter:
    """Return a segmenter with the weights of another one: its `state`, and the sizes of its classifiers."""
    model = build_segmenter(**architecture, group=group)
    for size in classifiers:
        model.add_classes(size)
    model.load_state_dict(state)
    return model
