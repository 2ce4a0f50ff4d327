"""How the ranks of a run find each other: what torchrun or a cluster announces in the environment,
and a store they all reach.
"""

import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from configs.errors import UserError
from engine import heartbeat

SECONDS_OF_SILENCE = 15.0  # until a rank says for whom it waits
MINUTES_TO_MEET = 5.0  # torchrun starts ranks together, but slow disks do not let them import torch together


class RankError(UserError, RuntimeError):
    """The ranks do not find each other, or disagree."""


def announced_place(devices: int | None = None) -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK of the environment; a process without them is alone.

    `devices` is the number of GPUs.
    """
    rank, world, local_rank = (_number(*pair) for pair in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if not 0 <= rank < world:
        raise RankError(
            f"RANK={rank} and WORLD_SIZE={world} do not fit: ranks go from 0 to WORLD_SIZE - 1; "
            "let torchrun set both, or unset both for a single process"
        )
    if local_rank < 0 or (devices is not None and local_rank >= devices):
        raise RankError(
            f"LOCAL_RANK={local_rank} has no GPU: torch sees {devices} on this machine; "
            "start as many processes per machine as it has GPUs (torchrun --nproc_per_node)"
        )
    return rank, world, local_rank


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise RankError(
            f"{name}={text!r} is no number; let torchrun set it, or unset it for a single process"
        ) from None


def meet(rank: int, world: int, backend: str) -> dist.Store:
    """Return the store of this start, once all ranks are there.

    It is refused if they do not all come within MINUTES_TO_MEET.
    """
    host, port = _address(world)
    timeout = timedelta(minutes=MINUTES_TO_MEET)
    try:
        store: dist.Store = dist.TCPStore(
            host,
            port,
            is_master=rank == 0 and not _kept_by_torchrun(),
            timeout=timeout,
            wait_for_workers=False,
        )
        store = dist.PrefixStore(_attempt(), store)
        _check_in(store, rank, world, backend)
    except dist.DistError as error:
        raise RankError(_explain(error, rank, f"{host}:{port}")) from error
    return store


def watch_over(store: dist.Store, rank: int, world: int) -> None:
    """Have this rank end soon when another one is lost, from now on until `heartbeat.end`."""
    heartbeat.begin(store, _address(world), _attempt(), rank, world)


def _address(world: int) -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", 0)
    if not host or not port:
        raise RankError(
            f"WORLD_SIZE={world}, but MASTER_ADDR and MASTER_PORT, where the ranks meet, are not set; "
            "let torchrun set them, or unset WORLD_SIZE for a single process"
        )
    return host, port


def _kept_by_torchrun() -> bool:
    """Whether the store is that of torchrun, over all restarts; otherwise each start has one of its own."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt() -> str:
    """Keys of its own for every restart in a store that outlives it: a rank must not read the address of a
    dead one. Elsewhere the same for all: torchrun on a machine that joins later has counted fewer restarts.
    """
    return f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}" if _kept_by_torchrun() else "attempt"


def _check_in(store: dist.Store, rank: int, world: int, backend: str) -> None:
    """Tell the others who is here, and wait for them."""
    ours = f"WORLD_SIZE={world} and {backend}"
    heartbeat.announce(store, rank)
    store.set(f"rank {rank}", ours)
    if store.add(f"processes of rank {rank}", 1) > 1:
        raise RankError(
            f"two processes say that they are rank {rank}; give each a RANK of its own, "
            "and every run on this machine a MASTER_PORT of its own"
        )
    began, said = time.monotonic(), False
    missing = list(range(world))
    while missing:
        for other in [other for other in missing if store.check([f"rank {other}"])]:
            theirs = store.get(f"rank {other}").decode()
            if theirs != ours:
                raise RankError(f"rank {rank} has {ours}, rank {other} {theirs}; all ranks need the same")
            missing.remove(other)
        names = f"rank {', '.join(map(str, missing))} of {world}"
        waited = time.monotonic() - began
        if missing and waited > 60 * MINUTES_TO_MEET:
            raise RankError(
                f"{names} did not come within {MINUTES_TO_MEET:g} minutes; look for its own message "
                "(torchrun --tee 3), and start all ranks again"
            )
        if missing and not said and waited > SECONDS_OF_SILENCE:
            said = True
            print(f"rank {rank} waits for {names}", file=sys.stderr, flush=True)
        if missing:
            time.sleep(0.05)


def _explain(error: Exception, rank: int, where: str) -> str:
    """Return what torch says of a store that cannot be kept or reached."""
    if "EADDRINUSE" in str(error):
        return (
            f"rank {rank} cannot keep the ranks' meeting place at {where}: the port is in use, perhaps by "
            "another run; choose another MASTER_PORT, or let torchrun --standalone find one"
        )
    return (
        f"rank {rank} does not reach the ranks' meeting place at {where} within {MINUTES_TO_MEET:g} minutes, "
        "or lost it: rank 0 keeps it and may have ended (look for its message), or MASTER_ADDR and "
        f"MASTER_PORT name another place ({str(error).strip().splitlines()[0]})"
    )
