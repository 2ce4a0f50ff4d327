"""How a program ends."""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

STOPPED_BY_SIGNAL = 75  # everything is saved, and the same command goes on


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Exit with the code of `main`; without a traceback where nobody reads its output any more, as in `... | head`."""
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
        sys.exit(128 + signal.SIGPIPE)
