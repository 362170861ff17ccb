"""Set the environment variables that CUDA and frameworks read, and detect whether CUDA started.

CUDA reads `CUDA_VISIBLE_DEVICES` once, in cuInit, and silently ignores later changes.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from reserve_gpu.model import untrusted
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.parsing import parse_size

MEMORY, ORDER, VISIBLE = "CUDA_DEVICE_MEMORY", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
CUDA = (MEMORY, ORDER, VISIBLE)
# Variables that limit how much memory frameworks use (see memory_caps.py).
XLA_FRACTION, CUPY_LIMIT = "XLA_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT"
TORCH_ALLOCATOR, TF_GROWTH = "PYTORCH_ALLOC_CONF", "TF_FORCE_GPU_ALLOW_GROWTH"
# Older names for two of these variables. Users might have set them, so they are read, but never
# written.
OLD_XLA_FRACTION, OLD_TORCH_ALLOCATOR = "XLA_PYTHON_CLIENT_MEM_FRACTION", "PYTORCH_CUDA_ALLOC_CONF"
CAPS = (
    *(XLA_FRACTION, OLD_XLA_FRACTION, TORCH_ALLOCATOR, OLD_TORCH_ALLOCATOR),
    *(CUPY_LIMIT, TF_GROWTH),
)
# JSON that contains the memory limits that this package has set and their previous values. A child
# process inherits the limits, and this variable shows that the user did not set them.
OWN_CAPS = "RESERVE_GPU_CAPS"
# JSON that contains the empty value to which this package has set CUDA_VISIBLE_DEVICES, and the
# previous value. A child process inherits both variables, so it can restore the previous value.
HIDDEN = "RESERVE_GPU_HIDDEN"
OWN = (OWN_CAPS, HIDDEN)  # variables that only child processes read
VARIABLES = (*CUDA, *CAPS, *OWN)

NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED (cuda.h)

_CACHED_FUNCTION: Any = type(cache(int))

_started_before_fork = False


class Changes(NamedTuple):
    """The changes that this process has made to environment variables.

    Attributes:
        before: The values before this package's changes, or None for variables that were not set.
        written: The values that this package has set, or None for variables that it has unset.
    """

    before: Mapping[str, str | None] = {}
    written: Mapping[str, str | None] = {}

    def inherited(self) -> dict[str, str | None]:
        """Return the variables without this package's changes.

        A variable that other code has since changed keeps its current value.
        """
        return {
            name: self.before.get(name)
            if name in self.written and self.written[name] == value
            else value
            for name, value in read().items()
        }

    def apply(self, values: Mapping[str, str | None]) -> "Changes":
        """Set these variables, and restore any others that this package has set.

        A variable that other code has since changed is not restored.

        Args:
            values: The values to set, or None for variables to unset.

        Returns:
            All changes that are now in effect.
        """
        inherited = self.inherited()
        restored = {name: inherited[name] for name in self.written if name not in values}
        write(restored | dict(values))
        return Changes(inherited, dict(values))


def variables(
    devices: Sequence[Device], memory_limit_mib: float | None = None
) -> dict[str, str | None]:
    """Return the values of CUDA's variables that make these devices visible.

    Args:
        devices: The reserved devices.
        memory_limit_mib: The memory reserved on each device in MiB, or None for all of it.

    Returns:
        The value of each variable, or None for a variable that must be unset.
    """
    memory = [
        device.memory_mib if memory_limit_mib is None else int(memory_limit_mib)
        for device in devices
    ]
    return {
        MEMORY: None if None in memory else ",".join(map(str, memory)),
        ORDER: "PCI_BUS_ID",  # by default, CUDA numbers the GPUs differently from NVML
        VISIBLE: ",".join(device.entry for device in devices),
    }


def hiding(inherited: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables that hide every device from this process and its children.

    Args:
        inherited: The variables without this process's changes.
    """
    visible = before_hiding(inherited)[VISIBLE]
    return {VISIBLE: "", MEMORY: None, HIDDEN: json.dumps({VISIBLE: ("", visible)})}


def before_hiding(inherited: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables as they were before an ancestor process hid all devices.

    RESERVE_GPU_HIDDEN is ignored unless CUDA_VISIBLE_DEVICES still has the empty value that was set
    with it. A user gains nothing by forging RESERVE_GPU_HIDDEN, because any user can unset
    CUDA_VISIBLE_DEVICES.

    Args:
        inherited: The variables without this process's changes.
    """
    return {**inherited, **_replaced(inherited, HIDDEN, (VISIBLE,)), HIDDEN: None}


def own_caps(values: Mapping[str, str | None], inherited: Mapping[str, str | None]) -> str:
    """Return the value for RESERVE_GPU_CAPS, which lists memory limits and their previous values.

    Args:
        values: The variables that this package sets.
        inherited: The variables without this process's changes.
    """
    return json.dumps({n: (v, inherited.get(n)) for n, v in values.items() if n in CAPS})


def inherited_caps(inherited: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the values that memory limits had before an ancestor process changed them.

    A limit that has changed since then belongs to the user, and is left out.

    Args:
        inherited: The variables without this process's changes.
    """
    return _replaced(inherited, OWN_CAPS, CAPS)


def _replaced(
    inherited: Mapping[str, str | None], mark: str, names: Sequence[str]
) -> dict[str, str | None]:
    """Return the values that an ancestor process replaced, for variables unchanged since then.

    Args:
        inherited: The variables without this process's changes.
        mark: The variable in which the ancestor recorded the values that it set and replaced.
        names: The variables that the mark is allowed to describe.
    """
    if not inherited.get(mark):
        return {}
    with suppress(ValueError, TypeError, AttributeError):  # the mark is malformed
        recorded = untrusted.parsed(inherited[mark] or "").items()
        return {
            name: before
            for name, (value, before) in recorded
            if name in names and value == inherited.get(name) and isinstance(before, str | None)
        }
    return {}


def in_visible_order(devices: Iterable[Device], visible: str) -> tuple[Device, ...]:
    """Sort devices by their position in CUDA_VISIBLE_DEVICES. Devices not listed come last."""
    entries = visible.split(",")

    def position(device: Device) -> int:
        return entries.index(device.entry) if device.entry in entries else len(entries)

    return tuple(sorted(devices, key=position))


def read(names: Iterable[str] = VARIABLES) -> dict[str, str | None]:
    """Return the current values of environment variables."""
    return {name: os.environ.get(name) for name in names}


def read_size_mib(variable: str) -> float | None:
    """Return an environment variable's value as a size in MiB, or None if it is unset or empty.

    Raises:
        RequestError: The value is not a valid size.
    """
    size = os.environ.get(variable)
    if not size:
        return None
    try:
        return parse_size(size)
    except RequestError as error:
        raise RequestError(f"{variable}: {error}") from error


def write(values: Mapping[str, str | None]) -> None:
    """Set each variable, or unset it if its value is None. C's getenv() sees the changes."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def cuda_started() -> bool:
    """Return whether CUDA is initialized in this process, or was initialized before a fork.

    If the CUDA driver library is loaded, this function calls it. Before cuInit, such calls return
    CUDA_ERROR_NOT_INITIALIZED. The check neither loads the library nor starts CUDA.
    """
    return _started_before_fork or _cuda() is not None


def cuda_may_be_starting() -> bool:
    """Return whether cuInit might be running and might have read the environment variables.

    This is possible if the CUDA driver library is loaded but not initialized.
    """
    return _library() is not None and not cuda_started()


def cuda_uuids() -> list[str]:
    """Return the UUIDs of the devices that CUDA sees, in CUDA's order.

    Returns:
        The UUIDs without the prefixes `GPU-` and `MIG-`. The list is empty if CUDA has not started
        or can't be queried, as in a forked child.
    """
    cuda = _cuda()
    if cuda is None:
        return []
    count, device, data = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    uuids: list[str] = []
    with suppress(AttributeError):  # the library might lack a function
        # For a MIG instance, the first version of the function returns the UUID of the whole GPU.
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        cuda.cuDeviceGetCount(ctypes.byref(count))
        for number in range(count.value):
            if cuda.cuDeviceGet(ctypes.byref(device), number) or get_uuid(
                ctypes.byref(data), device
            ):
                return []
            digits = bytes(data).hex()
            groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
            uuids.append("-".join(groups))
    return uuids


def kept_torch_count() -> int | None:
    """Return the number of GPUs that PyTorch counted in this process and will not count again.

    PyTorch before 2.4 keeps its first count even if CUDA has not started, and thus ignores later
    changes to CUDA_VISIBLE_DEVICES (https://github.com/pytorch/pytorch/pull/122815).

    Returns:
        None if PyTorch has not been imported, has not counted yet, is a newer version, or was built
        without CUDA and therefore always counts 0.
    """
    if not _attributes("torch.version").get("cuda"):
        return None
    counter = _attributes("torch.cuda").get("device_count")
    # Only a cached function is called, and only if the result is in its cache. So PyTorch's own
    # code, which could start CUDA, never runs.
    if isinstance(counter, _CACHED_FUNCTION) and counter.cache_info().currsize == 1:
        count = counter()
        return count if isinstance(count, int) else None
    return None


def _attributes(name: str) -> Mapping[str, Any]:
    """Return the attributes of a module that this process has already imported."""
    module = sys.modules.get(name)
    # Reading an attribute of a lazy module, whose type is a subclass, would import the module.
    return module.__dict__ if type(module) is ModuleType else {}


@cache
def remember_over_fork() -> None:
    """Register a fork hook that tells the child whether CUDA had started in the parent.

    The CUDA driver library can't be queried in a forked child.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_remember)


def _remember() -> None:
    global _started_before_fork
    _started_before_fork = cuda_started()


def _cuda() -> Any:
    """Return the CUDA driver library if this process has loaded and initialized it, else None."""
    library = _library()
    if library is None:
        return None
    count = ctypes.c_int()
    with suppress(AttributeError):  # if the function is missing, assume that CUDA is initialized
        if library.cuDeviceGetCount(ctypes.byref(count)) == NOT_INITIALIZED:
            return None
    return library


def _library() -> Any:
    """Return the CUDA driver library if this process has loaded it, else None."""
    with suppress(OSError, AttributeError):  # os.RTLD_NOLOAD is missing on Windows
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None
