"""A thread for calls into a library that may hang.

Python handles Ctrl-C only when a call into a library returns. So the main thread never makes such
a call: it waits for a worker thread that does, and a wait can be ended at any time.
"""

from __future__ import annotations

from _queue import Empty, SimpleQueue  # as `queue` has them, which loads other kinds besides
from _thread import get_ident, start_new_thread
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable


class HangError(Exception):
    """A call that does not return; the text says which, and how long it was waited for."""


class Call:
    """A call on the worker thread, and what came of it.

    thread: the identifier of the thread that makes it, 0 before it is made.
    given_up: why nobody waits for it any more.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.request = function, arguments
        self.thread = 0
        self.is_done = False
        self.answer: Any = None
        self.error: BaseException | None = None
        self.given_up: str | None = None
        self.done: SimpleQueue[None] = SimpleQueue()  # wakes up the thread that waits

    def make(self) -> None:
        """Make it, on the worker thread."""
        function, arguments = self.request
        self.thread = get_ident()
        try:
            self.answer = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        self.is_done = True
        self.done.put(None)


class Worker:
    """A thread that makes calls, one after the other; one that hangs is replaced by a new one.

    doing: what each thread does now, in words, by the thread's identifier; the calls write it.
    """

    def __init__(self) -> None:
        self.doing: dict[int, str] = {}
        self._hanging: list[Call] = []
        self._start_thread()

    def post(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Begin a call, to be waited for later; of one that hangs, that call itself."""
        call = Call(function, arguments)
        self._forget_those_done()
        for hanging in self._hanging:
            if hanging.request == call.request:
                return hanging
        self._calls.put(call)
        return call

    def wait(self, call: Call, limit_s: float) -> Any:
        """What the call returns or raises; HangError if it hangs. limit_s: how long that takes."""
        try:
            with interrupts.allowed():
                if not (call.is_done or call.given_up):
                    call.done.get(timeout=limit_s)
        except Empty:
            self._give_up(call, f"no answer within {limit_s:g} s")
        except BaseException:  # Ctrl-C
            self._give_up(call, "no answer yet when it was interrupted")
            raise
        if not call.is_done:
            raise HangError(call.given_up)
        error, call.error = call.error, None
        if error is None:
            return call.answer
        try:
            raise error
        finally:
            del error  # this frame is in its traceback: each would keep the other alive

    def is_stuck(self) -> bool:
        """Whether a call hangs."""
        self._forget_those_done()
        return bool(self._hanging)

    def end(self) -> None:
        """Let the thread end when it has made the calls that were begun."""
        self._calls.put(None)

    def _start_thread(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        # Not threading.Thread: its start() waits until the thread runs, and Ctrl-C in that wait
        # would leave a worker that is started but not known.
        start_new_thread(_make_calls, (self._calls,))

    def _give_up(self, call: Call, reason: str) -> None:
        """Leave a thread that hangs to itself: it ends when its call does."""
        if call.is_done:
            return
        call.given_up = f"{reason} ({self.doing.get(call.thread, 'another call comes first')})"
        self._hanging.append(call)
        self.end()
        with suppress(RuntimeError):  # no more threads may be started: then all calls hang
            self._start_thread()

    def _forget_those_done(self) -> None:
        self._hanging = [call for call in self._hanging if not call.is_done]


def _make_calls(calls: SimpleQueue[Call | None]) -> None:
    while call := calls.get():
        call.make()
        del call  # while this waits for the next one, nothing of the last one is kept alive
