"""Calls on threads of our own, where no signal handler ever runs.

Python runs every signal handler in the main thread, between any two instructions, and a handler may
raise: KeyboardInterrupt, or a TimeoutError of an alarm. So whatever takes a lock or changes a
variable runs on another thread, and the caller only waits. An exception that ends the caller's wait
leaves nothing half done: the call is given up, and ends by itself at its next safe place.

A fork in any thread waits for the end of the block `with no_fork`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from _queue import Empty, SimpleQueue  # as `queue` has them, which loads other kinds besides
from _thread import start_new_thread
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.errors import NoThreadError

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.1  # between two looks of a waiting thread at whether its call is given up
NO_THREAD = (
    "No thread can be started in this process, so nothing was changed. Look at its limits: "
    "ulimit -u, and pids.max of its control group."
)
DONE = object()

# Keeps other threads from forking. A child that is forked while a lock is taken but not yet noted
# would keep it for ever; one that is forked while a module is imported would wait for it for ever.
# A plain `with no_fork:` holds also where a signal handler raises: Python runs none between taking
# a lock and entering the block.
no_fork = threading.RLock()

_local = threading.local()


class GivenUpError(BaseException):
    """Ends a call whose caller has gone; never seen outside of its thread."""


class Call:
    """A function to be called on another thread, and what comes of it.

    caller: the thread that asked for it. thread: the one that makes it, 0 before that.
    until: how long it may wait behind a call that waits for a device, by time.monotonic().
    is_awaited: its caller waits for it.
    given_up: why nobody waits for it any more, empty as long as somebody does.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, until: float = math.inf
    ) -> None:
        self.request = function, arguments
        self.caller = threading.get_ident()
        self.thread = 0
        self.until = until
        self.is_awaited = True
        self.is_done = False
        self.answer: Any = None
        self.error: BaseException | None = None
        self.given_up = ""
        self._news: SimpleQueue[Any] = SimpleQueue()
        self._making = threading.Lock()

    def make(self) -> None:
        """Make the call on the thread that is meant for it; a second thread only waits for it."""
        with self._making:
            if not self.is_done:
                self._make()

    def _make(self) -> None:
        function, arguments = self.request
        self.thread = threading.get_ident()
        before, _local.call = getattr(_local, "call", None), self
        try:
            if not self.given_up:
                self.answer = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        finally:
            _local.call = before
        self.is_done = True
        self._news.put(DONE)

    def tell(self, progress: Any) -> None:
        """Tell the caller how the call stands."""
        self._news.put(progress)

    def wait(
        self, show: Callable[[Any], object] = lambda _: None, limit_s: float | None = None
    ) -> bool:
        """Wait for the end of the call, and show how it stands; False if limit_s is over."""
        while True:
            try:
                news = self._news.get(block=not self.is_done, timeout=limit_s)
            except Empty:
                return self.is_done
            if news is DONE:
                return True
            show(news)

    def result(self) -> Any:
        """Return the answer, or raise the error, of a call that is done."""
        error, self.error = self.error, None
        if error is None:
            return self.answer
        try:
            raise error
        finally:
            del error  # this frame is in its traceback: each would keep the other alive


class Caller:
    """Makes calls one after the other, on one thread, and between them the steps of a schedule.

    The thread lives as long as there is something to do. step: does what is due; returns the
    seconds until it is to be called again, None for never.
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._calls: deque[Call] = deque()  # the first one is being made
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._is_serving = threading.Lock()
        self._thread = 0

    @property
    def is_own_thread(self) -> bool:
        """Tell whether this code runs on the thread that makes the calls."""
        return self._thread == threading.get_ident()

    @property
    def is_busy(self) -> bool:
        """Tell whether a call is being made."""
        return bool(self._calls)

    def calls_of(self, thread: int) -> list[Call]:
        """Return the calls of a thread that are not done yet."""
        return [
            call
            for call in [*self._calls]
            if call.caller == thread and not (call.is_done or call.given_up)
        ]

    def post(self, call: Call) -> None:
        """Begin a call. Raises NoThreadError where no thread can be had for it."""
        self._calls.append(call)
        self._wakeups.put(None)
        try:
            # A new one each time, as nobody could tell whether the last one is about to end: it
            # ends at once where another one serves.
            _start(self._serve)
        except NoThreadError:
            with suppress(ValueError):
                self._calls.remove(call)
            raise

    def wake(self) -> None:
        """Let the schedule look at how things stand now."""
        self._wakeups.put(None)

    def between(self) -> None:
        """Do what can't wait, from within a call that waits for a device."""
        checkpoint()
        self._step()
        for call in [*self._calls][1:]:
            if time.monotonic() >= call.until and not call.is_done:
                call.make()

    def _serve(self) -> None:
        while self._calls and self._is_serving.acquire(blocking=False):
            try:
                self._thread = threading.get_ident()
                self._make_calls()
            finally:
                self._thread = 0
                self._is_serving.release()

    def _make_calls(self) -> None:
        pause_s: float | None = 0.0
        while pause_s is not None:
            while self._calls:
                if not self._calls[0].is_done:
                    self._calls[0].make()
                self._calls.popleft()
            pause_s = self._step()
            if pause_s is not None:
                with suppress(Empty):
                    self._wakeups.get(timeout=max(0.0, min(pause_s, threading.TIMEOUT_MAX)))


def _start(function: Callable[[], object]) -> None:
    """Start a thread in one step: a signal handler that raises in Thread.start() would break it."""
    try:
        start_new_thread(function, ())
    except RuntimeError as error:
        raise NoThreadError(NO_THREAD) from error


def apart(
    function: Callable[..., Any], *arguments: Any, show: Callable[[Any], object] = lambda _: None
) -> Any:
    """Call a function on a thread of its own; returns what it returns, raises what it raises.

    show: is told what the function tells of its progress.
    """
    if holds_off_forks():
        return function(*arguments)
    call = Call(function, *arguments)
    try:
        _start(call.make)
        call.wait(show)
    except NoThreadError:
        raise
    except BaseException:
        call.given_up = "its caller has gone"
        _start(call.make)  # the first thread may not have been started
        call.wait()
        raise
    return call.result()


def holds_off_forks() -> bool:
    """Tell whether this thread is in a block of `no_fork`, so that it must not wait for another.

    A signal handler may run there, while a module of ours is imported.
    """
    is_owned: bool = no_fork._is_owned()  # type: ignore[attr-defined] # noqa: SLF001
    return is_owned


def tell(progress: Any) -> None:
    """Tell the caller of the call that runs on this thread how it stands."""
    call: Call | None = getattr(_local, "call", None)
    if call:
        call.tell(progress)


def caller() -> int:
    """Return the thread for which this code works: of a call the one that asked for it."""
    call: Call | None = getattr(_local, "call", None)
    return call.caller if call else threading.get_ident()


def checkpoint() -> None:
    """Raise GivenUpError in a call that nobody waits for any more: nothing is half done here."""
    call: Call | None = getattr(_local, "call", None)
    if call and call.given_up:
        raise GivenUpError(call.given_up)


def sleep(seconds: float) -> None:
    """Sleep, unless this call is given up."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(left_s, POLL_S))


class Late:
    """A module of ours that most processes never need: its first use imports it.

    name: below `reserve_gpu`, as `reservation.quota`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by what looks through all names, as %autoreload does
            raise AttributeError(name)
        with no_fork:
            module = __import__(f"reserve_gpu.{self._name}", fromlist=["*"])
        return getattr(module, name)


# At import: a fork that has begun asks for no more hooks. Those of a reload do no harm.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release
    )
