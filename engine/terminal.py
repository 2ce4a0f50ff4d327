"""How a program ends: its exit codes, and a user's mistakes without a traceback."""

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from tqdm import tqdm

from configs.errors import UserError
from tracking.text import printable

USER_ERROR = 2
STOPPED_BY_SIGNAL = 75  # everything is saved, and the same command resumes


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Return the main function of a program, which tells of a mistake that its
    user can mend and exits with 2.
    """

    @wraps(main)
    def guarded(*arguments: Any, **options: Any) -> int:
        try:
            return main(*arguments, **options)
        except UserError as error:
            lines = map(printable, error.report().splitlines())
            tqdm.write("\n".join(lines), file=sys.stderr)  # not behind a progress bar
            return USER_ERROR

    return guarded


def exit_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Exit with the code of `main`; without a traceback where nobody reads its output any more,
    as in `... | head`.
    """
    try:
        try:
            sys.exit(main(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes
        sys.exit(128 + signal.SIGPIPE)
