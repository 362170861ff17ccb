"""Log warnings that can't be shown in a cell or returned to a caller."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import closing, suppress

from reserve_gpu.system import executor
from reserve_gpu.system.nonblocking import Printer

LIMIT_S = 1.0  # maximum seconds to wait for the warning to be written

# One executor per process id, because a forked child does not inherit threads.
_threads: dict[int, executor.Executor] = {}


def warn(text: str, error: BaseException | None = None) -> None:
    """Log a warning.

    The caller waits for at most `LIMIT_S`. Without this limit, a logging handler blocked by a full
    pipe would keep the GPU reserved forever. Such a handler still prevents Python from exiting,
    because Python waits for the handler's lock. If the user has not added a handler, the warning is
    printed to stderr with the same time limit.

    Args:
        text: The warning.
        error: An exception to log with its traceback.
    """
    thread = _threads.setdefault(os.getpid(), executor.Executor(lambda: None))
    with suppress(Exception):  # the user's handler failed, or no thread could be started
        thread.run_within(LIMIT_S, _log, text, error)


def _log(text: str, error: BaseException | None) -> None:
    logger, last = logging.getLogger("reserve_gpu"), logging.lastResort
    is_stderr = isinstance(last, logging.StreamHandler) and last.stream is sys.stderr
    if logger.hasHandlers() or (last and not is_stderr):
        logger.warning("%s", text, exc_info=error)
    elif last and sys.stderr and (line := _line(logger, last, text, error)):
        with closing(Printer(sys.stderr)) as printer:
            printer.print(line + "\n", LIMIT_S)


def _line(
    logger: logging.Logger, handler: logging.Handler, text: str, error: BaseException | None
) -> str | None:
    """Return the warning as logging would print it, or None if the user's settings suppress it."""
    level = logging.WARNING
    if not logger.isEnabledFor(level) or level < handler.level:
        return None
    exception = None if error is None else (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, level, __file__, 0, "%s", (text,), exception)
    for each in (logger, handler):
        passed: object = each.filter(record)
        if not passed:
            return None
        if isinstance(passed, logging.LogRecord):  # since Python 3.12, a filter can return a record
            record = passed
    return handler.format(record)
