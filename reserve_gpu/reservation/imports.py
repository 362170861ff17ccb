"""Imports on the thread of the caller, before another thread does the work.

A signal handler that raises during an import leaves Python's import lock with its thread, and every
other thread that imports a module would wait for ever. So the session's thread imports nothing.
"""

from reserve_gpu.gpus import bindings
from reserve_gpu.model.requests import ReservationTerms
from reserve_gpu.reservation.feature_registry import FEATURES
from reserve_gpu.system import settings
from reserve_gpu.system.loader import load


def load_for_reading() -> bool:
    """Import what is needed to read the devices, and return whether there may be rules."""
    bindings.load()
    if settings.config_file() is None:
        return False
    load("allocation.admin_rules")
    return True


def load_for_reserving(terms: ReservationTerms | None = None) -> None:
    """Import what is needed to reserve, with the features for these terms.

    Args:
        terms: The terms of the request; None if they are not known yet.
    """
    has_rules = load_for_reading()
    for row in FEATURES:
        if terms is None or has_rules or row.is_wanted(terms):
            row.load()
