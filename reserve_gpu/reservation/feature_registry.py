"""The features of a reservation, by the names of their modules.

No module imports a feature, so a feature is deleted with its folder and its row.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.model.requests import ReservationTerms
from reserve_gpu.system import cells, settings
from reserve_gpu.system.loader import load

if TYPE_CHECKING:
    from reserve_gpu.model.option import Option
    from reserve_gpu.reservation.feature import Feature

# What a batch system sets in each of its jobs, and Kubernetes in each pod.
JOBS = {"SLURM_JOB_ID", "FLUX_JOB_ID", "KUBERNETES_SERVICE_HOST"}


class FeatureRow(NamedTuple):
    """A feature.

    Attributes:
        module: The module of its class, below `reserve_gpu`.
        name: The name of that class.
        is_wanted: Returns whether this process needs it for a reservation with these terms.
        options: The module with its options of a request, if it has any.
    """

    module: str
    name: str
    is_wanted: Callable[[ReservationTerms], bool]
    options: str = ""

    def load(self) -> "type[Feature]":
        """Import its module and return its class."""
        loaded: type[Feature] = getattr(load(self.module), self.name)
        return loaded


def _may_log(_: ReservationTerms) -> bool:
    return settings.may_keep_history()


def _in_cells(_: ReservationTerms) -> bool:
    return cells.cells().shell is not None


def _in_job(_: ReservationTerms) -> bool:
    return not JOBS.isdisjoint(os.environ)


# In the order in which they are called: a look that the history makes serves the lease.
FEATURES = (
    FeatureRow("features.job.job_end", "Job", _in_job),
    FeatureRow("features.history.journal", "History", _may_log),
    FeatureRow(
        "features.lease.timer",
        "LeaseTimer",
        lambda terms: terms.lease.has_end,
        options="features.lease.lease_options",
    ),
    FeatureRow("features.over_limit.over_limit", "OverLimit", lambda terms: terms.size is not None),
    FeatureRow("features.restart.keeper", "Restart", lambda _: cells.kernels_file() is not None),
    FeatureRow("features.remote_requests.handler", "RemoteRequests", _in_cells),
    FeatureRow("features.waiters.notifier", "WaiterNotices", _in_cells),
)


def options() -> "tuple[Option, ...]":
    """Return the options that features add to a request."""
    rows = [row for row in FEATURES if row.options]
    return tuple(option for row in rows for option in load(row.options).OPTIONS)
