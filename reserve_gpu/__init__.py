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

# Whether this process is the command line, which starts now, and not somebody's notebook: while
# Python looks for what `-m` names argv[0] is -m; a script that %run runs is not in orig_argv.
_program = sys.argv[0] if sys.argv else ""
_is_module = _program == "-m" and __name__ in sys.orig_argv
_is_script = os.path.basename(_program) == "reserve-gpu" and _program in sys.orig_argv

# `python -m reserve_gpu` puts the working directory first, and imports this file before
# __main__.py. A file there that is called like a module of Python's own, as a json.py beside a
# notebook, must not be imported in its place.
if (
    _is_module
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[:1] in ([""], [os.getcwd()])
):
    del sys.path[0]

# Ctrl-C while the modules are imported ends the command line as it ends `ls`, without a traceback;
# cli.main() then lets it raise KeyboardInterrupt again.
if _is_module or _is_script:
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # that import takes some milliseconds
        os._exit(130)

from typing import TYPE_CHECKING, Any

from reserve_gpu.calls import Late
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

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from reserve_gpu import extension as _extension
    from reserve_gpu.api import before_end, current, release, reserve
    from reserve_gpu.frameworks.check import Check, check
    from reserve_gpu.looking import status
    from reserve_gpu.model import Device, Waiting
    from reserve_gpu.report.status import Status
    from reserve_gpu.reservation.session import Reservation
else:
    _extension = Late("extension")

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


# Imported when they are first used: most shells that load the extension never ask for anything.
_HOMES = {
    "Check": "frameworks.check",
    "Device": "model",
    "Reservation": "reservation.session",
    "Status": "report.status",
    "Waiting": "model",
    "before_end": "api",
    "check": "frameworks.check",
    "current": "api",
    "release": "api",
    "reserve": "api",
    "status": "looking",
}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add %reserve_gpu to the shell; called by `%load_ext reserve_gpu`."""
    _extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take %reserve_gpu away again; what is reserved stays reserved."""
    _extension.unload(shell)


if not TYPE_CHECKING:  # to which every name would be one of ours

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(Late(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
