"""A thread for calls into a library that may hang.

Nothing ends a call into a library from outside. So no other thread makes such a call: it waits for
a worker thread that does, and a wait can be ended at any time.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.errors import NoThreadError
from reserve_gpu.model.progress import Slow
from reserve_gpu.system import executor
from reserve_gpu.system.executor import POLL_S, Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from reserve_gpu.system.executor import T, Ts

SLOW_S = 2.0  # after that the caller is told what is waited for

# Calls that hang, of all workers, each with its process and what it does. A worker waits for such a
# call before it makes the same one, so that repeated readings do not leave one thread each.
_hanging: list[tuple[int, Call[Any], str]] = []


class HangError(Exception):
    """A call that does not return; the text says which, and how long it was waited for."""


class Worker:
    """A thread that makes calls, one after the other; one that hangs is replaced by a new one.

    doing: what each thread does now, in words, by the thread's identifier; the calls write it.
    Raises NoThreadError.
    """

    def __init__(self) -> None:
        self.doing: dict[int, str] = {}
        self._hanging: list[Call[Any]] = []
        self._start_thread()

    def post(self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> Call[T]:
        """Begin a call, to be waited for later; of one that hangs, that call itself."""
        call = Call(function, *arguments)
        for hanging in self._hanging:
            if hanging.request == call.request and not hanging.is_done:
                return hanging
        self._calls.put(call)
        return call

    def wait(self, call: Call[T], limit_s: float) -> T:
        """Return what the call returns, or raise its error; HangError after limit_s seconds.

        The caller is told of one that takes long.
        """
        start = time.monotonic()
        try:
            while not call.given_up and not call.wait(limit_s=min(POLL_S, limit_s)):
                executor.checkpoint()
                waited_s = time.monotonic() - start
                if waited_s >= SLOW_S:
                    executor.tell(Slow(self.doing.get(call.thread, ""), waited_s))
                if waited_s >= limit_s:
                    self._give_up(call, f"no answer within {limit_s:g} s")
        except BaseException:  # its caller has gone
            self._give_up(call, "no answer yet when it was interrupted")
            raise
        if call.given_up:
            raise HangError(call.given_up)
        return call.result()

    def is_stuck(self) -> bool:
        """Tell whether a call hangs."""
        return not all(call.is_done for call in self._hanging)

    def end(self) -> None:
        """Let the thread end when it has made the calls that were begun."""
        self._calls.put(None)

    def _start_thread(self) -> None:
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        executor.start(_make_calls, self._calls)

    def _give_up(self, call: Call[Any], reason: str) -> None:
        """Leave a thread that hangs to itself: it ends when its call does."""
        if call.is_done:
            return
        elsewhere = None if call.thread else _what_hangs(call)
        what = self.doing.get(call.thread) or elsewhere or "another call comes first"
        call.given_up = f"{reason} ({what})"
        if elsewhere:  # the thread only waits for that call, and goes on
            return
        self._hanging = [each for each in (*self._hanging, call) if not each.is_done]
        _hanging[:] = [each for each in _hanging if not each[1].is_done]
        if call.thread:  # else it is never made
            _hanging.append((os.getpid(), call, what))
        self.end()
        with suppress(NoThreadError):  # no more threads may be started: then all calls hang
            self._start_thread()


def _make_calls(posted: SimpleQueue[Call[Any] | None]) -> None:
    while call := posted.get():
        while _hanging and not call.given_up and _what_hangs(call):
            time.sleep(POLL_S)
        call.make()
        del call  # while this waits for the next one, nothing of the last one is kept alive


def _what_hangs(call: Call[Any]) -> str | None:
    """Return the activity of a call that hangs in another worker; None if no such call hangs."""
    same = (os.getpid(), *_identity(call))
    for pid, each, what in _hanging:
        if not each.is_done and (pid, *_identity(each)) == same:
            return what
    return None


def _identity(call: Call[Any]) -> tuple[object, tuple[object, ...]]:
    function, arguments = call.request
    return getattr(function, "__func__", function), arguments
