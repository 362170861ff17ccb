"""Calls into a library that may hang, made on a thread of their own.

A call that hangs in a driver can't be interrupted: Python notices Ctrl-C only when it returns. So
the thread that the person waits on never makes such a call; it waits for the answer, which it can
stop doing at any time.
"""

from __future__ import annotations

from _thread import start_new_thread
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Caller:
    """Makes calls on a background thread, one after the other.

    limit_s: seconds after which a call counts as hanging. doing: what a call does just now.
    """

    def __init__(self, limit_s: float, doing: Callable[[], str]) -> None:
        self.limit_s = limit_s
        self.stuck = False
        self._doing = doing
        # Calls that hang, with the queue that each will answer in, and what is said of it.
        self._hanging: list[tuple[Any, SimpleQueue[Any], str]] = []
        self._start()

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the thread call the function, while this one does something else until `answer`.

        Not while the same call hangs already: each look of a wait would leave a thread behind.
        """
        self._call = function, arguments
        self._hanging = [one for one in self._hanging if one[1].empty()]
        self._known = next((said for call, _, said in self._hanging if call == self._call), None)
        if self._known is None:
            self._queues[0].put(self._call)

    def answer(self) -> Any:
        """Return or raise what the posted call does; TimeoutError if it hangs from now on."""
        if self._known is not None:
            raise TimeoutError(self._known)
        try:
            value, error = self._queues[1].get(timeout=self.limit_s)
        except Empty:
            raise TimeoutError(self._abandon()) from None
        except BaseException:
            self._abandon()
            raise
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # it has this frame, in its traceback: a cycle for the garbage collector

    def close(self) -> None:
        """Let the thread end."""
        self._queues[0].put(None)

    def _start(self) -> None:
        self._queues: tuple[SimpleQueue[Any], SimpleQueue[Any]] = (SimpleQueue(), SimpleQueue())
        start_new_thread(_serve, self._queues)  # Thread.start() is not safe from Ctrl-C

    def _abandon(self) -> str:
        """Leave the hanging thread to itself, which ends when its call does; says what it does."""
        said = f"no answer within {self.limit_s:g} s ({self._doing()})"
        self._hanging.append((self._call, self._queues[1], said))
        self.stuck = True
        self.close()
        self._start()
        return said


def _serve(calls: SimpleQueue[Any], answers: SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        function, arguments = call
        try:
            answers.put((function(*arguments), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            answers.put((None, error))
        del call, function, arguments
