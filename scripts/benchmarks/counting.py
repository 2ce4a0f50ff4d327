"""One iteration on the meta device: what it calls and how much memory its tensors take,
without computing anything.
"""

import weakref
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.schema import load_config
from data.protocols import protocol_steps
from engine.arguments import REGISTRIES
from engine.objective import Objective
from engine.optim import make_schedule
from engine.ranks import Ranks
from engine.step import Training
from methods import Descent, Update, make_method
from models.segmenter import build_segmenter


class Tally(TorchDispatchMode):
    """Counts operators that are not views, and the bytes of all storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.live = self.peak = 0
        self._alive: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def gone(_: Any) -> None:
            self.live -= size
            del self._alive[address]

        self._alive[address] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.operators += not operator.is_view
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result


@dataclass(frozen=True)
class Iteration:
    operators: int
    kept: int  # bytes that the student's forward pass leaves for the backward pass
    peak: int  # bytes of all tensors at the fullest moment, weights and momentum included


@cache
def count_iteration(body: str, crop: int, batch: int) -> Iteration:
    """Return the second iteration of MiB in step 1 of VOC 15-1, in single precision;
    the first one makes the momentum.
    """
    config = load_config([], [f"model.body={body}", "method.name=mib", "method.strength=100"], REGISTRIES)
    step, meta, tally = protocol_steps("voc", "15-1")[1], torch.device("meta"), Tally()
    with meta:
        model = build_segmenter(**config.model.architecture)
        model.add_classes(step.num_old)
        teacher = model.teacher()
        model.add_classes(step.num_new)
        model.train()
        method, update = make_method("mib", losses="fused"), Update()
        method.begin_step(model, step)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        images = torch.empty(batch, 3, crop, crop, dtype=torch.uint8)
        batches = repeat((images, torch.zeros(batch, crop, crop, dtype=torch.uint8)))
        ranks = Ranks(0, 1, 0, meta, None)
        objective = Objective(config, ranks, model, teacher, method, update, scaler, batches)
        schedule = make_schedule(config.optim)
        training = Training(model, method, Descent(100.0), update, objective, optimizer, scaler, 2, schedule)
        for network in (model, teacher):
            for tensor in (*network.parameters(), *network.buffers()):
                tally.add(tensor)
        live: list[int] = []  # before and after the student's forward passes
        model.register_forward_pre_hook(lambda *_: live.append(tally.live))
        model.register_forward_hook(lambda *_: live.append(tally.live))
        with tally:
            for iteration, *_ in training.loop((1, 2)):
                if iteration == 1:
                    tally.operators, tally.peak = 0, tally.live
    return Iteration(tally.operators, live[3] - live[2], tally.peak)
