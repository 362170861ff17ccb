"""A GPU of its own for every notebook on a shared machine.

`%reserve_gpu`, or `reserve()`, asks NVML which GPU is idle, locks that GPU's file, and sets
`CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and `CUDA_DEVICE_MEMORY` before a framework reads them.
The lock belongs to this process: when it ends, however it ends, the GPU is free again.
A GPU on which programs run counts as taken too, so people who never reserve are not disturbed.
Where no GPU is free, `CUDA_VISIBLE_DEVICES` is left empty, so that nothing runs on someone else's.
It is an agreement among those who ask, not a wall.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

# `python -m reserve_gpu` puts the working directory first, and imports this file before
# __main__.py. A file there that is called like a module of Python's own, as a json.py beside a
# notebook, must not be imported in its place. (While Python looks for what to run, argv[0] is -m.)
if (
    sys.argv[:1] == ["-m"]
    and __name__ in sys.orig_argv
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[:1] in ([""], [os.getcwd()])
):
    del sys.path[0]

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
from reserve_gpu.model import Device
from reserve_gpu.reservation.api import current, release, reserve, status
from reserve_gpu.reservation.session import Reservation

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.frameworks.check import Check, check
    from reserve_gpu.report.status import Status

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


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add %reserve_gpu to the shell; called by `%load_ext reserve_gpu`."""
    from reserve_gpu import magic

    magic.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take %reserve_gpu away again; what is reserved stays reserved."""
    from reserve_gpu import magic

    magic.unload(shell)


def __getattr__(name: str) -> Any:
    """Import what shows a status or checks frameworks when it is first used: most never do."""
    homes = {"Status": "report.status", "Check": "frameworks.check", "check": "frameworks.check"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)


def __dir__() -> list[str]:
    return __all__
