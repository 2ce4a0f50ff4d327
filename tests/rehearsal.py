"""Training and scoring without a GPU, as they would run on one: on the `meta` device, where tensors have a
shape and no values.

All code that asks for the device takes the way of a GPU there. A dispatch mode sees every operator, those of
the backward pass too, and notes three kinds of findings:

- an operator that PyTorch documents as not deterministic on CUDA, or as deterministic in a slower form only;
- a host that waits for the device: it reads a value, needs a shape that depends on values, or copies
  something there without `non_blocking`;
- an operator on tensors of two devices.

What is read has no value, so the host is given one that is made up, and goes on.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine.step
from configs.schema import Config
from engine.arguments import read_config
from engine.evaluation import evaluate
from engine.objective import Placement
from engine.ranks import Ranks, be_deterministic
from engine.run import Run, prepare
from engine.watch import Watch
from methods import METHODS
from models.segmenter import Segmenter

ROOT = Path(engine.step.__file__).parent.parent
META = torch.device("meta")

# What torch.use_deterministic_algorithms documents (torch 2.13), by the name it has there: the operators of
# aten that it is about on CUDA, without overload and without the underscore of the form that works in place.
# Their backward passes are meant where only these are listed.
NOT_DETERMINISTIC: dict[str, tuple[str, ...]] = {
    # Slower forms when deterministic algorithms are asked for.
    "torch.nn.Conv1d": (),  # of convolutions cuDNN has deterministic forms, and they are what is asked for
    "torch.nn.Conv2d": (),
    "torch.nn.Conv3d": (),
    "torch.nn.ConvTranspose1d": (),
    "torch.nn.ConvTranspose2d": (),
    "torch.nn.ConvTranspose3d": (),
    "torch.nn.ReplicationPad1d": ("replication_pad1d_backward",),
    "torch.nn.ReplicationPad2d": ("replication_pad2d_backward",),
    "torch.nn.ReplicationPad3d": ("replication_pad3d_backward",),
    "torch.bmm": (),  # of sparse tensors, which nothing here has
    "torch.Tensor.__getitem__": ("index_put", "_index_put_impl", "_unsafe_index_put"),  # its backward pass
    "torch.Tensor.index_put": ("index_put", "_index_put_impl", "_unsafe_index_put"),
    "torch.Tensor.scatter_add_": ("scatter_add",),
    "torch.gather": ("scatter_add", "gather_backward"),
    "torch.index_add": ("index_add",),
    "torch.index_select": ("index_add", "index_select_backward"),
    "torch.repeat_interleave": ("index_add",),
    "torch.Tensor.index_copy": ("index_copy",),
    "torch.Tensor.scatter": ("scatter",),
    "torch.Tensor.scatter_reduce": ("scatter_reduce",),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward",),
    # No deterministic form.
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),
    "torch.nn.MaxUnpool2d": ("max_unpool2d",),
    "torch.nn.MaxUnpool3d": ("max_unpool3d",),
    # Without antialiasing the forward pass too: on CUDA it is replaced by a slow form, of many operators.
    "torch.nn.functional.interpolate": (
        "upsample_linear1d",
        "upsample_linear1d_backward",
        "upsample_bilinear2d",
        "upsample_bilinear2d_backward",
        "_upsample_bilinear2d_aa_backward",
        "upsample_bicubic2d",
        "upsample_bicubic2d_backward",
        "_upsample_bicubic2d_aa_backward",
        "upsample_trilinear3d",
        "upsample_trilinear3d_backward",
    ),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward",),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward",),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward",),
    "torch.nn.NLLLoss": (
        "nll_loss_forward",
        "nll_loss_backward",
        "nll_loss2d_forward",
        "nll_loss2d_backward",
    ),
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_dense_backward",),
    "torch.Tensor.put_": ("put",),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount",),
    "torch.median": ("median",),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.cumsum": ("cumsum",),
    "torch.Tensor.resize_": (),  # of quantised tensors
}
Given = dict[str, Any]  # the arguments of an operator by their names
# Where only some calls are meant.
ONLY: dict[str, Callable[[Given], bool]] = {
    "bincount": lambda given: given.get("weights") is not None,
    "cumsum": lambda given: given["self"].is_floating_point(),
    "median": lambda given: "dim" in given,
    "scatter": lambda given: "src" in given,
}
DOCUMENTED_AS = {name: says for says, names in NOT_DETERMINISTIC.items() for name in names}


class Finding(NamedTuple):
    kind: str  # "not deterministic", "waits", "two devices"
    operator: str
    where: str  # the line of this project

    def __str__(self) -> str:
        return f"{self.kind}: {self.operator} in {self.where}"


@dataclass
class Rehearsal(TorchDispatchMode):
    """Sees every operator that has to do with the device."""

    operators: set[str] = field(default_factory=set)
    findings: set[Finding] = field(default_factory=set)
    may_wait: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def of(self, kind: str) -> set[Finding]:
        return {finding for finding in self.findings if finding.kind == kind}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__.removesuffix("_")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = any(tensor.device == META for tensor in tensors)
        goes_there = kwargs.get("device") == META
        if not (here or goes_there):
            return operator(*args, **kwargs)
        self.operators.add(name)
        given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | kwargs
        if name in DOCUMENTED_AS and (name not in ONLY or ONLY[name](given)):
            self.note("not deterministic", f"{name} ({DOCUMENTED_AS[name]})")
        if any(tensor.device != META and tensor.dim() for tensor in tensors) and name not in COPIES:
            self.note("two devices", name)
        if not self.may_wait and waits(operator, name, given):
            self.note("waits", name)
        made_up = MADE_UP[name](given) if name in MADE_UP else NotImplemented
        return operator(*args, **kwargs) if made_up is NotImplemented else made_up

    def note(self, kind: str, what: str) -> None:
        ours = [frame for frame in traceback.extract_stack() if is_ours(Path(frame.filename))]
        place = Path(ours[-1].filename).relative_to(ROOT) if ours else None
        where = f"{place}:{ours[-1].lineno}, {ours[-1].name}" if ours else "a place unknown"
        self.findings.add(Finding(kind, what, where))


class Made(TorchFunctionMode):
    """Sees tensors that are made of numbers of the host, which no dispatch mode does."""

    MAKERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        goes_there = function in self.MAKERS and made.device == META and not (args and made is args[0])
        if goes_there and not self.rehearsal.may_wait:
            self.rehearsal.note("waits", function.__name__)
        return made


def is_ours(file: Path) -> bool:
    return ROOT in file.parents and file.relative_to(ROOT).parts[0] != "tests" and ".venv" not in file.parts


def waits(operator: Any, name: str, given: Given) -> bool:
    """Return whether the host of a GPU waits in this call until the device has done what it was told."""
    if name == "index" or "index_put" in name:  # a mask has as many places as it has true values
        return any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in given["indices"]
        )
    if name in ("_to_copy", "copy"):
        source = given["src"] if name == "copy" else given["self"]
        target = given["self"].device if name == "copy" else given.get("device") or source.device
        return source.device != target and not given.get("non_blocking")
    # What PyTorch itself marks as depending on values.
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*operator.tags})


def _copied(given: Given) -> Any:
    if given.get("device", META) == META:
        return NotImplemented
    return torch.zeros(given["self"].shape, dtype=given.get("dtype") or given["self"].dtype)


def _copied_into(given: Given) -> Any:
    leaves = given["src"].device == META and given["self"].device != META
    return given["self"] if leaves else NotImplemented


def _masked(given: Given) -> Any:
    x, (mask, *others) = given["self"], given["indices"]
    if mask is None or mask.dtype != torch.bool or others:
        return NotImplemented
    return x.new_empty(mask.numel(), *x.shape[mask.dim() :])


def _places(given: Given) -> Any:
    return given["self"].new_empty(given["self"].numel(), given["self"].dim(), dtype=torch.long)


def _counts(given: Given) -> Any:
    return given["self"].new_empty(max(1, given.get("minlength", 0)), dtype=torch.long)


COPIES = ("_to_copy", "copy")
# What the host is given in place of values that are not there; NotImplemented: nothing is missing.
MADE_UP: dict[str, Callable[[Given], Any]] = {
    # The fused optimizers, which change tensors in place and give nothing, are not for this device.
    "_fused_sgd": lambda given: None,
    "_fused_adamw": lambda given: None,
    "_local_scalar_dense": lambda given: torch.ones((), dtype=given["self"].dtype).item(),
    "equal": lambda given: True,
    "_to_copy": _copied,
    "copy": _copied_into,
    "index": _masked,
    "nonzero": _places,
    "masked_select": lambda given: given["self"].new_empty(given["self"].numel()),
    "bincount": _counts,
}


# ------------------------------------------------------------------------------------------------ a whole run


def settings(method: str) -> list[str]:
    """Return what a method needs, or what lets few iterations visit all of it."""
    given = {"rw": ["method.options.every=1"]}.get(method, [])
    memory = ["method.memory=4"] if METHODS[method].memory else []
    return [f"method.name={method}", *memory, *given]


@contextmanager
def patched(rehearsal: Rehearsal) -> Iterator[None]:
    """What only a real device can do is left out: autocasting, and checkpoints, whose models stay in memory.

    The watch of a step runs as always. The host may wait before the end of the first iteration, in which
    what a step keeps is made, and from the end of the last one on, whose losses are logged.
    """
    saved: dict[int, tuple[Segmenter, dict]] = {}
    after = Watch.after

    def save(run: Run, step: Any, model: Segmenter, method: Any, *_: Any, **__: Any) -> None:
        saved[step.index] = model, {"methods": method.handover(), "costs": {}}

    def watched(watch: Watch, iteration: int, *rest: Any) -> None:
        rehearsal.may_wait |= iteration == watch.last
        after(watch, iteration, *rest)
        rehearsal.may_wait = iteration == watch.last

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "after", watched)
        patch.setattr(Placement, "autocast", lambda _: nullcontext())
        optimizers = sys.modules[torch.optim.Optimizer.__module__]
        patch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["cuda", "meta"])
        patch.setattr(engine.step, "save_step", save)
        patch.setattr(engine.step, "load_step", lambda run, step: copy.deepcopy(saved[step.index]))
        yield


@contextmanager
def seen(rehearsal: Rehearsal) -> Iterator[Rehearsal]:
    with rehearsal, Made(rehearsal):
        yield rehearsal


def rehearse(arguments: list[str], score: bool = False) -> Rehearsal:
    """Return what training the steps of a config did on the device, and scoring the last one if asked."""
    config: Config = read_config(arguments)
    rehearsal = Rehearsal()
    nobody_asks: Any = SimpleNamespace(requested=False)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    run = prepare(config, Ranks(0, 1, 0, META, None), nobody_asks)
    try:
        with patched(rehearsal), seen(rehearsal):
            for step in run.steps:
                model, _ = engine.step.train_step(run, step)
            rehearsal.may_wait = not score
            if score:
                evaluate(run, step, model)
    finally:
        be_deterministic(was_deterministic)
        run.board.close()
        run.folder.unlock()
    return rehearsal
