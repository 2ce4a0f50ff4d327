"""One iteration on the meta device: what it calls and how much memory its tensors take,
without computing anything.
"""

import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.protocols import protocol_steps
from methods import make_method
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
    step = protocol_steps("voc", "15-1")[1]
    tally = Tally()
    with torch.device("meta"):
        model = build_segmenter(body)
        model.add_classes(step.num_old)
        teacher = model.teacher()
        model.add_classes(step.num_new)
        model.train()
        method = make_method("mib", losses="fused")
        method.begin_step(model, step)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        for network in (model, teacher):
            for tensor in (*network.parameters(), *network.buffers()):
                tally.add(tensor)
        with tally:
            for _ in range(2):
                tally.operators, tally.peak = 0, tally.live
                images = torch.empty(batch, 3, crop, crop)
                labels = torch.zeros(batch, crop, crop, dtype=torch.long)
                with torch.no_grad():
                    target = teacher(images, enlarged=False)
                before = tally.live
                output = model(images, enlarged=False)
                kept = tally.live - before
                loss: Any = method.segmentation_loss(output.logits, labels)
                loss = loss + sum(method.retention_losses(output, target).values())
                loss.tensor.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del output, loss, target, images, labels
    return Iteration(tally.operators, kept, tally.peak)
