"""One thread at a time changes what this process holds, and nothing interrupts it half-way.

Not Ctrl-C (see interrupts.py), and not a handler of another signal that calls reserve() or
release(): what it asks for is done at the end of the turn, or refused.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reserve_gpu import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLL_S = 0.1  # between two questions whether to go on waiting for another thread


class Turn:
    """What a thread takes to change something.

    is_waiting: the thread that has it waits in the queue.
    """

    def __init__(self) -> None:
        # Reentrant, as a handler of a signal may run just before a turn, or just after it.
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._actions: list[Callable[[], object]] = []  # for the end of the turn
        self.is_waiting = False

    @property
    def is_own(self) -> bool:
        """Whether this thread has it, so that this is a handler of a signal."""
        return self._thread == threading.get_ident()

    @property
    def is_taken(self) -> bool:
        """Whether any thread has it."""
        return self._thread is not None

    @contextmanager
    def take(self, ask: Callable[[], object]) -> Iterator[None]:
        """Have the turn in the block.

        ask: called now and then while another thread has it; may raise what ends the wait.
        """
        with interrupts.deferred():
            while not self._lock.acquire(timeout=POLL_S):
                interrupts.checkpoint()
                ask()
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._end()

    def at_end(self, action: Callable[[], object]) -> None:
        """Let the thread that has the turn do something at its end; called by that thread."""
        self._actions.append(action)

    def _end(self) -> None:
        while self._thread is not None:
            actions, self._actions = self._actions, []
            for action in actions:
                action()
            self._thread = None
            if self._actions:  # a handler came just now
                self._thread = threading.get_ident()
        self._lock.release()
