"""Log the warnings that neither a cell nor a caller shows."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial

from reserve_gpu import calls

LIMIT_S = 1.0  # for a handler, whose reader may not read

_threads: dict[int, calls.Executor] = {}  # by process, as a fork inherits no thread


def warn(text: str, error: BaseException | None = None) -> None:
    """Log a warning.

    The thread that ends reservations waits only for a short time: a handler that writes to a full
    pipe would otherwise keep the GPU for ever.

    Args:
        text: What to log.
        error: The exception whose traceback is logged as well.
    """
    log = partial(logging.getLogger("reserve_gpu").warning, "%s", text, exc_info=error)
    thread = _threads.setdefault(os.getpid(), calls.Executor(lambda: None))
    with suppress(Exception):  # the user's handler fails, or no thread can start
        thread.run_within(LIMIT_S, log)
