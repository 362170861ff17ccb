"""Calls on worker threads, where signal handlers never run.

Python runs signal handlers in the main thread, between any two instructions. A handler might raise
an exception, such as KeyboardInterrupt, or TimeoutError after an alarm. So code that takes locks or
sets variables runs on a worker thread while the caller waits. If an exception interrupts the
caller's wait, the call is abandoned: it stops at its next checkpoint, where no change is half done.

While a thread is inside a `with no_fork` block, no other thread can fork.
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

POLL_S = 0.1  # seconds between checks that a call has not been abandoned
NO_THREAD = (
    "This process can't start a thread, so nothing was changed. Check its limits: ulimit -u, and "
    "pids.max of its control group."
)
# The error message when a signal handler makes a call while the interrupted thread is waiting for
# another call.
NESTED = (
    "This process is already reserving, releasing or querying GPUs, and a signal handler "
    "interrupted it. Try again when the interrupted operation has finished."
)
DONE = object()


class _Local(threading.local):
    call: Call[Any] | None = None  # the call that is running on this thread


_local = _Local()


class GivenUpError(BaseException):
    """Stops an abandoned call. This exception never leaves the worker thread."""


class Call(Generic[T]):
    """A function call that runs on another thread, and its result.

    Attributes:
        caller: The identifier of the thread that requested the call.
        thread: The identifier of the thread that runs the call, or 0 before the call starts.
        until: A deadline on the time.monotonic() clock. While another call is waiting for a device,
            this call stays queued until the deadline, and then runs during the other call's wait.
        is_awaited: Whether the caller is waiting for the call to finish.
        given_up: Why the call was abandoned, or an empty string if it was not.
    """

    answer: T  # the result, which is only set if the call succeeded

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
        """Return whether the call is done or was abandoned."""
        return self.is_done or bool(self.given_up)

    @property
    def has_answer(self) -> bool:
        """Return whether the call finished without raising an exception."""
        return self.is_done and self.error is None

    def make(self) -> None:
        """Call the function on the current thread, unless the call was abandoned."""
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
        """Wait for the call to finish.

        Args:
            show: A function that is called with each progress report.
            limit_s: Maximum seconds to wait for each progress report, or None to wait forever.

        Returns:
            Whether the call has finished.
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
        """Return the result of a finished call, or raise the exception that the call raised."""
        error, self.error = self.error, None
        if error is None:
            return self.answer
        try:
            raise error
        finally:
            del error  # breaks the reference cycle between the error and this frame


class Executor:
    """Runs calls one at a time on a worker thread, and runs a scheduler step between them.

    The thread ends when no calls are left and no step is scheduled.

    Args:
        step: A function that does all scheduled work that is due. It must not raise exceptions. It
            is called after each batch of calls, and returns the seconds until the next step, or
            None if no step is scheduled.
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._due = 0.0  # when the next step is due, on the time.monotonic() clock
        self._calls: deque[Call[Any]] = deque()  # the first call is the one in progress
        self._is_serving = threading.Lock()
        # Releasing this lock wakes the worker thread. An Event would not work, because a signal
        # handler that sets it could deadlock.
        self._bell = threading.Lock()
        self._thread = 0

    @property
    def is_own_thread(self) -> bool:
        """Return whether the current thread is the worker thread."""
        return self._thread == threading.get_ident()

    @property
    def is_busy(self) -> bool:
        """Return whether any call is queued or in progress."""
        return any(not call.is_over for call in [*self._calls])

    @property
    def is_nested(self) -> bool:
        """Return whether a signal handler has interrupted an operation that can block the worker.

        Such an operation is another call that this thread is waiting for, an import, or a fork.
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
        """Call a function on the worker thread, and wait for its result.

        If an exception interrupts the wait, the call is abandoned. The exception is raised again
        once the call and `undo` have finished.

        Args:
            function: The function to call.
            arguments: The function's arguments.
            show: A function that is called with each progress report.
            until: A deadline on the time.monotonic() clock, as described in `Call`.
            undo: A function that is called on the worker thread if the call was abandoned. Its
                argument is the call.

        Returns:
            The function's result.

        Raises:
            NoThreadError: No thread can be started. The function was not called.
            RequestError: A signal handler makes this call while the interrupted thread is waiting
                for another call.
            Exception: The function raised this exception.
        """
        if self.is_own_thread:
            return function(*arguments)
        if self.is_nested:
            raise RequestError(NESTED)
        call = Call(function, *arguments, until=until)
        try:
            self.post(call)
            call.wait(show)
            for nested in self._calls_of(call.caller):  # calls made by signal handlers
                nested.wait()
            if call.error is None:
                return call.answer
        except BaseException:
            if not call.given_up:  # post() sets given_up if no thread can be started
                call.given_up = "its caller has gone"
                end = Call(undo, call, is_awaited=False)  # the worker runs `end` after `call`
                self.post(end)
                end.wait()
            raise
        return call.result()

    def run_in_any_case(
        self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]
    ) -> T | None:
        """Call a cleanup function on the worker thread, and wait for it.

        If an exception interrupts the wait, the function might be called twice. If this method is
        called by a signal handler or finalizer that interrupted another call on the worker thread,
        the function is called after that call finishes. If no thread can be
        started, for example because Python 3.12 is exiting, the function is called on the current
        thread.

        Returns:
            The function's result, or None if the function will be called later.
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
            arguments: The function's arguments.

        Raises:
            NoThreadError: No thread can be started.
            Exception: The function raised this exception before the timeout.
        """
        call = Call(function, *arguments)
        self.post(call)
        try:
            if call.wait(limit_s=limit_s):
                call.result()
        finally:
            call.is_awaited = False

    def post(self, call: Call[Any]) -> None:
        """Queue a call, and start the worker thread if it is not running.

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
        """Wake the worker thread, so that it runs the scheduler step soon."""
        with suppress(RuntimeError):  # the lock is already released
            self._bell.release()

    def between(self) -> None:
        """Run the scheduler step if it is due, and all queued calls whose deadlines have passed.

        A call that is waiting for a device calls this method repeatedly, so that the wait does not
        delay other work.

        Raises:
            GivenUpError: The current call was abandoned.
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

    This function does not use threading.Thread, because Thread.start() takes several steps. If a
    signal handler raised an exception between two of these steps, the new thread might fail too.

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
    """Call a function on a new thread, wait for it to finish, and return its result.

    If a signal handler has interrupted this package while it was importing a module or forking, the
    function is called on the current thread. A new thread might need the module that is being
    imported, and would then wait forever.

    Args:
        function: The function to call.
        arguments: The function's arguments.
        show: A function that is called with each progress report.

    Raises:
        NoThreadError: No thread can be started.
        Exception: The function raised this exception.
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

    Outside of a call, the result is the current thread's identifier.
    """
    return _local.call.caller if _local.call else threading.get_ident()


def is_lock_held(lock: Any) -> bool:
    """Return whether the current thread holds the given RLock."""
    return bool(lock._is_owned())  # noqa: SLF001 - threading.Condition also calls _is_owned()


def checkpoint() -> None:
    """Raise GivenUpError if the current call was abandoned.

    Call this function only where no change is half done.
    """
    if _local.call and _local.call.given_up:
        raise GivenUpError(_local.call.given_up)


def sleep(seconds: float) -> None:
    """Sleep, but raise GivenUpError as soon as the current call is abandoned."""
    until = time.monotonic() + seconds
    while (remaining_s := until - time.monotonic()) > 0:
        checkpoint()
        time.sleep(min(remaining_s, POLL_S))


def wait_for(look: Callable[[], T], limit_s: float, poll_s: float) -> T:
    """Call a function repeatedly until it returns a true value, or until a timeout.

    Unlike `sleep`, this function does not check whether the current call was abandoned.

    Args:
        look: The function to call.
        limit_s: Timeout in seconds.
        poll_s: Seconds between calls.

    Returns:
        The last value that the function returned.
    """
    until = time.monotonic() + limit_s
    while not (answer := look()) and time.monotonic() < until:
        time.sleep(poll_s)
    return answer


def survive_reload(name: str, make: Callable[[], T]) -> T:
    """Return a value that is created only once per process, even if the calling module is reloaded.

    When a module's file changes, %autoreload replaces the module's variables, even locks that are
    currently held. So the values are stored in a module without a file, which is never reloaded.

    Args:
        name: The value's name.
        make: A function that creates the value.
    """
    store = sys.modules.setdefault("reserve_gpu.kept", ModuleType("reserve_gpu.kept"))
    value: T = vars(store).setdefault(name, make())
    return value
