"""Keep threads, signals and imports from working as usual, for tests of the executor."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TOO_LARGE_STACK = 1 << 62  # bytes


@contextmanager
def no_threads() -> Iterator[None]:
    """Keep this process from starting threads in the block, as at its limit (ulimit -u)."""
    before = threading.stack_size(TOO_LARGE_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def alarms_raise() -> Iterator[None]:
    """Install a handler of SIGALRM that raises TimeoutError."""

    def handler(_number: int, _frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


# A signal handler that raises an exception during an import leaves the lock locked like this.
LOCK_IMPORTS = "import _imp\n_imp.acquire_lock()"
