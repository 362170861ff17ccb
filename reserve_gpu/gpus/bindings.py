"""A fail-safe layer over the official NVML bindings; only this module imports `pynvml`.

An NVML call can fail, hang, or be missing from the driver. Each case raises a `DeviceError` that
names the NVML function. A worker thread makes the calls, so that Ctrl-C works while a call hangs.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from threading import get_ident
from typing import TYPE_CHECKING, Any

from reserve_gpu.gpus import start_errors
from reserve_gpu.gpus.codes import DOWN, DOWN_OR_HUNG, LOST, NO_LIMIT, Code
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
    from collections.abc import Callable
    from types import ModuleType

    from typing_extensions import Unpack

    from reserve_gpu.system.executor import T, Ts

LIBRARY = "libnvidia-ml.so.1"
WSL_LIBRARY = f"/usr/lib/wsl/lib/{LIBRARY}"
TEXT_LIMIT = 300  # maximum length of a displayed error text, in characters
SLOW_S = 2.0  # seconds after which a call is reported to the caller as slow

# The official bindings have these attributes. Old packages with the same module name do not
# (https://github.com/wookayin/gpustat/issues/105).
OFFICIAL = ("_nvmlGetFunctionPointer", "nvmlDeviceGetMigMode")


class DeviceError(Exception):
    """A driver call that failed.

    Attributes:
        code: NVML's error code, or None if NVML returned none.
        state: The device state that the error implies.
        is_lost: Whether the driver has lost the device, so that nothing can use it.
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

    The constructor starts the initialization, and only the first call waits for it. Callers pass
    NVML functions by name, so that a function missing from the bindings fails in the same way as
    one missing from the driver.

    Args:
        limit_s: Timeout of a call in seconds.

    Raises:
        DriverError: The bindings can't be imported.
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
        self._is_initialised = False
        self._start: int | DriverError | None = None  # the number of GPUs, or the startup error
        self._initialisation = self._worker.post(self._initialise)

    def count(self) -> int:
        """Wait for the initialization, and return the number of GPUs, including unusable ones.

        Raises:
            DriverError: The driver does not start, or does not report the number.
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
        """Shut NVML down, unless a call hangs: the shutdown would hang as well, or crash."""
        try:
            if not self._worker.is_stuck():
                shutdown = self._worker.post(self._shut_down)
                if self._start is not None:  # if None, the initialization may still be running
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
        """Run a function that makes several NVML calls, called a reading, on the worker thread.

        While a reading hangs, the same reading with the same arguments is not started again.
        Otherwise every retry of a waiter would leave another hanging thread.

        Args:
            reading: The function to run.
            arguments: The arguments of the function.
            limit_s: Timeout in seconds. Defaults to the session's timeout.

        Returns:
            The result of the reading.

        Raises:
            DeviceError: The reading timed out.
            DriverError: The driver does not start.
            Exception: The reading raised it.
        """
        if not isinstance(self._start, int):
            self.count()  # waits for the initialization
        call = self._worker.post(reading, *arguments)
        try:
            return self._worker.wait(call, self._limit_s if limit_s is None else limit_s)
        except HangError as error:
            raise _hang_error(error) from error

    def ask(
        self,
        name: str,
        *arguments: Any,
        absent: frozenset[int] = frozenset(),
        faults: frozenset[int] | None = None,
        function: Callable[..., Any] | None = None,
    ) -> Any:
        """Call an NVML function.

        Args:
            name: The function's name.
            arguments: The function's arguments.
            absent: Error codes for which the result is None.
            faults: Error codes that raise DeviceError; the result for all others is None. By
                default every error raises.
            function: A function to call in place of the bindings' function of that name.

        Returns:
            The function's result, or None if an error code says that the reading is not available.

        Raises:
            DeviceError: The function failed.
        """
        called = getattr(self._pynvml, name, self._missing) if function is None else function
        self._worker.doing[get_ident()] = name
        try:
            return called(*arguments)
        except Exception as error:  # the bindings also raise errors other than NVMLError
            is_nvml_error = isinstance(error, self._pynvml.NVMLError)
            code = getattr(error, "value", None) if is_nvml_error else None
            if code in absent or (faults is not None and code not in faults):
                return None
            if isinstance(error, UnicodeDecodeError):
                text = "unreadable text"
            else:
                text = f"{'' if is_nvml_error else f'{type(error).__name__}: '}{_text_of(error)}"
            raise DeviceError(f"{text} ({name})", code) from error

    def bus_id(self, handle: Any) -> str | None:
        """Return the PCI bus id with a four-digit domain, such as 0000:03:00.0."""

        def read() -> Any:
            pci = self._pynvml.nvmlDeviceGetPciInfo(handle)
            return pci.busIdLegacy or pci.busId[4:]

        bus_id: str | None = self.ask("nvmlDeviceGetPciInfo", faults=DOWN, function=read)
        return bus_id

    def memory_v2(self, handle: Any) -> Any:
        """Return the memory reading that reports the driver's reserve separately, if available."""

        def read() -> Any:
            try:
                version = self._pynvml.nvmlMemory_v2
                return self._pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except (TypeError, AttributeError):
                # Old bindings lack the version argument. gpustat replaces the function in the
                # entire process with one that also lacks it.
                return None

        return self.ask("nvmlDeviceGetMemoryInfo_v2", faults=DOWN_OR_HUNG, function=read)

    def may_have_memory_limit(self, handle: Any) -> bool:
        """Return whether root may have limited this control group's memory on the GPU.

        If it is limited, `memory_v2` reports the control group's memory, not the GPU's. Drivers
        before R615 do not support such limits.
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

    def process_count(self, handle: Any, kind: str) -> int | None:
        """Count a device's processes of one kind.

        This reads only the length of the process list, because drivers differ in the layout of its
        entries (https://github.com/wookayin/gpustat/issues/161).

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
            self.ask("nvmlShutdown")

    def _missing(self, *_: Any) -> Any:
        """Raise the error for a function missing from the driver, because the bindings lack it."""
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
            if code == Code.INSUFFICIENT_SIZE:  # the list is not empty
                return max(count.value, 1)
            if code == 0:
                return count.value  # a real driver sets 0; a simulated driver may set the count
            raise self._pynvml.NVMLError(code)
        raise missing


_import_error: DriverError | None = None  # error of the last attempt to import the bindings


def load() -> None:
    """Import the bindings on this thread, so that no other thread has to.

    If the import fails, `import_pynvml` raises the error. An exception that a signal handler
    raises during the import propagates from this function.
    """
    global _import_error
    is_new = "pynvml" not in sys.modules
    _import_error = None
    try:
        with no_fork, warnings.catch_warnings():
            # PyPI's package pynvml wraps the official bindings and emits a deprecation warning.
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
    """Return the bindings.

    Raises:
        DriverError: The bindings are missing, or another module has their name.
    """
    if _import_error is None and "pynvml" not in sys.modules:
        load()
    if _import_error is not None:
        raise _import_error
    return sys.modules["pynvml"]


def load_library() -> list[str] | None:
    """Load NVML's library from folders that this Python's loader does not search.

    Once the library is loaded, the bindings find it by its name. The loaders of NixOS and of
    Homebrew's Python do not search the driver's folder.

    Returns:
        None if the library is loaded, else one loader error for each copy of the library.
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
            except OSError as error:  # for example, built for another architecture or C library
                unloadable.append(str(error))
            else:
                return None
    return unloadable


@cache
def _free_in_children(lock: Any) -> None:
    """Reset the bindings' lock after a fork, because the child lacks the thread that held it."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # noqa: SLF001 - the logging module uses it as well


def _text_of(error: Exception) -> str:
    """Return the error's message, which str() may request from the driver."""
    try:
        return sanitize(str(error).rstrip("."), TEXT_LIMIT)
    except Exception:  # noqa: BLE001 - the driver may lack the message, or return invalid text
        return f"error {getattr(error, 'value', '?')}"


def _hang_error(error: HangError) -> DeviceError:
    return DeviceError(f"the driver hangs: {error}")


# -- the worker thread -----------------------------------------------------------------------------

# The hanging calls of all workers, each with its pid and its NVML function. Before a worker makes a
# call, it waits for an identical hanging call, so that retries do not leave more hanging threads.
_hanging: list[tuple[int, Call[Any], str]] = []


class HangError(Exception):
    """A call timed out; the message contains the timeout and the NVML function."""


class Worker:
    """A thread that makes NVML calls one at a time, and is replaced if it hangs.

    Attributes:
        doing: The NVML function that each thread is calling, by thread identifier. `Bindings.ask`
            sets it.

    Raises:
        NoThreadError: No thread can be started.
    """

    def __init__(self) -> None:
        self.doing: dict[int, str] = {}
        self._hanging: list[Call[Any]] = []
        self._start_thread()

    def post(self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> Call[T]:
        """Queue a call, or return the identical call if one already hangs."""
        call = Call(function, *arguments)
        for hanging in self._hanging:
            if hanging.request == call.request and not hanging.is_done:
                return hanging
        self._calls.put(call)
        return call

    def wait(self, call: Call[T], limit_s: float) -> T:
        """Wait for a call, and report a slow one to the caller.

        Args:
            call: The queued call.
            limit_s: The timeout in seconds.

        Returns:
            The result of the call.

        Raises:
            HangError: The call timed out.
            Exception: The call raised it.
        """
        start = time.monotonic()
        try:
            while not call.given_up and not call.wait(limit_s=min(POLL_S, limit_s)):
                executor.checkpoint()
                waited_s = time.monotonic() - start
                if waited_s >= SLOW_S:
                    executor.report_progress(Slow(self.doing.get(call.thread, ""), waited_s))
                if waited_s >= limit_s:
                    self._give_up(call, f"no answer within {limit_s:g} s")
        except BaseException:  # for example, an interrupt
            self._give_up(call, "no answer yet when it was interrupted")
            raise
        if call.given_up:
            raise HangError(call.given_up)
        return call.result()

    def is_stuck(self) -> bool:
        """Return whether a call of this worker hangs."""
        return not all(call.is_done for call in self._hanging)

    def end(self) -> None:
        """End the thread once it has made all queued calls."""
        self._calls.put(None)

    def _start_thread(self) -> None:
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        executor.start(_make_calls, self._calls)

    def _give_up(self, call: Call[Any], reason: str) -> None:
        """Give up a call, and replace this worker's thread if it hangs.

        The replaced thread ends when its call returns.
        """
        if call.is_done:
            return
        blocker = None if call.thread else _hanging_function(call)
        activity = self.doing.get(call.thread) or blocker or "waiting for another call"
        call.given_up = f"{reason} ({activity})"
        if blocker:  # this worker's thread does not hang: it waits for another worker's call
            return
        self._hanging = [each for each in (*self._hanging, call) if not each.is_done]
        _hanging[:] = [each for each in _hanging if not each[1].is_done]
        if call.thread:  # the call has started
            _hanging.append((os.getpid(), call, activity))
        self.end()
        with suppress(NoThreadError):  # without a new thread, all later calls time out
            self._start_thread()


def _make_calls(posted: SimpleQueue[Call[Any] | None]) -> None:
    while call := posted.get():
        while _hanging and not call.given_up and _hanging_function(call):
            time.sleep(POLL_S)
        call.make()
        del call  # release the call's objects before waiting for the next call


def _hanging_function(call: Call[Any]) -> str | None:
    """Return the NVML function in which an identical call of any worker hangs, or None."""
    key = (os.getpid(), *_identity(call))
    for pid, hanging, function in _hanging:
        if not hanging.is_done and (pid, *_identity(hanging)) == key:
            return function
    return None


def _identity(call: Call[Any]) -> tuple[object, tuple[object, ...]]:
    function, arguments = call.request
    return getattr(function, "__func__", function), arguments
