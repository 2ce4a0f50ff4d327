"""Several ranks on this machine, as processes that begin with everything imported."""

import multiprocessing.forkserver
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tracking import drawing

# What a rank would else import by itself, which takes longer than what it is started for.
IMPORTED = [
    *("conftest", "processes", "torch._dynamo", "torch.utils.tensorboard", "train"),
    *("data.vision", "tracking.tensorboard", "PIL.JpegImagePlugin", "PIL.PngImagePlugin"),
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def become_rank(rank: int, world: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], world: int = 2) -> None:
    """Call function(rank, *arguments) in so many processes of their own, and wait for all of them.

    As torch.multiprocessing.spawn, but they are forked from a server, which has trained nothing and holds
    nothing but imports, instead of each starting Python and torch anew.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        get_context("forkserver").set_forkserver_preload(IMPORTED)
        multiprocessing.forkserver.ensure_running()
    torch.multiprocessing.start_processes(
        call, (dict(os.environ), function, arguments), nprocs=world, start_method="forkserver"
    )


def call(rank: int, environment: dict[str, str], function: Callable[..., None], arguments: tuple) -> None:
    """What a process does, in the environment of the one that started it and not in that of the server."""
    os.environ.clear()
    os.environ.update(environment)
    drawing._figure = lambda width, height: None  # as in the fixture `figures`
    function(rank, *arguments)
