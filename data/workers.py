"""The processes that read images beside a run: which signals end them."""

from __future__ import annotations

import os
import signal
from threading import Thread


def outlive_signals(worker: int) -> None:
    """The `worker_init_fn` of every loader: only its own run may end a worker.

    A terminal or a cluster signals every process of a run. The run then saves, and needs its workers until it
    has. A run that fails sends SIGTERM to its workers and waits for them, so that one has to be obeyed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS cannot tell who sent a signal: there SIGTERM ends a worker
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # and so in every thread to come
        Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
