"""Ranks, devices, signals, and what the ranks exchange.

One process without torchrun, or one per GPU (nccl) or per CPU share (gloo).
"""

import ctypes
import gc
import hashlib
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from configs.errors import UserError
from configs.schema import ConfigError, config_differences
from engine import heartbeat
from engine.rendezvous import RankError, announced_place, meet, watch_over


class StoppedBySignal(Exception):
    """A signal asked for an end, and everything is saved."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. `group` is None when it is alone."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    store: dist.Store | None = None  # in which ranks leave word for each other

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
    rank, world, local_rank = announced_place(torch.cuda.device_count() if use_cuda else None)
    if use_cuda:
        torch.cuda.set_device(local_rank)
    else:
        keep_freed_memory()
    place = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if world == 1:
        return Ranks(rank, world, local_rank, place, None)
    backend = "nccl" if use_cuda else "gloo"
    store = meet(rank, world, backend)
    watch_over(store, rank, world)
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return Ranks(rank, world, local_rank, place, dist.group.WORLD, store)


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

    Otherwise it would be the last to hold the group, and end it without giving up Python's lock, for which
    the thread of gloo may be waiting to let go of the last sum of gradients: a process that never ends
    (pytorch/pytorch#56297).
    """
    if dist.is_initialized():
        gc.collect()  # DistributedDataParallel is part of a cycle
        heartbeat.end()
        dist.destroy_process_group()


class StopRequest:
    """SIGTERM and SIGINT ask the run to save and leave; who asks again later ends it at once.

    A cluster signals torchrun and its ranks alike, and torchrun passes its signal on: what comes twice within
    `SAME_REQUEST` seconds is one request. A rank that is asked tells the others through their store.
    """

    SAME_REQUEST = 5.0
    BETWEEN_LOOKS = 1.0  # seconds between two looks into the store

    def __init__(self, store: dist.Store | None = None) -> None:
        self.heard = False
        self.since = 0.0
        self.store, self.looked = store, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    @property
    def requested(self) -> bool:
        if self.store is not None and time.monotonic() - self.looked >= self.BETWEEN_LOOKS:
            self.looked = time.monotonic()
            if self.heard:
                self.store.set("stop", "asked")
            else:
                self.heard = self.store.check(["stop"])
        return self.heard

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.since:
            self.heard, self.since, self.looked = True, time.monotonic(), 0.0
        elif time.monotonic() - self.since > self.SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """What one rank cannot do ends all of them: nobody waits for a rank that has left.

    No collective belongs inside.
    """
    own: Exception | None = None
    try:
        yield
    except (UserError, StoppedBySignal) as error:
        own = error
    told = (str(own), isinstance(own, StoppedBySignal)) if own else None
    everybody = gather_objects(ranks, told)
    if own is not None:
        raise own
    for rank, theirs in enumerate(everybody):
        if theirs is not None:
            text, stopped = theirs
            raise StoppedBySignal(text) if stopped else RankError(f"rank {rank} cannot continue: {text}")


@contextmanager
def main_rank_first(ranks: Ranks) -> Iterator[None]:
    """Let the first rank of each machine do the work that leaves a cache for the others,
    as `together` does it.
    """
    is_first = ranks.local_rank == 0
    if not is_first:
        with together(ranks):
            pass
    with together(ranks):
        yield
    if is_first:
        with together(ranks):
            pass


def check_alike(ranks: Ranks, facts: Mapping[str, Any], free: tuple[str, ...] = ()) -> None:
    """Refuse ranks that know other facts than rank 0 about what they do together;
    `free` begins what may differ.
    """
    first, *others = gather_objects(ranks, facts)
    differences = [
        f"rank {rank}: {difference}"
        for rank, theirs in enumerate(others, start=1)
        for difference in config_differences(theirs, first, free)
    ]
    if differences:
        raise RankError(
            "some ranks are not set up as rank 0 (theirs -> rank 0's):\n  " + "\n  ".join(differences) + "\n"
            "Give all of them the same command, the same data set and the same run.folder"
        )


def gather_objects(ranks: Ranks, value: Any) -> list[Any]:
    """Return one value per rank, on every rank."""
    if ranks.group is None:
        return [value]
    values = [None] * ranks.world
    dist.all_gather_object(values, value)
    return values


def greatest(ranks: Ranks, *values: float) -> list[float]:
    """Return each value as the rank has it where it is greatest."""
    if ranks.group is None:
        return list(values)
    told = torch.tensor(values, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.tolist()


def any_rank(ranks: Ranks, flag: bool) -> bool:
    """Return True on every rank if the value is true on one."""
    return bool(*greatest(ranks, flag))


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
            f"the ranks no longer hold the same weights ({len(different)} tensors differ, the first is "
            f"{different[0]}): something in the method or the model differs between ranks; the last "
            "checkpoint is from rank 0"
        )


def wrap(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return the model in DistributedDataParallel where there are peers.

    Every parameter takes part in every loss, so unused ones need not be looked for. Norm statistics that are
    not synchronised follow rank 0, as the evaluated and saved model does.
    """
    if ranks.group is None:
        return model
    device_ids = [ranks.local_rank] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
