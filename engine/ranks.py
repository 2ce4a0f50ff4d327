"""Ranks, devices, signals, and what the ranks exchange. One process without torchrun, or one per GPU (nccl) or per CPU share (gloo)."""

import ctypes
import gc
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from configs.errors import UserError
from configs.schema import ConfigError


class RankError(UserError, RuntimeError):
    """The ranks disagree."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. `group` is None when it is alone."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start_ranks(device: str = "auto", timeout_minutes: float = 30) -> Ranks:
    """Join the process group that torchrun announces in the environment, if there is one."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError([f"train.device: {device!r} is not one of auto, cpu, cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            ["train.device is cuda, but torch sees no GPU: check the driver and the torch build, or use cpu"]
        )
    use_cuda = device != "cpu" and torch.cuda.is_available()
    rank, world, local_rank = (
        int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if use_cuda:
        torch.cuda.set_device(local_rank)
    else:
        keep_freed_memory()
    group = None
    if "TORCHELASTIC_RUN_ID" in os.environ or world > 1:
        _join("nccl" if use_cuda else "gloo", timedelta(minutes=timeout_minutes))
        group = dist.group.WORLD if world > 1 else None
    return Ranks(
        rank, world, local_rank, torch.device("cuda", local_rank) if use_cuda else torch.device("cpu"), group
    )


def _join(backend: str, timeout: timedelta) -> None:
    """init_process_group, with keys of its own for every restart by torchrun.

    Otherwise a restarted rank may read the address of a dead one from the store that the agent keeps.
    """
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    attempt = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=timeout)


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of handing them back to the kernel after every use.

    The kernel clears the pages of a new block, which on a CPU takes up to a quarter of a training iteration.
    """
    mmap_threshold, trim_threshold = -3, -1  # as malloc.h numbers them
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return  # another C library: nothing to tune
    mallopt(mmap_threshold, 2**30)
    mallopt(trim_threshold, 2**31 - 1)


def be_deterministic(wanted: bool = True) -> None:
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    # nothing reads uninitialised memory, and filling it takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property of the module


def stop_ranks() -> None:
    """Leave the process group. What `wrap` returned must be out of use by then, and is collected first.

    Otherwise it would be the last to hold the group, and end it without giving up Python's lock, for which the thread
    of gloo may be waiting to let go of the last sum of gradients: a process that never ends (pytorch/pytorch#56297).
    """
    if dist.is_initialized():
        gc.collect()  # DistributedDataParallel is part of a cycle
        dist.destroy_process_group()


class StopRequest:
    """SIGTERM and SIGINT ask the run to finish its iteration, save and leave; who asks again later ends it at once.

    A cluster signals torchrun and its ranks alike, and torchrun passes its signal on: what comes twice within
    `SAME_REQUEST` seconds is one request.
    """

    SAME_REQUEST = 5.0

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.since = True, time.monotonic()
        elif time.monotonic() - self.since > self.SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def main_rank_first(ranks: Ranks) -> Iterator[None]:
    """Let the first rank of each machine do the work that leaves a cache for its neighbours."""
    if ranks.group is not None and ranks.local_rank != 0:
        dist.barrier()
    yield
    if ranks.group is not None and ranks.local_rank == 0:
        dist.barrier()


def gather_objects(ranks: Ranks, value: Any) -> list[Any]:
    """One value per rank, on every rank."""
    if ranks.group is None:
        return [value]
    values = [None] * ranks.world
    dist.all_gather_object(values, value)
    return values


def any_rank(ranks: Ranks, flag: bool) -> bool:
    """True on every rank if it is true on one."""
    if ranks.group is None:
        return flag
    told = torch.tensor(float(flag), device=ranks.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


@torch.no_grad()
def agree(model: nn.Module, ranks: Ranks) -> None:
    """Norm statistics of rank 0 for everybody, then proof that all ranks hold the same model, bit for bit."""
    if ranks.group is None:
        return
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    digests = {
        name: hashlib.blake2b(
            tensor.cpu().flatten().view(torch.uint8).numpy().tobytes(), digest_size=8
        ).hexdigest()
        for name, tensor in model.state_dict().items()
    }
    everybody = gather_objects(ranks, digests)
    different = [name for name in digests if len({theirs[name] for theirs in everybody}) > 1]
    if different:
        raise RankError(
            f"the ranks no longer hold the same weights ({len(different)} tensors differ, the first is {different[0]}): "
            "something in the method or the model differs between ranks; the last checkpoint is from rank 0"
        )


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """DistributedDataParallel where there are peers.

    Every parameter takes part in every loss, so unused ones need not be looked for. Norm statistics that are not
    synchronised follow rank 0, as the evaluated and saved model does.
    """
    if ranks.group is None:
        return model
    device_ids = [ranks.local_rank] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
