"""The features of a reservation, and the imports that a call makes before its work begins.

No module imports a feature, so a feature is deleted with its folder and its row.

A signal handler that raises during an import leaves Python's import lock with its thread, and every
other thread that imports a module would wait for ever. So the caller's thread imports what a call
needs, before the session's thread does the work.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.gpus import bindings
from reserve_gpu.model.requests import ReservationTerms
from reserve_gpu.system import cells, settings
from reserve_gpu.system.loader import load

if TYPE_CHECKING:
    from reserve_gpu.model.option import Option
    from reserve_gpu.reservation.feature import Feature

# What a batch system sets in each of its jobs, and Kubernetes in each pod.
JOBS = {"SLURM_JOB_ID", "FLUX_JOB_ID", "KUBERNETES_SERVICE_HOST"}


class FeatureRow(NamedTuple):
    """A feature. A process needs it if one of the two conditions holds.

    Attributes:
        module: The module of its class, below `reserve_gpu`.
        name: The name of that class.
        is_wanted_here: Returns whether this process needs it for every reservation.
        is_wanted_for: Returns whether a reservation with these terms needs it.
        options: The module with its options of a request, if it has any.
    """

    module: str
    name: str
    is_wanted_here: Callable[[], bool] = lambda: False
    is_wanted_for: Callable[[ReservationTerms], bool] = lambda _: False
    options: str = ""

    def load(self) -> "type[Feature]":
        """Import its module and return its class."""
        loaded: type[Feature] = getattr(load(self.module), self.name)
        return loaded


def _in_cells() -> bool:
    return cells.cells().shell is not None


# In the order in which they are called: a look that the history makes serves the lease.
FEATURES = (
    FeatureRow("features.job.job_end", "Job", lambda: not JOBS.isdisjoint(os.environ)),
    FeatureRow("features.history.journal", "History", settings.may_keep_history),
    FeatureRow(
        "features.lease.timer",
        "LeaseTimer",
        is_wanted_for=lambda terms: terms.lease.has_end,
        options="features.lease.lease_options",
    ),
    FeatureRow(
        "features.over_limit.over_limit",
        "OverLimit",
        is_wanted_for=lambda terms: terms.size is not None,
    ),
    FeatureRow("features.restart.keeper", "Restart", lambda: cells.kernels_file() is not None),
    FeatureRow("features.remote_requests.handler", "RemoteRequests", _in_cells),
    FeatureRow("features.waiters.notifier", "WaiterNotices", _in_cells),
)


def options() -> "tuple[Option, ...]":
    """Return the options that features add to a request."""
    rows = [row for row in FEATURES if row.options]
    return tuple(option for row in rows for option in load(row.options).OPTIONS)


def load_for_reading() -> bool:
    """Import what is needed to read the devices, and return whether there may be rules.

    Raises:
        ReserveGPUError: This process can open no more files.
    """
    bindings.load()
    if settings.config_file() is None:
        return False
    load("allocation.admin_rules")
    return True


def load_for_reserving(terms: ReservationTerms | None = None) -> "dict[str, type[Feature]]":
    """Import what is needed to reserve.

    Args:
        terms: The terms of the request; None if they are not known yet.

    Returns:
        The features that every reservation of this process needs, by their names.

    Raises:
        ReserveGPUError: This process can open no more files.
    """
    may_end = load_for_reading() or terms is None  # a rule may give the reservation an end
    for row in FEATURES:
        if may_end or (terms and row.is_wanted_for(terms)):
            row.load()
    return {row.name: row.load() for row in FEATURES if row.is_wanted_here()}
