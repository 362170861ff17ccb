"""Calls on worker threads, where signal handlers never run.

Python runs signal handlers in the main thread, between any two instructions. A handler may raise an
exception, such as KeyboardInterrupt, or TimeoutError after an alarm. So code that takes locks or
sets variables runs on a worker thread while the caller waits. If an exception ends the caller's
wait, the call is given up and ends at its next checkpoint, so that no change is left half made.

A `with no_fork` block delays forks in all threads until it ends.
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

POLL_S = 0.1  # seconds between two checks whether a call is given up
NO_THREAD = (
    "This process can't start a thread, so nothing was changed. Check its limits: ulimit -u, and "
    "pids.max of its control group."
)
# The error if a signal handler makes a call while the interrupted thread waits for another call.
NESTED = (
    "This process is already reserving, releasing or reading GPUs, and a signal handler "
    "interrupted it. Try again when the interrupted operation has finished."
)
DONE = object()


class _Local(threading.local):
    call: Call[Any] | None = None  # the call that this thread is making


_local = _Local()


class GivenUpError(BaseException):
    """Ends a call that was given up; it never leaves the worker thread."""


class Call(Generic[T]):
    """A function call on another thread, and its result.

    Attributes:
        caller: The identifier of the thread that requested the call.
        thread: The identifier of the thread that makes the call, or 0 before it starts.
        until: The deadline by time.monotonic(). If another call is waiting for a device, this call
            waits behind it until the deadline, and is then made during that call.
        is_awaited: Whether the caller waits for the end of the call.
        given_up: The reason why the call was given up, or an empty string if it was not.
    """

    answer: T  # the result; only set if the call has succeeded

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
        """Return whether the call is done or given up."""
        return self.is_done or bool(self.given_up)

    @property
    def has_answer(self) -> bool:
        """Return whether the call is done and has succeeded."""
        return self.is_done and self.error is None

    def make(self) -> None:
        """Call the function on the current thread, unless the call was given up."""
        function, arguments = self.request
        self.thread = threading.get_ident()
        before, _local.call = _local.call, self
        try:
            if not self.given_up:
                self.answer = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self.error = error
        finally:
            _local.call = before
        self.is_done = True
        self._news.put(DONE)

    def tell(self, progress: Any) -> None:
        """Report progress to the caller."""
        self._news.put(progress)

    def wait(
        self, show: Callable[[Any], object] = lambda _: None, limit_s: float | None = None
    ) -> bool:
        """Wait for the end of the call.

        Args:
            show: A function that is called with each progress report.
            limit_s: Maximum seconds between two progress reports, or None for no limit.

        Returns:
            Whether the call is done.
        """
        while not self.is_done:
            try:
                news = self._news.get(timeout=limit_s)
            except Empty:
                return self.is_done
            if news is not DONE:
                show(news)
        return True

    def result(self) -> T:
        """Return the result of a call that is done, or raise its error."""
        error, self.error = self.error, None
        if error is None:
            return self.answer
        try:
            raise error
        finally:
            del error  # breaks the reference cycle of the error and this frame


class Executor:
    """Makes calls one at a time on a worker thread, and runs a scheduler step between them.

    The thread ends if there are no calls and no step is scheduled.

    Args:
        step: A function that does all due work, and must not raise. It is called after each batch
            of calls. It returns the seconds until the next step, or None if no step is scheduled.
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._due = 0.0  # the time of the next step by time.monotonic()
        self._calls: deque[Call[Any]] = deque()  # the first call is in progress
        self._is_serving = threading.Lock()
        # A lock that is released to wake the worker thread. An Event would not work, because a
        # signal handler that sets it could deadlock.
        self._bell = threading.Lock()
        self._thread = 0

    @property
    def is_own_thread(self) -> bool:
        """Return whether the current thread is the worker thread."""
        return self._thread == threading.get_ident()

    @property
    def is_busy(self) -> bool:
        """Return whether a call is waiting or in progress."""
        return any(not call.is_over for call in [*self._calls])

    @property
    def is_nested(self) -> bool:
        """Return whether a signal handler interrupted an operation that the worker may wait for.

        These operations are a call of this package, an import, and a fork.
        """
        pending = self._calls_of(threading.get_ident())
        return any(call.is_awaited for call in pending) or is_lock_held(no_fork)

    def _calls_of(self, thread: int) -> list[Call[Any]]:
        """Return the unfinished calls that a thread has requested."""
        return [call for call in [*self._calls] if call.caller == thread and not call.is_over]

    def run(
        self,
        function: Callable[[Unpack[Ts]], T],
        *arguments: Unpack[Ts],
        show: Callable[[Any], object] = lambda _: None,
        until: float = 0.0,
        undo: Callable[[Call[T]], object] = lambda _: None,
    ) -> T:
        """Call a function on the worker thread, and wait for it.

        If an exception ends the wait, the call is given up. The exception is raised once the call
        and `undo` have ended.

        Args:
            function: The function to call.
            arguments: Its arguments.
            show: A function that is called with each progress report.
            until: The deadline by time.monotonic(), as in `Call`.
            undo: A function that is called on the worker thread with a call that was given up.

        Returns:
            The function's result.

        Raises:
            NoThreadError: No thread can be started. The function was not called.
            RequestError: A signal handler makes this call while the interrupted thread waits for
                another call.
            Exception: The function raised it.
        """
        if self.is_own_thread:
            return function(*arguments)
        if self.is_nested:
            raise RequestError(NESTED)
        call = Call(function, *arguments, until=until)
        try:
            self.post(call)
            call.wait(show)
            for nested in self._calls_of(call.caller):  # calls of signal handlers during the wait
                nested.wait()
            if call.error is None:
                return call.answer
        except BaseException:
            if not call.given_up:  # not if no thread could be started
                call.given_up = "its caller has gone"
                end = Call(undo, call, is_awaited=False)  # the worker makes it after `call`
                self.post(end)
                end.wait()
            raise
        return call.result()

    def run_in_any_case(
        self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]
    ) -> T | None:
        """Call a cleanup function on the worker thread, even if an exception ends the wait.

        After such an exception, the function may be called twice. If a signal handler or a
        finalizer interrupts another call, the function is called after that call. If no thread can
        be started, as at the exit of Python 3.12, it is called on the current thread.

        Returns:
            The function's result, or None if the function is called later.
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
        """Call a function on the worker thread, and wait for it to finish, up to a timeout.

        Args:
            limit_s: Timeout in seconds. After the timeout, the function keeps running.
            function: The function to call.
            arguments: Its arguments.

        Raises:
            NoThreadError: No thread can be started.
            Exception: The function raised it before the timeout.
        """
        call = Call(function, *arguments)
        self.post(call)
        try:
            if call.wait(limit_s=limit_s):
                call.result()
        finally:
            call.is_awaited = False

    def post(self, call: Call[Any]) -> None:
        """Queue a call, and start the worker thread if it does not run.

        Raises:
            NoThreadError: No thread can be started.
        """
        self._calls.append(call)
        self.wake()
        if self._is_serving.locked():
            return  # the running thread checks for calls again after it releases this lock
        try:
            start(self._serve)
        except NoThreadError:
            call.given_up = "no thread can be started for it"
            raise

    def wake(self) -> None:
        """Run the scheduler step soon."""
        with suppress(RuntimeError):  # the lock is already released
            self._bell.release()

    def between(self) -> None:
        """Run a due scheduler step, and the queued calls whose deadline has passed.

        A call that waits for a device does this repeatedly, so that it does not delay other work.

        Raises:
            GivenUpError: The current call was given up.
        """
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
    """Call a function on a new thread.

    This does not use threading.Thread, because its start() takes several steps. If a signal handler
    raised between two of these steps, the new thread would end as well.

    Raises:
        NoThreadError: No thread can be started.
    """
    try:
        start_new_thread(function, arguments)
    except RuntimeError as error:
        raise NoThreadError(NO_THREAD) from error


def run_on_new_thread(
    function: Callable[[Unpack[Ts]], T],
    *arguments: Unpack[Ts],
    show: Callable[[Any], object] = lambda _: None,
) -> T:
    """Call a function on a separate thread, wait for it, and return its result.

    If a signal handler interrupts an import or a fork of this package, the function is called on
    the current thread. Another thread might need the module that is being imported, and would wait
    forever.

    Args:
        function: The function to call.
        arguments: Its arguments.
        show: A function that is called with each progress report.

    Raises:
        NoThreadError: No thread can be started.
        Exception: The function raised it.
    """
    if is_lock_held(no_fork):
        return function(*arguments)
    return Executor(lambda: None).run(function, *arguments, show=show)


def report_progress(progress: Any) -> None:
    """Report progress to the thread that requested the current call, if there is one."""
    if _local.call:
        _local.call.tell(progress)


def caller() -> int:
    """Return the identifier of the thread that requested the current call.

    Outside of a call, this is the current thread.
    """
    return _local.call.caller if _local.call else threading.get_ident()


def is_lock_held(lock: Any) -> bool:
    """Return whether the current thread holds an RLock."""
    return bool(lock._is_owned())  # noqa: SLF001 - threading.Condition uses it as well


def checkpoint() -> None:
    """Raise GivenUpError if the current call was given up.

    Call it only where no change is half made.
    """
    if _local.call and _local.call.given_up:
        raise GivenUpError(_local.call.given_up)


def sleep(seconds: float) -> None:
    """Sleep, but raise GivenUpError as soon as the current call is given up."""
    until = time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(remaining_s, POLL_S))


def wait_for(look: Callable[[], T], limit_s: float, poll_s: float) -> T:
    """Call a function repeatedly until it returns a true value, or until the timeout.

    Unlike `sleep`, this does not check whether the current call is given up.

    Args:
        look: The function to call.
        limit_s: Timeout in seconds.
        poll_s: Seconds between two calls.

    Returns:
        The function's last result.
    """
    until = time.monotonic() + limit_s
    while not (answer := look()) and time.monotonic() < until:
        time.sleep(poll_s)
    return answer


def survive_reload(name: str, make: Callable[[], T]) -> T:
    """Return a value that this process creates only once, even if its module is reloaded.

    If a module's file changes, %autoreload replaces the module's variables, although its locks may
    still be locked. So the values are stored in a module without a file, which is never reloaded.

    Args:
        name: The value's name.
        make: A function that creates the value.
    """
    store = sys.modules.setdefault("reserve_gpu.kept", ModuleType("reserve_gpu.kept"))
    value: T = vars(store).setdefault(name, make())
    return value
