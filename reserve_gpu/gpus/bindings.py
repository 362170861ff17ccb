"""The official bindings of NVML, opened and asked with care: the only importer of `pynvml`.

A call of the driver may fail, hang, or be missing from it. Each of these becomes a `DeviceError`
that names the NVML function. The calls are made on a thread of their own (`Worker`), so that
Ctrl-C works while one of them hangs.
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
TEXT_LIMIT = 300  # characters of an error's text that are shown
SLOW_S = 2.0  # a call that takes longer is reported to the caller

# The official bindings have these, old packages of the same module name don't
# (https://github.com/wookayin/gpustat/issues/105).
OFFICIAL = ("_nvmlGetFunctionPointer", "nvmlDeviceGetMigMode")


class DeviceError(Exception):
    """A driver call that failed.

    Attributes:
        code: NVML's answer, None if it gave none.
        state: The state of the device that follows from it.
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
    """NVML from its initialisation to its shutdown.

    Initialisation begins at once; only the first question waits for it. Functions are asked for by
    name: bindings that lack one are then the same as a driver that lacks it.

    limit_s: seconds after which a call counts as hanging.
    Raises DriverError where there are no bindings.
    """

    def __init__(self, limit_s: float) -> None:
        with suppress(OSError):  # the bindings then find it by its name
            ctypes.CDLL(WSL_LIBRARY)
        self._pynvml = import_pynvml()
        self._limit_s = limit_s
        try:
            self._worker = Worker()
        except NoThreadError as error:
            raise DriverError(str(error)) from error
        self._group = procfs.control_group()
        self._is_initialised = False
        self._start: int | DriverError | None = None  # how the initialisation ended
        self._initialisation = self._worker.post(self._initialise)

    def count(self) -> int:
        """Return how many GPUs the driver counts, unusable ones included, once it has started.

        Raises DriverError where the driver does not start, or does not count.
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
        """Shut NVML down, but not while a call hangs in it: that would hang as well, or crash."""
        try:
            if not self._worker.is_stuck():
                shutdown = self._worker.post(self._shut_down)
                if self._start is not None:  # else nobody waited for the initialisation either
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
        """Do a reading, some questions in a row, on the worker thread.

        limit_s: seconds after which this reading counts as hanging, by default those of the
        bindings. While it hangs, the same reading with the same arguments is not begun again: every
        look of somebody who waits would leave one more thread behind.
        Raises DeviceError if it hangs, DriverError if the driver does not start, and what the
        reading raises.
        """
        if not isinstance(self._start, int):
            self.count()  # waits for the initialisation
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
            absent: Error codes that mean None.
            faults: Error codes that mean a fault of the GPU; all others mean None. By default each
                error is a fault.
            function: What to call, if that is not the bindings' function of that name.

        Raises:
            DeviceError: The function failed.
        """
        called = getattr(self._pynvml, name, self._missing) if function is None else function
        self._worker.doing[get_ident()] = name
        try:
            return called(*arguments)
        except Exception as error:  # the bindings also raise what is no NVMLError
            is_nvmls = isinstance(error, self._pynvml.NVMLError)
            code = getattr(error, "value", None) if is_nvmls else None
            if code in absent or (faults is not None and code not in faults):
                return None
            if isinstance(error, UnicodeDecodeError):
                text = "unreadable text"
            else:
                text = f"{'' if is_nvmls else f'{type(error).__name__}: '}{_text_of(error)}"
            raise DeviceError(f"{text} ({name})", code) from error

    def bus_id(self, handle: Any) -> str | None:
        """Return the PCI bus id with four digits of domain, as in 0000:03:00.0."""

        def read() -> Any:
            pci = self._pynvml.nvmlDeviceGetPciInfo(handle)
            return pci.busIdLegacy or pci.busId[4:]

        found: str | None = self.ask("nvmlDeviceGetPciInfo", faults=DOWN, function=read)
        return found

    def memory_v2(self, handle: Any) -> Any:
        """Return the memory reading without the driver's own reserve, None where there is none."""

        def read() -> Any:
            try:
                version = self._pynvml.nvmlMemory_v2
                return self._pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except (TypeError, AttributeError):  # old bindings, or the function as gpustat leaves
                return None  # it behind for everybody in the process: without that argument

        return self.ask("nvmlDeviceGetMemoryInfo_v2", faults=DOWN_OR_HUNG, function=read)

    def may_have_memory_limit(self, handle: Any) -> bool:
        """Return whether root may have limited the memory of this control group on the GPU.

        `memory_v2` then answers for the group. Drivers before R615 know no such limits.
        https://docs.nvidia.com/deploy/mps/mpsv3-memory-partitioning.html
        """
        kind = getattr(self._pynvml, "c_nvmlGetMemoryLimits_v1_t", None)
        if kind is None:  # old bindings
            return False
        unlimited = self._pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
        limits = kind(nameSpace=self._group, hardLimit=unlimited)
        try:
            self.ask("nvmlDeviceGetMemoryLimits_v1", handle, limits, absent=NO_LIMIT)
        except DeviceError as error:
            if error.code in DOWN:
                raise
            return True
        return bool(limits.softLimit or limits.hardLimit != unlimited)

    def process_count(self, handle: Any, kind: str) -> int | None:
        """Count the processes of a kind, None where the driver has no such list.

        kind: as in `RunningProcesses` of NVML's names.
        The list itself is not asked for, as drivers differ in the layout of its entries
        (https://github.com/wookayin/gpustat/issues/161).
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
            return DriverError(f"The NVIDIA driver does not count its GPUs: {error}.")

    def _shut_down(self) -> None:
        if self._is_initialised:
            self.ask("nvmlShutdown")

    def _missing(self, *_: Any) -> Any:
        """Answer for a function that the bindings lack: to us that is a driver that lacks it."""
        raise self._pynvml.NVMLError(Code.FUNCTION_NOT_FOUND)

    def _count_processes(self, handle: Any, name: str) -> int:
        for variant in (f"{name}_v3", f"{name}_v2", name):
            try:
                function = self._pynvml._nvmlGetFunctionPointer(variant)  # noqa: SLF001 - no public way
            except self._pynvml.NVMLError as error:
                missing = error
                continue
            count = ctypes.c_uint(0)
            code = function(handle, ctypes.byref(count), None)
            if code == Code.INSUFFICIENT_SIZE:  # there are some
                return max(count.value, 1)
            if code == 0:
                return count.value  # 0 of a real driver; a simulated one may count here
            raise self._pynvml.NVMLError(code)
        raise missing


_import_error: DriverError | None = None  # of the last attempt to import the bindings


def load() -> None:
    """Import the bindings on this thread, so that no other thread has to.

    The error of a failure is kept for `import_pynvml`. An exception of a signal handler is raised
    here.
    """
    global _import_error
    is_new = "pynvml" not in sys.modules
    _import_error = None
    try:
        with no_fork, warnings.catch_warnings():
            # PyPI's package pynvml only wraps the official bindings, and warns that it does.
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
    with suppress(AttributeError):  # Windows has no fork; other bindings may have no lock
        _free_in_children(pynvml.libLoadLock)


def import_pynvml() -> ModuleType:
    """Return the bindings. Raises DriverError if there are none, or others of the same name."""
    if _import_error is None and "pynvml" not in sys.modules:
        load()
    if _import_error is not None:
        raise _import_error
    return sys.modules["pynvml"]


def load_library() -> list[str] | None:
    """Load NVML's library from a folder that the loader of this Python does not search.

    The bindings then find it by its name. On NixOS, and for Homebrew's Python, the loader does not
    search the folder of the driver.

    Returns:
        None if the library is loaded, else why copies of it can't be, in the loader's words.
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
            except OSError as error:  # built for another architecture or C library
                unloadable.append(str(error))
            else:
                return None
    return unloadable


@cache
def _free_in_children(lock: Any) -> None:
    """Free the bindings' lock in a fork: the thread that had it, if any had, is not there."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # noqa: SLF001 - as logging does


def _text_of(error: Exception) -> str:
    """Return the error's own words; for an unusual code the driver is asked for them."""
    try:
        return sanitize(str(error).rstrip("."), TEXT_LIMIT)
    except Exception:  # noqa: BLE001 - the driver's words may be missing, or no text
        return f"error {getattr(error, 'value', '?')}"


def _hang_error(error: HangError) -> DeviceError:
    return DeviceError(f"the driver hangs: {error}")


# -- the thread that makes the calls ---------------------------------------------------------------

# Hanging calls of all workers: the pid, the call and its NVML function. A worker waits for such a
# call before it makes the same one, so that repeated readings do not leave one thread each.
_hanging: list[tuple[int, Call[Any], str]] = []


class HangError(Exception):
    """A call did not return; the message names it and the timeout."""


class Worker:
    """A thread that makes calls one after the other. A thread that hangs is replaced.

    Attributes:
        doing: The NVML function that each thread calls now, by the thread's identifier. The calls
            set it.

    Raises:
        NoThreadError: No thread can be started.
    """

    def __init__(self) -> None:
        self.doing: dict[int, str] = {}
        self._hanging: list[Call[Any]] = []
        self._start_thread()

    def post(self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> Call[T]:
        """Start a call, or return the same call if it hangs already."""
        call = Call(function, *arguments)
        for hanging in self._hanging:
            if hanging.request == call.request and not hanging.is_done:
                return hanging
        self._calls.put(call)
        return call

    def wait(self, call: Call[T], limit_s: float) -> T:
        """Wait for a call, and report a slow one to the caller.

        Args:
            call: The call.
            limit_s: The timeout in seconds.

        Returns:
            The result of the call.

        Raises:
            HangError: The timeout has passed. Errors of the call are raised as well.
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
        except BaseException:  # an interrupt
            self._give_up(call, "no answer yet when it was interrupted")
            raise
        if call.given_up:
            raise HangError(call.given_up)
        return call.result()

    def is_stuck(self) -> bool:
        """Return whether a call hangs."""
        return not all(call.is_done for call in self._hanging)

    def end(self) -> None:
        """End the thread after the calls that were started."""
        self._calls.put(None)

    def _start_thread(self) -> None:
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        executor.start(_make_calls, self._calls)

    def _give_up(self, call: Call[Any], reason: str) -> None:
        """Replace a thread that hangs. It ends when its call returns."""
        if call.is_done:
            return
        elsewhere = None if call.thread else _what_hangs(call)
        what = self.doing.get(call.thread) or elsewhere or "another call comes first"
        call.given_up = f"{reason} ({what})"
        if elsewhere:  # the thread only waits for that call
            return
        self._hanging = [each for each in (*self._hanging, call) if not each.is_done]
        _hanging[:] = [each for each in _hanging if not each[1].is_done]
        if call.thread:  # else the call has not started
            _hanging.append((os.getpid(), call, what))
        self.end()
        with suppress(NoThreadError):  # then all later calls hang
            self._start_thread()


def _make_calls(posted: SimpleQueue[Call[Any] | None]) -> None:
    while call := posted.get():
        while _hanging and not call.given_up and _what_hangs(call):
            time.sleep(POLL_S)
        call.make()
        del call  # keep nothing of it alive during the wait for the next one


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
