"""Log the warnings that neither a cell nor a caller shows."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import closing, suppress

from reserve_gpu.system import executor
from reserve_gpu.system.nonblocking import Printer

LIMIT_S = 1.0  # for a reader that may not read

_threads: dict[int, executor.Executor] = {}  # by process, as a fork inherits no thread


def warn(text: str, error: BaseException | None = None) -> None:
    """Log a warning.

    The caller waits only for a short time, because a handler that writes to a full pipe would
    otherwise keep the GPU for ever. Such a handler still blocks the exit of Python, which waits for
    the handler's lock. That applies only to handlers that the user has added: without any, the
    warning is printed to stderr without waiting for the reader.

    Args:
        text: What to log.
        error: The exception whose traceback is logged as well.
    """
    thread = _threads.setdefault(os.getpid(), executor.Executor(lambda: None))
    with suppress(Exception):  # the user's handler fails, or no thread can start
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
    """Return the text that logging would print; None if the user's settings suppress it."""
    level = logging.WARNING
    if not logger.isEnabledFor(level) or level < handler.level:
        return None
    exception = None if error is None else (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, level, __file__, 0, "%s", (text,), exception)
    for each in (logger, handler):
        passed: object = each.filter(record)
        if not passed:
            return None
        if isinstance(passed, logging.LogRecord):  # since Python 3.12
            record = passed
    return handler.format(record)
