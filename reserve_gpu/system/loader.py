"""Import modules, such as features and commands, on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reserve_gpu.model.errors import TOO_MANY_FILES, ReserveGPUError, is_out_of_files
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from types import ModuleType


def load(name: str) -> ModuleType:
    """Import a module of this package, and keep other threads from forking during the import.

    Args:
        name: The module's name relative to `reserve_gpu`, such as `features.lease.timer`.

    Raises:
        ReserveGPUError: This process can't open any more files.
    """
    try:
        with no_fork:
            return import_module(f"reserve_gpu.{name}")
    except OSError as error:
        if is_out_of_files(error):
            raise ReserveGPUError(TOO_MANY_FILES) from None
        raise
