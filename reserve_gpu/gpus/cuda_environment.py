"""The variables that CUDA and frameworks read, and whether CUDA has read them already.

CUDA reads `CUDA_VISIBLE_DEVICES` once, in cuInit; what is set later changes nothing, in silence.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from reserve_gpu.model import untrusted
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.parsing import parse_size

MEMORY, ORDER, VISIBLE = "CUDA_DEVICE_MEMORY", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
CUDA = (MEMORY, ORDER, VISIBLE)
# What caps a framework's memory; memory_caps.py says which is set when.
XLA_FRACTION, CUPY_LIMIT = "XLA_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT"
TORCH_ALLOCATOR, TF_GROWTH = "PYTORCH_ALLOC_CONF", "TF_FORCE_GPU_ALLOW_GROWTH"
# The older names of two of them, which a user may have set: they are read, and never written.
OLD_XLA_FRACTION, OLD_TORCH_ALLOCATOR = "XLA_PYTHON_CLIENT_MEM_FRACTION", "PYTORCH_CUDA_ALLOC_CONF"
CAPS = (
    *(XLA_FRACTION, OLD_XLA_FRACTION, TORCH_ALLOCATOR, OLD_TORCH_ALLOCATOR),
    *(CUPY_LIMIT, TF_GROWTH),
)
# Which caps were set here, and what they were before: a process below takes them for nobody's own.
OWN_CAPS = "RESERVE_GPU_CAPS"
# Which empty CUDA_VISIBLE_DEVICES this package set, and the value that it replaced. Child processes
# inherit both variables, and our own refusal must not limit their requests.
HIDDEN = "RESERVE_GPU_HIDDEN"
OWN = (OWN_CAPS, HIDDEN)  # only processes below read these
VARIABLES = (*CUDA, *CAPS, *OWN)

NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED (cuda.h)

_started_before_fork = False


class Changes(NamedTuple):
    """What this process has done to the variables.

    before: what they were, as somebody outside of this package had set them. written: what was set
    instead. None stands for a variable that is not set.
    """

    before: Mapping[str, str | None] = {}
    written: Mapping[str, str | None] = {}

    def inherited(self) -> dict[str, str | None]:
        """Return the variables without our changes: as others set them, before or since."""
        return {
            name: self.before.get(name)
            if name in self.written and self.written[name] == value
            else value
            for name, value in read().items()
        }

    def apply(self, values: Mapping[str, str | None]) -> "Changes":
        """Set these variables, and give all others that were set the values that they had before.

        Returns all that has been done then. A variable that somebody has changed since is theirs.
        """
        inherited = self.inherited()
        gone = {name: inherited[name] for name in self.written if name not in values}
        write(gone | dict(values))
        return Changes(inherited, dict(values))


def variables(
    devices: Sequence[Device], memory_limit_mib: float | None = None
) -> dict[str, str | None]:
    """Return CUDA's variables for these devices; None for one that must not be set.

    memory_limit_mib: what of the memory of each is reserved, in MiB; None for all of it.
    """
    memory = [
        device.memory_mib if memory_limit_mib is None else int(memory_limit_mib)
        for device in devices
    ]
    return {
        MEMORY: None if None in memory else ",".join(map(str, memory)),
        ORDER: "PCI_BUS_ID",  # CUDA's own default is another order than NVML's
        VISIBLE: ",".join(device.entry for device in devices),
    }


def hiding(inherited: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables that hide every device from this process and its children.

    Args:
        inherited: The variables without the changes of this process.
    """
    visible = before_hiding(inherited)[VISIBLE]
    return {VISIBLE: "", MEMORY: None, HIDDEN: json.dumps({VISIBLE: ("", visible)})}


def before_hiding(inherited: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the variables as they were before a process above this one hid all devices.

    The mark only counts while CUDA_VISIBLE_DEVICES still has the empty value that came with it. If
    the mark is wrong, the user could as well have unset CUDA_VISIBLE_DEVICES.

    Args:
        inherited: The variables without the changes of this process.
    """
    return {**inherited, **_replaced(inherited, HIDDEN, (VISIBLE,)), HIDDEN: None}


def own_caps(values: Mapping[str, str | None], inherited: Mapping[str, str | None]) -> str:
    """Return what tells child processes which caps we set, and what stood there before."""
    return json.dumps({n: (v, inherited.get(n)) for n, v in values.items() if n in CAPS})


def inherited_caps(inherited: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the caps that an ancestor has set for its own part, with the values before that.

    inherited: the variables without this process's changes. A value that was changed
    since is the user's.
    """
    return _replaced(inherited, OWN_CAPS, CAPS)


def _replaced(
    inherited: Mapping[str, str | None], mark: str, names: Sequence[str]
) -> dict[str, str | None]:
    """Return the values that a process above replaced, of variables that still have its values.

    Args:
        inherited: The variables without the changes of this process.
        mark: The variable in which that process noted its values and the ones before.
        names: The variables that this mark may be about.
    """
    if not inherited.get(mark):
        return {}
    with suppress(ValueError, TypeError, AttributeError):  # a broken mark
        noted = untrusted.parsed(inherited[mark] or "").items()
        return {
            name: before
            for name, (value, before) in noted
            if name in names and value == inherited.get(name) and isinstance(before, str | None)
        }
    return {}


def in_visible_order(devices: Iterable[Device], visible: str) -> tuple[Device, ...]:
    """Order the devices as that CUDA_VISIBLE_DEVICES does; others come at the end."""
    entries = visible.split(",")

    def place(device: Device) -> int:
        return entries.index(device.entry) if device.entry in entries else len(entries)

    return tuple(sorted(devices, key=place))


def read(names: Iterable[str] = VARIABLES) -> dict[str, str | None]:
    """Return the variables as they are now."""
    return {name: os.environ.get(name) for name in names}


def read_size_mib(variable: str) -> float | None:
    """Return the size in MiB that an environment variable sets, or None if it sets none.

    Raises:
        RequestError: The variable is not a size.
    """
    size = os.environ.get(variable)
    if not size:
        return None
    try:
        return parse_size(size)
    except RequestError as error:
        raise RequestError(f"{variable}: {error}") from error


def write(values: Mapping[str, str | None]) -> None:
    """Set the variables, and unset those that are None. Reaches C's getenv as well."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def cuda_started() -> bool:
    """Tell whether CUDA is initialised in this process, or was in a parent before the fork.

    Asks the driver library itself, if the process has loaded it: before cuInit every call answers
    CUDA_ERROR_NOT_INITIALIZED. Starts nothing and loads nothing.
    """
    return _started_before_fork or _cuda() is not None


def cuda_may_be_starting() -> bool:
    """Tell whether CUDA may be reading the variables just now, or may have read them lately.

    That is where the driver library is loaded, and its cuInit has not come to its end.
    """
    return _library() is not None and not cuda_started()


def cuda_uuids() -> list[str]:
    """Return the UUIDs, without `GPU-` or `MIG-`, of the devices that CUDA sees, in its order.

    Empty where CUDA has not started, or can't be asked, as in a fork.
    """
    cuda = _cuda()
    if cuda is None:
        return []
    count, device, data = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    uuids: list[str] = []
    with suppress(AttributeError):  # a library that lacks a function tells nothing
        # The first version of the call gives a MIG instance the UUID of its GPU.
        ask = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        cuda.cuDeviceGetCount(ctypes.byref(count))
        for number in range(count.value):
            if cuda.cuDeviceGet(ctypes.byref(device), number) or ask(ctypes.byref(data), device):
                return []
            digits = bytes(data).hex()
            places = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
            uuids.append("-".join(places))
    return uuids


@cache
def remember_over_fork() -> None:
    """Let a forked child know that CUDA had started: there the driver can't be asked any more."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_remember)


def _remember() -> None:
    global _started_before_fork
    _started_before_fork = cuda_started()


def _cuda() -> Any:
    """Return the CUDA driver library, if this process has loaded and initialised it."""
    library = _library()
    if library is None:
        return None
    count = ctypes.c_int()
    with suppress(AttributeError):  # a library that lacks it may have been initialised
        if library.cuDeviceGetCount(ctypes.byref(count)) == NOT_INITIALIZED:
            return None
    return library


def _library() -> Any:
    """Return the CUDA driver library, if this process has loaded it."""
    with suppress(OSError, AttributeError):  # Windows has no such mode
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None
