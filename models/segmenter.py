"""The network of a run: backbone, head, and one 1x1 classifier per step whose logits stand side by side."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from models.aspp import ASPP
from models.backbone import IMAGENET, Colours, build_backbone, colours_of
from models.deeplabv3 import DeepLabV3
from models.folding import fold_norms
from models.norm import ABN, NormFactory, make_norm
from models.synchronised import synchronise_batch_norms
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
    hidden: Any = None  # what the head gives, which the classifiers see: B x channels x h x w
    extra: Mapping[str, Tensor] = {}  # what else a method asks of the network, by its own names


class DeepClassifier(nn.Sequential):
    """A 3x3 convolution with its norm in front of the 1x1 one: SSUL's head of a step."""

    def __init__(self, channels: int, num: int, hidden: int, norm: NormFactory) -> None:
        super().__init__(
            nn.Conv2d(channels, hidden, 3, padding=1, bias=False), norm(hidden), nn.Conv2d(hidden, num, 1)
        )
        self.out_channels, self.hidden = num, hidden


class Segmenter(nn.Module):
    """A backbone, a head, and one classifier per step.

    A method may want more of it: deeper classifiers, further ones beside those of the classes, parts that
    are frozen, other outputs of a batch, and a rule of its own that makes scores of classes from logits.
    """

    body: Any  # the Backbone; step_<i>.pt calls its parameters body.<name>
    classifiers: Any  # a ModuleList of nn.Conv2d or DeepClassifier
    further: Any  # a ModuleDict of the same: classifiers whose scores are not among the logits
    # From logits (B, outputs, H, W) to scores of classes (B, C, H, W), the largest of which is the
    # prediction; None: the logits are these scores, and their softmax is averaged over versions of an image.
    rule: Callable[[Tensor], Tensor] | None = None
    extra_outputs: Callable[[Segmenter, Tensor], Mapping[str, Tensor]] | None = None  # of the head's output

    def __init__(
        self, backbone: nn.Module, head: DeepLabV3 | ASPP, backbone_name: str = "", norm: NormFactory = ABN
    ) -> None:
        super().__init__()
        self.backbone_name = backbone_name
        self.body = backbone
        self.head = head
        self.classifiers = nn.ModuleList()
        self.further = nn.ModuleDict()
        self.norm = norm
        self.frozen: list[nn.Module] = []
        self.returns_stages = False
        self.dropout = 0.0  # of the head's output, in training

    @property
    def colours(self) -> Colours:
        """Return by what the images are normalised that the backbone is shown."""
        return colours_of(self.backbone_name) if self.backbone_name else IMAGENET

    @property
    def num_classes(self) -> int:
        """Return the number of logits of a pixel."""
        return sum(classifier.out_channels for classifier in self.classifiers)

    def add_classes(self, num: int, hidden: int | None = None) -> None:
        """Append the classifier of a step; the first one's `num` includes the background,
        which is its channel 0, unless the method has none.

        With `hidden` it is a deep one.
        """
        if num < 1:
            raise ValueError(f"a step adds at least one class, not {num}")
        self.classifiers.append(self._classifier(num, hidden))

    def add_further(self, name: str, num: int, hidden: int | None = None) -> None:
        """Add a classifier whose scores are not among the logits: `extra_outputs` may use it."""
        self.further[name] = self._classifier(num, hidden)

    def _classifier(self, num: int, hidden: int | None) -> nn.Module:
        like, channels = next(self.head.parameters()), self.head.out_channels
        plain = nn.Conv2d(channels, num, 1) if hidden is None else None
        classifier = plain or DeepClassifier(channels, num, hidden or 0, self.norm)
        return classifier.to(like.device, like.dtype)

    def outline(self) -> dict[str, Any]:
        """Return the sizes of all classifiers, from which `rebuild_segmenter` builds them again."""

        def size(classifier: Any) -> int | list[int]:
            deep = isinstance(classifier, DeepClassifier)
            return [classifier.out_channels, classifier.hidden] if deep else classifier.out_channels

        outline: dict[str, Any] = {"classifiers": [size(classifier) for classifier in self.classifiers]}
        further = {name: size(classifier) for name, classifier in self.further.items()}
        return outline | ({"further": further} if further else {})

    def freeze(self, *parts: nn.Module) -> None:
        """Keep parts as they are: without gradients, and their norms in eval whatever `train` says."""
        for part in parts:
            self.frozen.append(part.requires_grad_(False).eval())

    def norms(self) -> Iterator[nn.Module]:
        """Yield every module that keeps statistics of batches."""
        return (module for module in self.modules() if hasattr(module, "running_mean"))

    def train(self, mode: bool = True) -> Segmenter:
        super().train(mode)
        for part in self.frozen:
            part.eval()
        return self

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Segmenter:
        """Copy all but what belongs to the method."""
        memo |= {id(theirs): theirs for theirs in (self.rule, self.extra_outputs)}
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

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
        # Losses go class by class: faster with the channels apart.
        logits = _in_full_precision(logits).contiguous()
        if self.returns_stages:
            stages += [hidden, logits]
        size = (x.shape[-2], x.shape[-1])
        whole: Any = enlarge(logits, size) if enlarged else Enlarged(logits, size)
        extra = {} if self.extra_outputs is None else self.extra_outputs(self, dropped)
        extra = {name: _in_full_precision(value) for name, value in extra.items()}
        return Output(whole, features, tuple(stages), hidden, extra)


def _in_full_precision(x: Tensor) -> Tensor:
    """Return what upsampling and losses work on."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def build_segmenter(
    body: str,
    *,
    output_stride: int = 16,
    norm: str = "abn",
    group: dist.ProcessGroup | None = None,
    head: str = "deeplab",
    head_channels: int = 256,
    dilations: Sequence[int] | None = None,
    pooling: int | None = None,
) -> Segmenter:
    """Return a segmenter without classifiers: `add_classes` comes next.

    `dilations` of the head: None takes those of the output stride (6, 12, 18 at 16; twice that at 8).
    `pooling` is the side of its image-pooling window in eval: None takes POOLING_PIXELS; the head "aspp" has
    none.
    """
    if output_stride not in HEAD_DILATIONS:
        raise ValueError(f"model.output_stride is 8 or 16, not {output_stride!r}")
    make = make_norm(norm, group)
    backbone: Any = build_backbone(body, output_stride=output_stride, norm=make)
    channels, dilations = (backbone.out_channels, head_channels), dilations or HEAD_DILATIONS[output_stride]
    if head == "aspp":
        made: Any = ASPP(*channels, dilations=dilations)
    else:
        window = POOLING_PIXELS // output_stride if pooling is None else pooling
        made = DeepLabV3(*channels, norm=make, dilations=dilations, pooling_size=window)
    for part in (backbone, made):
        synchronise_batch_norms(part, group)
        use_pointwise(part)
    return Segmenter(backbone, made, body, make)


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
    outline: Mapping[str, Any],
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
) -> Segmenter:
    """Return a segmenter with the weights of another one: its `state` and its `outline`."""
    model = build_segmenter(**architecture, group=group)
    for size in outline["classifiers"]:
        model.add_classes(*_sizes(size))
    for name, size in outline.get("further", {}).items():
        model.add_further(name, *_sizes(size))
    model.load_state_dict(state)
    return model


def _sizes(size: int | Sequence[int]) -> Sequence[int]:
    return [size] if isinstance(size, int) else size
