"""Import modules, such as features and commands, on demand."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from reserve_gpu.model.errors import TOO_MANY_FILES, ReserveGPUError, is_out_of_files
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


REMOVED = (
    "The package reserve_gpu was removed while this process was running. Install it again and "
    "restart the process."
)


def load(name: str) -> ModuleType:
    """Import a module of this package, and keep other threads from forking during the import.

    Args:
        name: The module's name relative to `reserve_gpu`, such as `features.lease.timer`.

    Raises:
        ReserveGPUError: This process can't open any more files, or the package was removed.
    """
    try:
        with no_fork:
            return import_module(f"reserve_gpu.{name}")
    except OSError as error:
        if is_out_of_files(error):
            raise ReserveGPUError(TOO_MANY_FILES) from None
        raise
    except ImportError as error:
        if os.path.exists(__file__):
            raise
        raise ReserveGPUError(REMOVED) from error


def lazy_modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` function (PEP 562) for a package that imports modules on first use.

    Args:
        package: The package's name relative to `reserve_gpu`.
        names: The names of the modules.
    """

    def get(name: str) -> ModuleType:
        if name in names:
            return load(f"{package}.{name}")
        raise AttributeError(f"module 'reserve_gpu.{package}' has no attribute {name!r}")

    return get
