"""Which features there are, without their modules: a bare reservation imports none of them."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.requests import Lease, ReservationTerms
from reserve_gpu.system import cells, settings
from reserve_gpu.system.executor import Late

if TYPE_CHECKING:
    from reserve_gpu.model.option import Option
    from reserve_gpu.reservation.feature import Feature

NO_END = "Nothing here ends a reservation by itself, so none that is to end can be had."


class FeatureRow(NamedTuple):
    """A feature: the class of that name in that module.

    is_wanted: tells whether this process needs it, by what a reservation promises: asked before
    there is one, and at each change of it.
    options: the module that has its options of a request. ends: it ends reservations at their time.
    """

    module: str
    name: str
    is_wanted: Callable[[ReservationTerms], bool]
    options: str = ""
    ends: bool = False

    def load(self) -> "type[Feature]":
        """Import its module; returns the class."""
        loaded: type[Feature] = getattr(Late(self.module), self.name)
        return loaded


def _may_log(_: ReservationTerms) -> bool:
    return settings.may_keep_history()


def _in_cells(_: ReservationTerms) -> bool:
    return cells.cells().shell is not None


def _in_job(_: ReservationTerms) -> bool:
    return not _JOBS.isdisjoint(os.environ)


# What a batch system sets in each of its jobs, and Kubernetes in each pod.
_JOBS = {"SLURM_JOB_ID", "FLUX_JOB_ID", "KUBERNETES_SERVICE_HOST"}
# In the order in which they are called: a look that the history makes serves the lease.
FEATURES = (
    FeatureRow("features.job.job_end", "Job", _in_job),
    FeatureRow("features.history.journal", "History", _may_log),
    FeatureRow(
        "features.lease.timer",
        "LeaseTimer",
        lambda terms: terms.lease.has_end,
        "features.lease.lease_options",
        ends=True,
    ),
    FeatureRow("reservation.memory_caps", "PartWatch", lambda terms: terms.size is not None),
    FeatureRow("features.restart.keeper", "Restart", lambda _: cells.kernels_file() is not None),
    FeatureRow("features.remote_requests.handler", "RemoteRequests", _in_cells),
    FeatureRow("features.waiters.notifier", "WaiterNotices", _in_cells),
)


def options() -> "tuple[Option, ...]":
    """Return the options that features add to a request."""
    rows = [row for row in FEATURES if row.options]
    return tuple(option for row in rows for option in Late(row.options).OPTIONS)


def require_end(lease: Lease) -> None:
    """Raise RequestError where no feature would end a reservation at its time."""
    if lease.has_end and not any(row.ends for row in FEATURES):
        raise RequestError(NO_END)
