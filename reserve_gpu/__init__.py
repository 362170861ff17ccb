"""A GPU of its own for every notebook on a shared machine.

`%reserve_gpu`, or `reserve()`, asks NVML which GPU is idle, locks that GPU's file, and sets
`CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and `CUDA_DEVICE_MEMORY` before a framework reads them.
The lock belongs to this process: when it ends, however it ends, the GPU is free again.
A GPU on which programs run counts as taken too, so people who never reserve are not disturbed.
Where no GPU is free, `CUDA_VISIBLE_DEVICES` is left empty, so that nothing runs on someone else's.
It is an agreement among those who ask, not a wall.
"""

from __future__ import annotations

from os.path import exists as _exists

from reserve_gpu.system.forks import no_fork

TYPE_CHECKING = False  # as in `typing`, which takes longer to load than all of this
if TYPE_CHECKING:
    from typing import Any

    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu.api import before_end, current, release, reserve
    from reserve_gpu.commands.check.frameworks import Check, check
    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.errors import (
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
    from reserve_gpu.model.progress import Waiting
    from reserve_gpu.render.status_view import Status
    from reserve_gpu.reservation.session import Reservation
    from reserve_gpu.reservation.status import status

__version__ = "2.0.0"

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
    "Waiting",
    "before_end",
    "check",
    "current",
    "load_ipython_extension",
    "release",
    "reserve",
    "status",
    "unload_ipython_extension",
]


# Nothing else is imported before its first use: most shells that load the extension never ask for
# anything, and the command line (__main__.py) is to start before what it needs is loaded.
_HOMES = {
    "Check": "commands.check.frameworks",
    "Device": "model.devices",
    "Reservation": "reservation.session",
    "Status": "render.status_view",
    "Waiting": "model.progress",
    "before_end": "api",
    "check": "commands.check.frameworks",
    "current": "api",
    "release": "api",
    "reserve": "api",
    "status": "reservation.status",
}  # all others are errors


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add %reserve_gpu to the shell; called by `%load_ext reserve_gpu`."""
    with no_fork:
        from reserve_gpu import extension
    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take %reserve_gpu away again; what is reserved stays reserved."""
    with no_fork:
        from reserve_gpu import extension
    extension.unload(shell)


if not TYPE_CHECKING:  # to which every name would be one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            with no_fork:
                from reserve_gpu.system.loader import load
            return getattr(load(_HOMES.get(name, "model.errors")), name)
        except ImportError as error:
            if _exists(__file__):
                raise
            text = "The package reserve_gpu was removed under this process. Install it again, and "
            raise ImportError(f"{text}restart the process.") from error


def __dir__() -> list[str]:
    return __all__
