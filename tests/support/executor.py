"""Helpers of tests: executor."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE = 1 << 62  # bytes of stack, which no thread can be given


@contextmanager
def no_threads() -> Iterator[None]:
    """Let this process start no thread in the block, as at its limit (ulimit -u)."""
    before = threading.stack_size(HUGE)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def raising() -> Iterator[None]:
    """Let a handler of SIGALRM raise TimeoutError."""

    def handler(_number: int, _frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


LOCK_IMPORTS = "import _imp\n_imp.acquire_lock()"  # as a handler that raises in an import does
