"""The three variables, and whether CUDA has already read them in this process.

CUDA reads `CUDA_VISIBLE_DEVICES` once, in cuInit; what is set later changes nothing, in silence.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.device import Device

MEMORY, ORDER, VISIBLE = "CUDA_DEVICE_MEMORY", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"
VARIABLES = (MEMORY, ORDER, VISIBLE)
NO_DEVICES: Mapping[str, str | None] = {VISIBLE: "", MEMORY: None}

NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED (cuda.h)

_started_before_fork = False
_hooked = False


def variables(devices: Sequence[Device]) -> dict[str, str | None]:
    """The three variables for these devices, in this order; None for one that must not be set.

    Whole GPUs go by their NVML index, as much code calls int() on it; a MIG instance has no index.
    """
    memory = [device.memory_mib for device in devices]
    visible = [str(d.index) if d.instance is None else d.uuid for d in devices]
    return {
        MEMORY: None if None in memory else ",".join(map(str, memory)),
        ORDER: "PCI_BUS_ID",  # CUDA's own default is another order than NVML's
        VISIBLE: ",".join(visible),
    }


def read() -> dict[str, str | None]:
    """The variables as they are now."""
    return {name: os.environ.get(name) for name in VARIABLES}


def write(values: Mapping[str, str | None]) -> None:
    """Set the variables, and unset those that are None. Reaches C's getenv as well."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def started() -> bool:
    """Whether CUDA has been initialised in this process, or in a parent that it was forked from.

    Asks the driver library itself, if the process has loaded it: before cuInit every call answers
    CUDA_ERROR_NOT_INITIALIZED. Starts nothing and loads nothing.
    """
    return _started_before_fork or _answers()


def remember_over_fork() -> None:
    """Let a forked child know that CUDA had started: there the driver can't be asked any more."""
    global _hooked
    if not _hooked and hasattr(os, "register_at_fork"):
        _hooked = True
        os.register_at_fork(before=_note)


def _note() -> None:
    global _started_before_fork
    _started_before_fork = started()


def _answers() -> bool:
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    import ctypes

    try:
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(library.cuDeviceGetCount(ctypes.byref(count)) != NOT_INITIALIZED)
