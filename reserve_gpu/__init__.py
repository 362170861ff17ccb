"""Reserve NVIDIA GPUs on a shared machine for notebooks and other processes.

`%reserve_gpu`, or `reserve()`, finds an idle GPU through NVML and locks the GPU's lock file. It
then sets `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and `CUDA_DEVICE_MEMORY` before a framework
reads these variables.

The lock belongs to the process, so the GPU is released no matter how the process ends. A GPU that
is running programs counts as busy, even if the programs' users never reserve GPUs. If no GPU is
free, `CUDA_VISIBLE_DEVICES` is set to an empty string, so that no code runs on another user's GPU.

Reservations are cooperative: they don't prevent other programs from using a GPU.
"""

from __future__ import annotations

from os.path import exists as _exists

from reserve_gpu.system.forks import no_fork

TYPE_CHECKING = False  # type checkers treat this as True; importing `typing` would be slower
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


# The module that defines each public name. Names are imported on first use, because most shells
# that load the extension never reserve a GPU, and because the command line must start quickly.
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
}  # all other public names are defined in model.errors


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add %reserve_gpu to an IPython shell. `%load_ext reserve_gpu` calls this function."""
    with no_fork:
        from reserve_gpu import extension
    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove %reserve_gpu from an IPython shell. Any reservation is kept."""
    with no_fork:
        from reserve_gpu import extension
    extension.unload(shell)


if not TYPE_CHECKING:  # otherwise, type checkers accept any name

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
            raise ImportError(
                "The package reserve_gpu was removed while this process was running. Install it "
                "again and restart the process."
            ) from error


def __dir__() -> list[str]:
    return __all__
