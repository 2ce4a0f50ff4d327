"""A rank that is lost, with its machine or its network, ends the others within a minute.

Without it they wait in a sum of gradients for as long as the process group does, half an hour: no packet says
that a machine has gone. Each rank tells the others through their store that it lives, and looks whether they
do; a process that notices a loss ends, and torchrun starts all again if it may.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

LOST_AFTER = "LOST_RANK_SECONDS"  # variable of the environment; 0 waits for ever
DEFAULT_SECONDS = 60.0
RESUMES = (
    "The run ends here. torchrun --max-restarts=n starts it again; otherwise the same command, on all "
    "machines, resumes from the last checkpoint"
)
SUSPENDED_SECONDS = 10.0  # between two looks that should be one second apart
LEFT = "left"  # what a rank says last that ends in order


class Heartbeat:
    """Tells the others from a thread that this rank lives, and ends this process when another one is lost.

    `address` is that of their store. Seconds are this machine's own: nobody's clock is compared.
    """

    def __init__(
        self, address: tuple[str, int], prefix: str, rank: int, names: Sequence[str], seconds: float
    ):
        self.address, self.prefix, self.rank, self.names = address, prefix, rank, names
        self.seconds, self.between = seconds, min(5.0, seconds / 6)
        now = time.monotonic()
        self.heard: dict[int, tuple[str, float]] = {r: ("", now) for r in range(len(names)) if r != rank}
        self.exchanged = now
        self.ended = threading.Event()
        self.threads = [
            threading.Thread(target=work, daemon=True, name=f"heartbeat: {work.__name__}")
            for work in (self._beat, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Take leave of the others."""
        self.ended.set()
        self.threads[0].join(timeout=self.between)

    def _beat(self) -> None:
        """Exchange beats with the others; what does not work is noticed by the other thread."""
        try:
            # A connection of its own: this rank may be waiting in another one.
            timeout = timedelta(seconds=self.seconds)
            store = dist.PrefixStore(
                self.prefix, dist.TCPStore(*self.address, timeout=timeout, wait_for_workers=False)
            )
            beat = 0
            while not self.ended.is_set():
                beat += 1
                store.set(beat_of(self.rank), str(beat))
                told = store.multi_get([beat_of(rank) for rank in self.heard])
                now = time.monotonic()
                for rank, theirs in zip(self.heard, (value.decode() for value in told), strict=True):
                    if theirs != self.heard[rank][0]:
                        self.heard[rank] = theirs, now
                self.exchanged = now
                self.ended.wait(self.between)
            store.set(beat_of(self.rank), LEFT)
        except (dist.DistError, RuntimeError):
            pass  # no further exchange, which the other thread notices

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self.ended.wait(1.0):
            now = time.monotonic()
            if now - looked > SUSPENDED_SECONDS:  # this process was suspended, perhaps with all others
                self.exchanged = now
                self.heard = {rank: (beat, now) for rank, (beat, _) in self.heard.items()}
            looked = now
            lost = self.lost(now)
            if lost:
                print(f"error: {lost}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread waits where no exception reaches it

    def lost(self, now: float) -> str | None:
        """Return who is lost, in words."""
        waits = f"within {self.seconds:g} seconds ({LOST_AFTER})"
        if any(beat == LEFT for beat, _ in self.heard.values()):
            return None  # the run is over, or ends with a message of its own
        if now - self.exchanged > self.seconds:
            where = "{}:{}".format(*self.address)
            return (
                f"rank {self.rank} on {self.names[self.rank]} did not reach the ranks' meeting place at "
                f"{where} {waits}: its machine, or the network between, is down. {RESUMES}"
            )
        silent = [rank for rank, (_, at) in self.heard.items() if now - at > self.seconds]
        if silent:
            names = ", ".join(f"rank {rank} on {self.names[rank]}" for rank in silent)
            return (
                f"nothing was heard of {names} {waits}: it was killed, or its machine or network is down. "
                f"{RESUMES}"
            )
        return None


def beat_of(rank: int) -> str:
    """Return the key under which a rank says that it lives."""
    return f"beat of rank {rank}"


def announce(store: dist.Store, rank: int) -> None:
    """Leave word of this rank, before anybody looks for its beats: it may die before the first of them."""
    store.set(f"machine of rank {rank}", socket.gethostname())
    store.set(beat_of(rank), "0")


_heartbeat: Heartbeat | None = None  # of this process


def begin(store: dist.Store, address: tuple[str, int], prefix: str, rank: int, world: int) -> None:
    """Watch over ranks that have all announced themselves in the store at `address`."""
    global _heartbeat
    seconds = seconds_until_lost()
    if seconds > 0:
        names = [store.get(f"machine of rank {other}").decode() for other in range(world)]
        _heartbeat = Heartbeat(address, prefix, rank, names, seconds)


def end() -> None:
    """Take leave of the other ranks, if there are any."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
        _heartbeat = None


def seconds_until_lost() -> float:
    """Return what the environment says, or the default."""
    try:
        return float(os.environ.get(LOST_AFTER, DEFAULT_SECONDS))
    except ValueError:
        return DEFAULT_SECONDS


def lost_connection(error: RuntimeError) -> str | None:
    """Return what to do if the error is that of gloo or the store when another rank's process has ended."""
    of_torch = isinstance(error, dist.DistError) or "gloo" in str(error)
    return f"Another rank has ended: look for its message. {RESUMES}." if of_torch else None
