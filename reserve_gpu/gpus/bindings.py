"""A fail-safe layer over the official NVML bindings. Only this module imports `pynvml`.

An NVML function can fail, hang, or be missing from the driver. In each case, a `DeviceError` that
names the function is raised. A worker thread makes the calls, so that Ctrl-C works even while a
call is hanging.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections import deque
from contextlib import closing, suppress
from functools import cache
from queue import SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING, Any

from reserve_gpu.gpus import start_errors
from reserve_gpu.gpus.codes import DOWN, DOWN_OR_HUNG, LOST, NO_LIMIT, NOT_CONFIDENTIAL, Code
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import (
    TOO_MANY_FILES,
    DriverError,
    NoThreadError,
    ReserveGPUError,
    is_out_of_files,
)
from reserve_gpu.model.progress import Slow
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import executor, procfs
from reserve_gpu.system.executor import POLL_S, Call
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.signals import is_of_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from types import ModuleType
    from typing import TypeVar

    from typing_extensions import Unpack

    from reserve_gpu.system.executor import T, Ts

    U = TypeVar("U")

LIBRARY = "libnvidia-ml.so.1"
WSL_LIBRARY = f"/usr/lib/wsl/lib/{LIBRARY}"
TEXT_LIMIT = 300  # maximum length of a displayed error message, in characters
SLOW_S = 2.0  # seconds after which a call is reported as slow
QUICK_S = 0.02  # a reading takes longer only if the GPU is being initialized, or the driver hangs

# The official bindings have these attributes, but old packages with the same module name do not
# (https://github.com/wookayin/gpustat/issues/105).
OFFICIAL = ("_nvmlGetFunctionPointer", "nvmlDeviceGetMigMode")


class DeviceError(Exception):
    """Raised if a driver call fails.

    Attributes:
        code: NVML's error code, or None if NVML did not return one.
        state: The device state that the error implies.
        is_lost: Whether the driver has lost the device, which makes it unusable.
    """

    def __init__(self, reason: str, code: int | None = None, *, is_lost: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.is_lost = is_lost or code in LOST
        self.state = State.UNKNOWN
        if code == Code.NO_PERMISSION:
            self.state = State.DENIED
        elif code is None or code in DOWN_OR_HUNG:
            self.state = State.BROKEN


class Bindings:
    """An NVML session, from initialization to shutdown.

    The constructor only starts the initialization. The first call waits for it to finish. Callers
    pass NVML functions by name, so that a function missing from the bindings fails in the same way
    as a function missing from the driver.

    Args:
        limit_s: Timeout for each call, in seconds.

    Raises:
        DriverError: The bindings can't be imported, or no thread can be started.
    """

    def __init__(self, limit_s: float) -> None:
        with suppress(OSError):  # the bindings find a loaded library by its name
            ctypes.CDLL(WSL_LIBRARY)
        self._pynvml = import_pynvml()
        self._limit_s = limit_s
        try:
            self._worker = Worker()
        except NoThreadError as error:
            raise DriverError(str(error)) from error
        self._group = procfs.control_group()
        self._missing_names: set[str] = set()  # functions that the driver's library lacks
        self._is_initialised = False
        self._start: int | DriverError | None = None  # the number of GPUs, or NVML's startup error
        self._initialisation = self._worker.post(self._initialise)

    def count(self) -> int:
        """Wait for NVML's initialization, and return the number of GPUs, including unusable ones.

        Raises:
            DriverError: The driver does not start, or does not report the number of GPUs.
        """
        if self._start is None:
            start, unloadable = self._wait_for_start(), None
            if isinstance(start, DeviceError) and start.code == Code.LIBRARY_NOT_FOUND:
                unloadable = load_library()
                if unloadable is None:
                    self._initialisation = self._worker.post(self._initialise)
                    start = self._wait_for_start()
            if isinstance(start, DeviceError):
                start = start_errors.explain(start.code, str(start), unloadable)
            self._start = start
        if isinstance(self._start, DriverError):
            raise self._start
        return self._start

    def close(self) -> None:
        """Shut NVML down, but not while a call is hanging: shutdown would then hang or crash."""
        try:
            if self._worker.is_stuck():
                self._worker.when_free(self._shut_down)
            else:
                shutdown = self._worker.post(self._shut_down)
                if self._start is not None:  # otherwise, NVML might still be initializing
                    with suppress(DeviceError, HangError):
                        self._worker.wait(shutdown, self._limit_s)
        finally:
            self._worker.end()

    def run(
        self,
        reading: Callable[[Unpack[Ts]], T],
        *arguments: Unpack[Ts],
        limit_s: float | None = None,
    ) -> T:
        """Run a reading, which is a function that makes NVML calls, on the worker thread.

        While a reading is hanging, the same reading with the same arguments is not started again.
        Otherwise, another thread would hang each time a waiter retried.

        Args:
            reading: The function to run.
            arguments: The function's arguments.
            limit_s: Timeout in seconds. Defaults to the session's timeout.

        Returns:
            The function's result.

        Raises:
            DeviceError: The reading timed out.
            DriverError: The driver does not start.
            Exception: Any exception that the function raises.
        """
        if not isinstance(self._start, int):
            self.count()  # wait for the initialization
        call = self._worker.post(reading, *arguments)
        try:
            return self._worker.wait(call, self._limit_s if limit_s is None else limit_s)
        except HangError as error:
            raise _hang_error(error) from error

    def run_each(
        self,
        reading: Callable[[U], T],
        items: Sequence[U],
        limit_s: Callable[[], float] | None = None,
        is_enough: Callable[[T], bool] | None = None,
    ) -> Generator[T | DeviceError, None, None]:
        """Run a reading for each item in turn, and yield the results in the same order.

        All readings are handed over to the worker thread at once, because each switch to that
        thread and back takes longer than a reading. If a reading is slow, the results before it are
        yielded first. A hanging reading does not affect the others.

        Args:
            reading: The function to run.
            items: The function's argument for each run.
            limit_s: A function that returns the timeout for the next reading, in seconds. Defaults
                to the session's timeout.
            is_enough: A function that is called on the worker thread with each result, and returns
                whether no further reading is needed. If it is given, no further reading starts
                after a slow one either, so only the first results are yielded, at least one.

        Yields:
            The function's result, or the error if the reading failed or timed out.

        Raises:
            DriverError: The driver does not start.
            Exception: Any other exception that the function raises.
        """
        if not isinstance(self._start, int):
            self.count()
        limit = limit_s or (lambda: self._limit_s)
        with closing(self._worker.make_each(reading, items, limit, is_enough)) as calls:
            for call in calls:
                try:
                    result: T | DeviceError = self._worker.result(call)
                except HangError as error:
                    result = _hang_error(error)
                except DeviceError as error:
                    # The traceback refers to this frame, and this frame to the error.
                    result = error.with_traceback(None)
                yield result

    def ask(
        self,
        name: str,
        *arguments: Any,
        absent: frozenset[int] = frozenset(),
        faults: frozenset[int] | None = None,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Call an NVML function.

        A function that the driver's library lacks is looked up only once.

        Args:
            name: The function's name.
            arguments: The function's arguments.
            absent: Error codes for which the result is None.
            faults: Error codes that raise DeviceError. For any other error, the result is None. By
                default, all error codes except those in `absent` raise DeviceError.
            function: A function to call instead of the bindings' function with that name.

        Returns:
            The function's result, or None for an error that is not raised.

        Raises:
            DeviceError: The function failed.
        """
        called = getattr(self._pynvml, name, self._missing) if function is None else function
        if name in self._missing_names:
            if Code.FUNCTION_NOT_FOUND in absent:
                return None
            called = self._missing
        self._worker.doing[get_ident()] = name
        try:
            return called(*arguments)
        except Exception as error:  # the bindings also raise errors other than NVMLError
            is_nvml_error = isinstance(error, self._pynvml.NVMLError)
            code = getattr(error, "value", None) if is_nvml_error else None
            # The bindings raise this error from an AttributeError if the library lacks the
            # function. If the function itself returns the code, the next GPU might support it.
            if code == Code.FUNCTION_NOT_FOUND and isinstance(error.__context__, AttributeError):
                self._missing_names.add(name)
            if code in absent or (faults is not None and code not in faults):
                return None
            if isinstance(error, UnicodeDecodeError):
                text = "unreadable text"
            else:
                text = f"{'' if is_nvml_error else f'{type(error).__name__}: '}{_text_of(error)}"
            raise DeviceError(f"{text} ({name})", code) from error

    def bus_id(self, handle: Any) -> str | None:
        """Return a PCI bus id with a four-digit domain, such as 0000:03:00.0."""

        def read() -> Any:
            pci = self._pynvml.nvmlDeviceGetPciInfo(handle)
            return pci.busIdLegacy or pci.busId[4:]

        bus_id: str | None = self.ask("nvmlDeviceGetPciInfo", faults=DOWN, function=read)
        return bus_id

    def memory_v2(self, handle: Any) -> Any:
        """Return memory use, with the driver's reserve as a separate value if available."""

        def read() -> Any:
            try:
                version = self._pynvml.nvmlMemory_v2
                return self._pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except (TypeError, AttributeError):
                # Old bindings lack the version argument. gpustat replaces the bindings' function,
                # for the entire process, with a function that also lacks the argument.
                return None

        return self.ask("nvmlDeviceGetMemoryInfo_v2", faults=DOWN_OR_HUNG, function=read)

    def may_have_memory_limit(self, handle: Any) -> bool:
        """Return whether root might have limited this control group's memory on the GPU.

        Under such a limit, `memory_v2` reports the control group's memory, not the GPU's. Drivers
        before R615 do not support these limits.
        https://docs.nvidia.com/deploy/mps/mpsv3-memory-partitioning.html
        """
        limits_type = getattr(self._pynvml, "c_nvmlGetMemoryLimits_v1_t", None)
        if limits_type is None:  # old bindings lack the type
            return False
        unlimited = self._pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
        limits = limits_type(nameSpace=self._group, hardLimit=unlimited)
        try:
            self.ask("nvmlDeviceGetMemoryLimits_v1", handle, limits, absent=NO_LIMIT)
        except DeviceError as error:
            if error.code in DOWN:
                raise
            return True
        return bool(limits.softLimit or limits.hardLimit != unlimited)

    def is_confidential(self) -> bool:
        """Return whether confidential computing is on, including its Protected PCIe mode.

        In that mode, the driver reports the feature itself as off. Only the settings show the mode,
        and older drivers lack them (https://github.com/NVIDIA/nvtrust/issues/128).

        Raises:
            DeviceError: The driver or the bindings do not report it.
        """

        def read_settings() -> Any:
            settings = self._pynvml.c_nvmlSystemConfComputeSettings_v1_t()
            code = self._pynvml.nvmlSystemGetConfComputeSettings(ctypes.byref(settings))
            return None if code else settings

        settings = "nvmlSystemGetConfComputeSettings"
        state = self.ask(settings, faults=frozenset(), function=read_settings)
        if state is None:
            state = self.ask("nvmlSystemGetConfComputeState", absent=NOT_CONFIDENTIAL)
        return bool(state and (state.ccFeature or getattr(state, "multiGpuMode", 0)))

    def process_count(self, handle: Any, kind: str) -> int | None:
        """Count a device's processes of one kind.

        This reads only the length of the process list, because the layout of the list's entries
        depends on the driver (https://github.com/wookayin/gpustat/issues/161).

        Args:
            handle: The device's NVML handle.
            kind: `Compute`, `MPSCompute` or `Graphics`, as in NVML's function names.

        Returns:
            The number of processes, or None if the driver does not report it.
        """
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        function = self._count_processes
        count: int | None = self.ask(name, handle, name, faults=DOWN, function=function)
        return count

    def _wait_for_start(self) -> int | DriverError | DeviceError:
        try:
            return self._worker.wait(self._initialisation, self._limit_s)
        except HangError as error:
            return _hang_error(error)

    def _initialise(self) -> int | DriverError | DeviceError:
        try:
            self.ask("nvmlInit")
        except DeviceError as error:
            return error
        self._is_initialised = True
        try:
            return int(self.ask("nvmlDeviceGetCount"))
        except DeviceError as error:
            return DriverError(f"The NVIDIA driver does not report the number of GPUs: {error}.")

    def _shut_down(self) -> None:
        if self._is_initialised:
            with suppress(DeviceError):
                self.ask("nvmlShutdown")

    def _missing(self, *_: Any) -> Any:
        """Raise the error for a function that the driver lacks, because the bindings lack it."""
        raise self._pynvml.NVMLError(Code.FUNCTION_NOT_FOUND)

    def _count_processes(self, handle: Any, name: str) -> int:
        for variant in (f"{name}_v3", f"{name}_v2", name):
            try:
                function = self._pynvml._nvmlGetFunctionPointer(variant)  # noqa: SLF001 - no public function
            except self._pynvml.NVMLError as error:
                missing = error
                continue
            count = ctypes.c_uint(0)
            code = function(handle, ctypes.byref(count), None)
            if code == Code.INSUFFICIENT_SIZE:  # in that case, the list is not empty
                return max(count.value, 1)
            if code == 0:
                return count.value  # a real driver sets 0; a simulated driver might set the count
            raise self._pynvml.NVMLError(code)
        raise missing


_import_error: DriverError | None = None  # error from the last attempt to import the bindings


def load() -> None:
    """Import the bindings on this thread, so that no other thread has to.

    If the import fails, `import_pynvml` raises the error later. If a signal handler raises an
    exception during the import, this function raises it immediately.

    Raises:
        ReserveGPUError: The process has too many open files.
    """
    global _import_error
    is_new = "pynvml" not in sys.modules
    _import_error = None
    try:
        with no_fork, warnings.catch_warnings():
            # The PyPI package pynvml wraps the official bindings and emits a deprecation warning.
            warnings.simplefilter("ignore")
            import pynvml
    except BaseException as error:
        if is_of_handler(error):
            raise
        if is_out_of_files(error):
            raise ReserveGPUError(TOO_MANY_FILES) from None
        with no_fork:
            from reserve_gpu.gpus import import_errors

        _import_error = import_errors.not_imported(error)
        _import_error.__cause__ = error
        return
    if not all(hasattr(pynvml, name) for name in OFFICIAL):
        with no_fork:
            from reserve_gpu.gpus import import_errors

        _import_error = import_errors.not_official(pynvml, is_new=is_new)
        return
    with suppress(AttributeError):  # Windows has no fork, and some bindings have no lock
        _free_in_children(pynvml.libLoadLock)


def import_pynvml() -> ModuleType:
    """Return the bindings module, importing it if necessary.

    Raises:
        DriverError: The bindings can't be imported, or another module has the same name.
    """
    if _import_error is None and "pynvml" not in sys.modules:
        load()
    if _import_error is not None:
        raise _import_error
    return sys.modules["pynvml"]


def load_library() -> list[str] | None:
    """Load the NVML library, even from folders that this Python's loader does not search.

    Once the library is loaded, the bindings find it by its name. The loaders used by NixOS and by
    Homebrew's Python do not search the driver's folder.

    Returns:
        None if the library was loaded. Otherwise, the loader's error for each copy of the library.
    """
    unloadable = []
    with suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return None
    for folder in start_errors.library_folders(LIBRARY):
        path = os.path.join(folder, LIBRARY)
        if os.path.exists(path):
            try:
                ctypes.CDLL(path)
            except OSError as error:  # for example, it needs another architecture or C library
                unloadable.append(str(error))
            else:
                return None
    return unloadable


@cache
def _free_in_children(lock: Any) -> None:
    """Reset the bindings' lock in forked children, where the thread that held it does not exist."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # noqa: SLF001 - the logging module uses it too


def _text_of(error: Exception) -> str:
    """Return an error's message. Calling str() might request the message from the driver."""
    try:
        return sanitize(str(error).rstrip("."), TEXT_LIMIT)
    except Exception:  # noqa: BLE001 - the driver might lack the message, or return invalid text
        return f"error {getattr(error, 'value', '?')}"


def _hang_error(error: HangError) -> DeviceError:
    return DeviceError(f"the driver hangs: {error}")


# -- the worker thread -----------------------------------------------------------------------------

# All workers' hanging calls, each with its pid and NVML function. Before a worker makes a call, it
# waits until no identical call is hanging, so that retries do not leave more hanging threads.
_hanging: list[tuple[int, Call[Any], str]] = []


class HangError(Exception):
    """Raised if a call takes too long. The message contains the reason and the NVML function."""


class Worker:
    """A thread that makes NVML calls one at a time, and is replaced if a call hangs.

    Attributes:
        doing: The NVML function that each thread last called, keyed by thread identifier.
            `Bindings.ask` sets it.

    Raises:
        NoThreadError: No thread can be started.
    """

    def __init__(self) -> None:
        self.doing: dict[int, str] = {}
        self._hanging: list[Call[Any]] = []
        self._last: list[Callable[[], object]] = []  # for the thread whose call ends last
        self._start_thread()

    def post(self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> Call[T]:
        """Queue a call and return it. If an identical call is already hanging, return that call."""
        call = self._new_call(function, *arguments)
        if not call.given_up:
            self._calls.put(call)
        return call

    def make_each(
        self,
        function: Callable[[U], T],
        items: Sequence[U],
        limit_s: Callable[[], float],
        is_enough: Callable[[T], bool] | None = None,
    ) -> Generator[Call[T], None, None]:
        """Make a call for each item, and yield each call once it is done or was given up.

        All calls are made in one go, see `Bindings.run_each`. If the generator is closed early, no
        further call starts, and a slow call that is still in progress is given up.
        """
        left = deque(self._new_call(function, item) for item in items)
        is_complete = not left
        while not is_complete:
            new = [call for call in left if not call.given_up]
            series = Call(_make_each, new, is_enough)
            self._calls.put(series)
            is_hanging = False
            try:
                while left and not is_hanging:
                    if not left[0].is_over:
                        self._wait_while_quick(series, new)
                        self._wait_until_over(left[0], limit_s(), series)
                        is_hanging = bool(left[0].given_up)  # the next series makes the rest
                    if not left[0].is_over:
                        series.result()  # raises the error if `is_enough` failed
                        break
                    yield left.popleft()
                is_complete = not left or is_enough is not None
            finally:
                self._stop(series, left)

    def result(self, call: Call[T]) -> T:
        """Return the result of a call that is over.

        Raises:
            HangError: The call was given up.
            Exception: Any exception that the call raised.
        """
        if call.given_up:
            raise HangError(call.given_up)
        return call.result()

    def wait(self, call: Call[T], limit_s: float) -> T:
        """Wait for a call, and tell the caller if the call is slow.

        Args:
            call: The queued call.
            limit_s: The timeout in seconds.

        Returns:
            The call's result.

        Raises:
            HangError: The call timed out.
            Exception: Any exception that the call raises.
        """
        self._wait_until_over(call, limit_s)
        return self.result(call)

    def _wait_until_over(
        self, call: Call[Any], limit_s: float, series: Call[None] | None = None
    ) -> None:
        """Wait until a call is done, or give it up after the timeout.

        If the call is part of a series, the wait also ends if the series ends before the call.
        """
        start = time.monotonic()
        try:
            while not call.given_up and not (series and series.is_done):
                if call.wait(limit_s=min(POLL_S, limit_s)):
                    return
                executor.checkpoint()
                waited_s = time.monotonic() - start
                if waited_s >= SLOW_S:
                    executor.report_progress(Slow(self.doing.get(call.thread, ""), waited_s))
                if waited_s >= limit_s:
                    self._give_up(call, f"no answer within {limit_s:g} s", series)
        except BaseException:  # for example, an interrupt
            self._give_up(call, "interrupted before the driver answered", series)
            raise

    def _wait_while_quick(self, series: Call[None], calls: Sequence[Call[Any]]) -> None:
        """Wait for a series of calls, until it is done or one of its calls is slow."""
        before = -1
        while (done := sum(c.is_done for c in calls)) > before and not series.wait(limit_s=QUICK_S):
            executor.checkpoint()
            before = done

    def _stop(self, series: Call[None], calls: Iterable[Call[Any]]) -> None:
        """Make no further call of a series, and give up its call in progress, if there is one."""
        series.given_up = "no further result is needed"
        for call in calls:
            if call.thread and not call.is_over:
                self._give_up(call, series.given_up)

    def is_stuck(self) -> bool:
        """Return whether one of this worker's calls is still hanging."""
        return not all(call.is_done for call in self._hanging)

    def when_free(self, function: Callable[[], object]) -> None:
        """Call a function on a hanging call's thread after all hanging calls have returned."""
        self._last.append(function)

    def end(self) -> None:
        """End the thread once it has made all queued calls."""
        self._calls.put(None)

    def _new_call(self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> Call[T]:
        """Return a new call, or an identical call that is already hanging."""
        call = Call(function, *arguments)
        for hanging in self._hanging:
            if hanging.request == call.request and not hanging.is_done:
                return hanging
        return call

    def _start_thread(self) -> None:
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        executor.start(self._make_calls, self._calls)

    def _make_calls(self, posted: SimpleQueue[Call[Any] | None]) -> None:
        while call := posted.get():
            _make(call)
            del call  # release the call's objects before waiting for the next call
        if not self.is_stuck():
            with suppress(IndexError):  # several threads can end at the same time
                self._last.pop()()

    def _give_up(self, call: Call[Any], reason: str, series: Call[None] | None = None) -> None:
        """Give up on a call, and replace this worker's thread if the thread is hanging.

        The replaced thread exits when its call returns. It makes no further call of the series that
        the call is part of.
        """
        if call.is_done:
            return
        if series:
            series.given_up = reason
        blocker = None if call.thread else _hanging_function(call)
        activity = self.doing.get(call.thread) or blocker or "waiting for another call"
        call.given_up = f"{reason} ({activity})"
        if blocker:  # this worker's thread is only waiting for another worker's hanging call
            return
        self._hanging = [each for each in (*self._hanging, call) if not each.is_done]
        _hanging[:] = [each for each in _hanging if not each[1].is_done]
        if call.thread:  # the call has started
            _hanging.append((os.getpid(), call, activity))
        self.end()
        with suppress(NoThreadError):  # without a new thread, all later calls time out
            self._start_thread()


def _make_each(calls: Sequence[Call[T]], is_enough: Callable[[T], bool] | None) -> None:
    for call in calls:
        executor.checkpoint()  # the caller might need no further result
        start = time.monotonic()
        _make(call)
        if is_enough is not None:
            is_slow = time.monotonic() - start > QUICK_S
            if is_slow or (call.has_answer and is_enough(call.answer)):
                return


def _make(call: Call[Any]) -> None:
    """Make a call once no identical call of another worker is hanging."""
    while _hanging and not call.given_up and _hanging_function(call):
        executor.sleep(POLL_S)  # ends at once if the series that the call is part of is given up
    call.make()


def _hanging_function(call: Call[Any]) -> str | None:
    """Return the NVML function in which an identical call by any worker is hanging, or None."""
    key = (os.getpid(), *_identity(call))
    for pid, hanging, function in _hanging:
        if not hanging.is_done and (pid, *_identity(hanging)) == key:
            return function
    return None


def _identity(call: Call[Any]) -> tuple[object, tuple[object, ...]]:
    function, arguments = call.request
    return getattr(function, "__func__", function), arguments
