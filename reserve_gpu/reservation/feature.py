"""The interface of features, the list of all of them, and the imports before a reservation.

No module imports a feature, so a feature is deleted with its folder and its row.

A signal handler that raises during an import leaves Python's import lock with its thread, and every
other thread that imports a module would wait for ever. So the caller's thread imports what a call
needs, before the session's thread does the work.
"""

# ruff: noqa: ARG002 - the methods are empty

import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reserve_gpu.gpus import bindings
from reserve_gpu.model.devices import Device, Process
from reserve_gpu.model.errors import ReserveGPUError
from reserve_gpu.model.requests import End, Fact, Lease, ReservationTerms
from reserve_gpu.reservation.holding import Change, Holding
from reserve_gpu.system import jupyter_kernel, settings
from reserve_gpu.system.executor import T
from reserve_gpu.system.loader import load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from reserve_gpu.model.option import Option
    from reserve_gpu.system.executor import Ts


class UseLook(NamedTuple):
    """A check whether this process or its descendants use the devices.

    Attributes:
        now: The time of the check, in seconds since the epoch.
        at: The same moment by time.monotonic().
        is_used: The result.
    """

    now: float
    at: float
    is_used: bool


class Owner(Protocol):
    """The part of the session that features use.

    `held`, `run` and `run_within` may be used on any thread, all else on the session's thread.

    Attributes:
        last_look: The last check of a feature, for other features.
    """

    last_look: UseLook | None

    @property
    def held(self) -> Holding | None:
        """Return the current reservation."""

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the variables that are set for it."""

    def run(self, function: "Callable[[Unpack[Ts]], T]", *arguments: "Unpack[Ts]") -> T:
        """Call the function on the session's thread."""

    def run_within(
        self, limit_s: float, function: "Callable[[Unpack[Ts]], object]", *arguments: "Unpack[Ts]"
    ) -> None:
        """Call the function there, and wait at most `limit_s` seconds."""

    def set_holding(self, held: Holding, *, renew_lease: bool = False) -> None:
        """Replace the reservation."""

    def hide(self) -> None:
        """Hide all devices from this process. They stay reserved."""

    def release_and_hide(self, how: End = End.OVER) -> None:
        """Release the devices and hide them from this process."""

    def wake(self) -> None:
        """Call the steps of the features now."""


class Leaving(Enum):
    """The program that continues after this one."""

    COMMAND = auto()  # a program that knows nothing of this package, by exec
    KERNEL = auto()  # a kernel, which loads this package, by exec
    RESTART = auto()  # the next kernel, as this one restarts


class Wait(NamedTuple):
    """A finished wait in the queue.

    Attributes:
        asks: The request, in words.
        began: The time when it began, in seconds since the epoch.
        waited_s: Its duration in seconds.
        how: How it ended.
    """

    asks: str
    began: float
    waited_s: float
    how: End


class Feature:
    """A feature of a reservation. A session creates it when a reservation first needs it.

    Methods are called on the session's thread, unless they say otherwise.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def begins(self) -> "list[str]":
        """Prepare a reservation, and return notices about it."""
        return []

    def limited(self, lease: Lease) -> Lease:
        """Return the lease with a limit of its own. Must not block: the mutex may be held."""
        return lease

    def changed(self, change: Change) -> None:
        """Handle a change of the reservation. Must not block: the mutex may be held."""

    def waited(self, wait: Wait) -> None:
        """Handle the end of a wait in the queue."""

    def step(self) -> float | None:
        """Do periodic work between two calls, and return the seconds until the next step."""
        return None

    def show(self) -> None:
        """Show the state of the reservation in its cell. Called on the thread of the cell."""

    def cell_begins(self) -> list[str]:
        """Return warnings before a cell. Called on the thread of the cell."""
        return []

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return warnings after a cell. Called on the thread of the cell if a device is held.

        Args:
            look: Returns the processes on each device, if they can be identified.
        """
        return []

    def released(self) -> str:
        """Return a message about a release. Called on the thread of the caller."""
        return ""

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """Return the error, or a more specific one. Called on the thread of the caller."""
        return error

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Hand the reservation over, and return facts for this feature in the next program."""
        return {}


# -- all features ----------------------------------------------------------------------------------

# Variables that a batch system sets in each job, and Kubernetes in each pod.
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
    return jupyter_kernel.cells().shell is not None


# They are called in this order: the lease uses the check that the history has just made.
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
    FeatureRow(
        "features.restart.keeper", "Restart", lambda: jupyter_kernel.kernels_file() is not None
    ),
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
