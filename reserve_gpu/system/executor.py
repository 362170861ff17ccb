"""Calls on threads of our own, where no signal handler ever runs.

Python runs every signal handler in the main thread, between any two instructions, and a handler may
raise: KeyboardInterrupt, or a TimeoutError of an alarm. So whatever takes a lock or changes a
variable runs on another thread, and the caller only waits. An exception that ends the caller's wait
leaves nothing half done: the call is given up, and ends by itself at its next safe place.

A fork in any thread waits for the end of the block `with no_fork`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from _thread import start_new_thread
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reserve_gpu.model.errors import NoThreadError, RequestError
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")

POLL_S = 0.1  # between two looks of a waiting thread at whether its call is given up
NO_THREAD = (
    "No thread can be started in this process, so nothing was changed. Look at its limits: "
    "ulimit -u, and pids.max of its control group."
)
# A handler of a signal makes a call while another call runs.
NESTED = (
    "This process is reserving, releasing or looking already, and a handler of a signal has "
    "interrupted that. Try again when it is done."
)
DONE = object()


class _Local(threading.local):
    call: Call[Any] | None = None  # which this thread makes


_local = _Local()


class GivenUpError(BaseException):
    """Ends a call whose caller has gone; never seen outside of its thread."""


class Call(Generic[T]):
    """A function to be called on another thread, and what comes of it.

    caller: the thread that asked for it. thread: the one that makes it, 0 before that.
    until: for how long it may wait behind a call that waits for a device, by time.monotonic().
    is_awaited: its caller waits for it.
    given_up: why nobody waits for it any more, empty as long as somebody does.
    """

    answer: T  # of a call that is done

    def __init__(
        self,
        function: Callable[[Unpack[Ts]], T],
        *arguments: Unpack[Ts],
        until: float = 0.0,
        is_awaited: bool = True,
    ) -> None:
        self.request: tuple[Callable[..., T], tuple[object, ...]] = function, arguments
        self.caller = threading.get_ident()
        self.thread = 0
        self.until = until
        self.is_awaited = is_awaited
        self.is_done = False
        self.error: BaseException | None = None
        self.given_up = ""
        self._news: SimpleQueue[Any] = SimpleQueue()

    @property
    def is_over(self) -> bool:
        """Tell whether nobody waits for it any more."""
        return self.is_done or bool(self.given_up)

    @property
    def has_answer(self) -> bool:
        """Return whether the call is done and its function has returned."""
        return self.is_done and self.error is None

    def make(self) -> None:
        """Make the call, on the thread that is meant for it."""
        function, arguments = self.request
        self.thread = threading.get_ident()
        before, _local.call = _local.call, self
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
        while not self.is_done:
            try:
                news = self._news.get(timeout=limit_s)
            except Empty:
                return self.is_done
            if news is not DONE:
                show(news)
        return True

    def result(self) -> T:
        """Return the answer, or raise the error, of a call that is done."""
        error, self.error = self.error, None
        if error is None:
            return self.answer
        try:
            raise error
        finally:
            del error  # this frame is in its traceback: each would keep the other alive


class Executor:
    """Makes calls one after the other, on one thread, and between them the steps of a schedule.

    The thread lives as long as there is something to do.

    step: does what is due; returns the seconds until it is to be called again, None for never. It
    is called after each call, too. It raises nothing.
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._due = 0.0  # when to call it again, by time.monotonic()
        self._calls: deque[Call[Any]] = deque()  # the first one is being made
        self._is_serving = threading.Lock()
        # Open once somebody has rung it. An Event would not do: a signal handler may ring it, too.
        self._bell = threading.Lock()
        self._thread = 0

    @property
    def is_own_thread(self) -> bool:
        """Tell whether this code runs on the thread that makes the calls."""
        return self._thread == threading.get_ident()

    @property
    def is_busy(self) -> bool:
        """Tell whether a call is being made."""
        return any(not call.is_over for call in [*self._calls])

    @property
    def is_nested(self) -> bool:
        """Tell whether a signal handler has come in the midst of what the thread may wait for.

        That is a call of this package, an import, or a fork.
        """
        under_way = self._calls_of(threading.get_ident())
        return any(call.is_awaited for call in under_way) or is_mine(no_fork)

    def _calls_of(self, thread: int) -> list[Call[Any]]:
        """Return the calls that a thread waits for; meanwhile it runs only signal handlers."""
        return [call for call in [*self._calls] if call.caller == thread and not call.is_over]

    def run(
        self,
        function: Callable[[Unpack[Ts]], T],
        *arguments: Unpack[Ts],
        show: Callable[[Any], object] = lambda _: None,
        until: float = 0.0,
        undo: Callable[[Call[T]], object] = lambda _: None,
    ) -> T:
        """Call the function on the thread; returns what it returns, raises what it raises.

        show: is told what the function tells of its progress.
        until: for how long it may wait behind a call that waits for a device, by time.monotonic().
        undo: is called on the thread after a call that is given up, with that call.
        Where an exception ends the wait for the answer, the call is given up, and has ended.
        Raises NoThreadError, before the function is called, and RequestError in a signal handler
        that came in the midst of another call.
        """
        if self.is_own_thread:
            return function(*arguments)
        if self.is_nested:
            raise RequestError(NESTED)
        call = Call(function, *arguments, until=until)
        try:
            self.post(call)
            call.wait(show)
            for later in self._calls_of(call.caller):  # of signal handlers meanwhile
                later.wait()
            if call.error is None:
                return call.answer
        except BaseException:
            if not call.given_up:  # else no thread can be had
                call.given_up = "its caller has gone"
                end = Call(undo, call, is_awaited=False)  # which comes after it
                self.post(end)
                end.wait()
            raise
        return call.result()

    def run_in_any_case(
        self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]
    ) -> T | None:
        """Call the function, which gives something back, on the thread.

        It is called even if an exception ends the wait for it, then perhaps twice. From a signal
        handler, or a finalizer, in the midst of a call it is called at the end of that. Where no
        thread can be had, as at the end of Python 3.12, it is called on this one.
        """
        if self.is_nested or self.is_own_thread or _local.call:
            self.post(Call(function, *arguments, until=math.inf, is_awaited=False))
            return None
        try:
            return self.run(function, *arguments, undo=lambda _: function(*arguments))
        except NoThreadError:
            return function(*arguments)

    def run_within(
        self, limit_s: float, function: Callable[[Unpack[Ts]], object], *arguments: Unpack[Ts]
    ) -> None:
        """Call the function on the thread, and wait for its end for so long at most.

        Raises what it raises, and NoThreadError.
        """
        call = Call(function, *arguments)
        self.post(call)
        try:
            if call.wait(limit_s=limit_s):
                call.result()
        finally:
            call.is_awaited = False

    def post(self, call: Call[Any]) -> None:
        """Begin a call. Raises NoThreadError where no thread can be had for it."""
        self._calls.append(call)
        self.wake()
        if self._is_serving.locked():
            return  # that thread looks for calls once more after it has unlocked this
        try:
            start(self._serve)
        except NoThreadError:
            call.given_up = "no thread can be had for it"
            raise

    def wake(self) -> None:
        """Let the schedule look at how things stand now."""
        with suppress(RuntimeError):  # it has been rung
            self._bell.release()

    def between(self) -> None:
        """Do what can't wait, from within a call that waits for a device."""
        checkpoint()
        if self._bell.acquire(blocking=False) or time.monotonic() >= self._due:
            self._take_step()
        for call in [*self._calls][1:]:
            if time.monotonic() >= call.until and not call.is_done:
                call.make()

    def _serve(self) -> None:
        while self._calls and self._is_serving.acquire(blocking=False):
            self._thread = threading.get_ident()
            pause_s: float | None = 0.0
            try:
                while pause_s is not None:
                    self._bell.acquire(timeout=max(0.0, min(pause_s, threading.TIMEOUT_MAX)))
                    while self._calls:
                        if not self._calls[0].is_done:
                            self._calls[0].make()
                        self._calls.popleft()
                    pause_s = self._take_step()
            finally:
                self._thread = 0
                self._is_serving.release()

    def _take_step(self) -> float | None:
        pause_s = self._step()
        self._due = math.inf if pause_s is None else time.monotonic() + pause_s
        return pause_s


def start(function: Callable[[Unpack[Ts]], object], *arguments: Unpack[Ts]) -> None:
    """Call the function on a new thread. Raises NoThreadError.

    Not by threading.Thread: its start() takes several steps, and a signal handler that raises
    between two of them ends the new thread as well.
    """
    try:
        start_new_thread(function, arguments)
    except RuntimeError as error:
        raise NoThreadError(NO_THREAD) from error


def apart(
    function: Callable[[Unpack[Ts]], T],
    *arguments: Unpack[Ts],
    show: Callable[[Any], object] = lambda _: None,
) -> T:
    """Call a function on a thread of its own; returns what it returns, raises what it raises.

    A signal handler that came while the main thread imports a module of ours waits for no other
    thread, which might need that module too.
    """
    if is_mine(no_fork):
        return function(*arguments)
    return Executor(lambda: None).run(function, *arguments, show=show)


def tell(progress: Any) -> None:
    """Tell the caller of the call that runs on this thread how it stands."""
    if _local.call:
        _local.call.tell(progress)


def caller() -> int:
    """Return the thread for which this code works: of a call the one that asked for it."""
    return _local.call.caller if _local.call else threading.get_ident()


def is_mine(lock: Any) -> bool:
    """Tell whether this thread has the RLock."""
    return bool(lock._is_owned())  # noqa: SLF001 - as threading.Condition asks


def checkpoint() -> None:
    """Raise GivenUpError in a call that nobody waits for any more: nothing is half done here."""
    if _local.call and _local.call.given_up:
        raise GivenUpError(_local.call.given_up)


def sleep(seconds: float) -> None:
    """Sleep, unless this call is given up."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(left_s, POLL_S))


def wait_for(look: Callable[[], T], limit_s: float, poll_s: float) -> T:
    """Look again and again until there is an answer that is true; returns the last answer.

    limit_s: seconds after which that is given up. It can't be interrupted, as `sleep` can.
    """
    until = time.monotonic() + limit_s
    while not (answer := look()) and time.monotonic() < until:
        time.sleep(poll_s)
    return answer


def survive_reload(name: str, make: Callable[[], T]) -> T:
    """Return this process's value of that name, which is made once and survives a reload.

    %autoreload empties a module whose file has changed, while the locks in it stay locked. A module
    without a file is never reloaded.
    """
    store = sys.modules.setdefault("reserve_gpu.kept", ModuleType("reserve_gpu.kept"))
    value: T = vars(store).setdefault(name, make())
    return value
