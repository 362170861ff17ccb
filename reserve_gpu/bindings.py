"""The official bindings of NVML, opened and asked with care.

The only module that imports `pynvml`. Every call may fail, hang, or be missing from the driver, and
each of these is turned into a `DeviceError` that says which function it was.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from reserve_gpu import loading
from reserve_gpu.caller import Caller
from reserve_gpu.errors import DriverError, NoDriverError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

T = TypeVar("T")

WSL_LIBRARY = "/usr/lib/wsl/lib/libnvidia-ml.so.1"

# Codes of nvmlReturn_t (nvml.h). NOT_OFFERED: those that mean "this reading is not to be had here"
# rather than "this device is in trouble".
INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 2, 3, 4, 6, 7
FUNCTION_NOT_FOUND, CORRUPTED_INFOROM, NO_DATA, VERSION_MISMATCH, DEPRECATED = 13, 14, 21, 25, 26
UNKNOWN = 999
NOT_OFFERED = frozenset(
    {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VERSION_MISMATCH, DEPRECATED}
)
# What only decorates a message may be missing for more reasons.
NO_DECORATION = NOT_OFFERED | {UNKNOWN, NOT_FOUND, CORRUPTED_INFOROM, NO_DATA}

DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 9, 12
REMEDIES = {
    LIBRARY_NOT_FOUND: "No NVIDIA driver here: libnvidia-ml.so.1 was not found. Install the driver "
    "(nvidia-smi works then), or start the container with GPU access (docker run --gpus all).",
    DRIVER_NOT_LOADED: "The NVIDIA driver's kernel module is not loaded. Look at what nvidia-smi "
    "says; reboot, or ask the administrator to.",
    18: "The NVIDIA driver was updated while the old kernel module kept running. Reboot this "
    "machine.",
    17: "The operating system blocks access to the NVIDIA driver. In a container, start it with "
    "GPU access (docker run --gpus all).",
    NO_PERMISSION: "This user may not use the NVIDIA driver. Ask the administrator for access to "
    "/dev/nvidia*.",
    FUNCTION_NOT_FOUND: "The NVIDIA driver is older than the installed nvidia-ml-py needs. Update "
    "the driver.",
    UNKNOWN: "The NVIDIA driver does not start. A container that lost its GPUs, as after systemctl "
    "daemon-reload on its host, must be started again; elsewhere, look at what nvidia-smi says.",
}
OURS = ("_nvmlGetFunctionPointer", "nvmlDeviceGetMigMode")  # not in old packages of the same name
REINSTALL = (
    "The module pynvml here is not the one of nvidia-ml-py. Run: python -m pip uninstall -y pynvml "
    "nvidia-ml-py3 nvidia-ml-py && python -m pip install nvidia-ml-py"
)


class DeviceError(Exception):
    """A driver call that failed. code: what NVML answered, None where it gave no answer."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class Bindings:
    """NVML from its initialisation to its shutdown, on a thread of its own as it may hang.

    It starts at once and is waited for when it is first asked.

    limit_s: seconds after which a call counts as hanging.
    Raises DriverError where there are no bindings to talk to.
    """

    def __init__(self, limit_s: float) -> None:
        self.pynvml = import_pynvml()
        self._asked = ""
        self._count: int | DeviceError | None = None
        self._caller = Caller(limit_s, lambda: self._asked)
        self._caller.post(self._begin)

    def count(self) -> int:
        """How many GPUs there are, unusable ones included.

        Raises DriverError where there is no driver to talk to, DeviceError if it can't say.
        """
        count = self._started()
        if isinstance(count, DeviceError):
            raise count
        return count

    def _started(self) -> int | DeviceError:
        """Wait until the driver has started. Raises DriverError if it can't."""
        if self._count is None:
            try:
                self._count = self._answer()
            except DeviceError as error:
                raise _driver_error(error) from None
        return self._count

    def _begin(self) -> int | DeviceError:
        self.ask(self.pynvml.nvmlInit)
        try:
            return int(self.ask(self.pynvml.nvmlDeviceGetCount))
        except DeviceError as error:
            return error

    def close(self) -> None:
        """Shut NVML down; what hangs, or nobody has waited for, is left to its thread."""
        if self._count is not None and not self._caller.stuck:
            with suppress(DeviceError):
                self.run(self.ask, self.pynvml.nvmlShutdown)
        self._caller.close()

    def run(self, reading: Callable[..., T], *arguments: Any) -> T:
        """Do a reading, some calls of ask in a row, on the thread where these may hang.

        Raises DeviceError if they do, DriverError if there is no driver, else what the reading
        raises.
        """
        self._started()
        self._caller.post(reading, *arguments)
        answer: T = self._answer()
        return answer

    def _answer(self) -> Any:
        try:
            return self._caller.answer()
        except TimeoutError as error:
            raise DeviceError(f"the driver hangs: {error}") from error

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the bindings. Raises DeviceError, whatever the failure."""
        self._asked = asked = _name(function, arguments)
        try:
            return function(*arguments)
        except self.pynvml.NVMLError as error:
            code = getattr(error, "value", None)
            raise DeviceError(f"{str(error).rstrip('.')} ({asked})", code) from error
        except UnicodeDecodeError as error:
            raise DeviceError(f"unreadable text ({asked})", NO_DATA) from error
        except Exception as error:  # the bindings also raise what is no NVMLError
            raise DeviceError(f"{type(error).__name__}: {error} ({asked})") from error

    def ask_if_offered(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        absent: frozenset[int] = NOT_OFFERED,
    ) -> Any:
        """Like ask, but None where the error code says that the reading is not to be had here."""
        try:
            return self.ask(function, *arguments)
        except DeviceError as error:
            if error.code in absent:
                return None
            raise

    def decoration(self, function: Callable[..., Any], handle: Any) -> Any:
        """What only decorates a message, None where it is not to be had here."""
        return text(self.ask_if_offered(function, handle, absent=NO_DECORATION))


def import_pynvml() -> ModuleType:
    """The bindings. Raises DriverError if there are none, or other ones of the same name."""
    _preload_wsl_library()
    try:
        with warnings.catch_warnings(), loading.definitions():
            warnings.simplefilter(
                "ignore"
            )  # PyPI's deprecated pynvml, which wraps the official one
            import pynvml
    except SyntaxError:  # one of Python 2
        raise DriverError(REINSTALL) from None
    except ImportError as error:
        raise DriverError(
            f"The module pynvml can't be imported ({error}). "
            "Run: python -m pip install nvidia-ml-py"
        ) from error
    if not all(hasattr(pynvml, name) for name in OURS):
        raise DriverError(REINSTALL)
    module: ModuleType = pynvml
    return module


def memory_v2(pynvml: ModuleType, handle: Any, _name: str) -> Any:
    """The memory reading without the driver's own reserve, None where the bindings have none."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (TypeError, AttributeError):  # old bindings, or gpustat's replacement of that function
        return None


def process_count(pynvml: ModuleType, handle: Any, name: str) -> int:
    """How many processes the driver would list, asked without a buffer and its struct."""
    import ctypes

    for variant in (f"{name}_v3", f"{name}_v2", name):
        try:
            function = pynvml._nvmlGetFunctionPointer(variant)  # noqa: SLF001 - no public way
        except pynvml.NVMLError as error:
            missing = error
            continue
        count = ctypes.c_uint(0)
        code = function(handle, ctypes.byref(count), None)
        if code == INSUFFICIENT_SIZE:
            return max(count.value, 1)
        if code == 0:
            return count.value  # a simulated driver may answer SUCCESS with a count
        raise pynvml.NVMLError(code)
    raise missing


def text(value: Any) -> Any:
    """What the bindings answered, with text as a str: old ones give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _preload_wsl_library() -> None:
    """Under WSL2 the library is where the loader may not look; once loaded, its name finds it."""
    if os.path.exists(WSL_LIBRARY):
        import ctypes

        with suppress(OSError):
            ctypes.CDLL(WSL_LIBRARY)


def _driver_error(error: DeviceError) -> DriverError:
    kind = NoDriverError if error.code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED) else DriverError
    remedy = REMEDIES.get(error.code or 0, "The NVIDIA driver does not start.")
    if sys.platform != "linux" and kind is NoDriverError:
        remedy = "No NVIDIA driver here. Reservations need one, on Linux or WSL2."
    return kind(f"{remedy} [{error}]")


def _name(function: Any, arguments: tuple[Any, ...]) -> str:
    """The NVML function that was called, also where a helper of ours called it."""
    named = [argument for argument in arguments if isinstance(argument, str)]
    return named[0] if named else str(getattr(function, "__name__", function))
