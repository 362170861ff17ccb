"""Import modules that are named by a string: features, commands, and what is rarely needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from types import ModuleType


def load(name: str) -> ModuleType:
    """Import a module of this package; no fork begins meanwhile.

    Args:
        name: The module's name below `reserve_gpu`, such as `features.lease.timer`.
    """
    with no_fork:
        return import_module(f"reserve_gpu.{name}")
