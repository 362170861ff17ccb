"""A GPU of its own for every notebook on a shared machine.

`%reserve_gpu`, or `reserve()`, asks NVML which GPU is idle, takes that GPU's lock, and sets
`CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and `CUDA_DEVICE_MEMORY` before a framework reads them.
The lock is this process's: it is gone when the process is, however that ends. What runs on a GPU
counts as well, so that somebody who never asks for a reservation is not run over. Where no GPU can
be had, none is visible to what comes next. It is a reservation among those who ask, not a wall.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.checklist import Check
    from reserve_gpu.device import Device
    from reserve_gpu.errors import (
        DriverError,
        ImpossibleError,
        LockError,
        MutexHeldError,
        NoDriverError,
        NoFreeDeviceError,
        RequestError,
        ReservedAboveError,
        ReserveGPUError,
        ReserveGPUWarning,
        TooLateError,
        WaitTimeoutError,
    )
    from reserve_gpu.frameworks import check
    from reserve_gpu.holding import Reservation
    from reserve_gpu.overview import status
    from reserve_gpu.reservation import current, release, reserve
    from reserve_gpu.table import Status

__all__ = [
    "Check",
    "Device",
    "DriverError",
    "ImpossibleError",
    "LockError",
    "MutexHeldError",
    "NoDriverError",
    "NoFreeDeviceError",
    "RequestError",
    "Reservation",
    "ReserveGPUError",
    "ReserveGPUWarning",
    "ReservedAboveError",
    "Status",
    "TooLateError",
    "WaitTimeoutError",
    "check",
    "current",
    "load_ipython_extension",
    "release",
    "reserve",
    "status",
    "unload_ipython_extension",
]

# Found when they are asked for: the extension is loaded at the start of every shell.
_HOMES = {"Device": "device", "Reservation": "holding", "current": "reservation"}
_HOMES |= {"release": "reservation", "reserve": "reservation"}
_HOMES |= {"Status": "table", "status": "overview"}
_HOMES |= {"Check": "checklist", "check": "frameworks"}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add %reserve_gpu to the shell; called by `%load_ext reserve_gpu`."""
    from reserve_gpu.magic import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take %reserve_gpu away again; what is reserved stays reserved."""
    from reserve_gpu.magic import unload

    unload(shell)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reserve_gpu import loading

    with loading.definitions():
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
