"""What a capability adds to what a process holds: the methods by which the core calls it."""

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
    from reserve_gpu.render.notices import Notice
    from reserve_gpu.system.executor import Ts


class UseLook(NamedTuple):
    """A look whether this process, and what it has started, use what is held.

    now: when it was, in seconds since the epoch. at: the same by time.monotonic().
    """

    now: float
    at: float
    is_used: bool


class Owner(Protocol):
    """The session, as features may use it: `held` and `run` on any thread, all else on its own.

    last_look: the last one that a feature has made, for others that need one.
    """

    last_look: UseLook | None

    @property
    def held(self) -> Holding | None:
        """Return what is held now."""

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the variables that are set for what is held."""

    def run(self, function: "Callable[[Unpack[Ts]], T]", *arguments: "Unpack[Ts]") -> T:
        """Call the function on the session's thread."""

    def run_within(
        self, limit_s: float, function: "Callable[[Unpack[Ts]], object]", *arguments: "Unpack[Ts]"
    ) -> None:
        """Call the function there, and wait for its end for so long at most."""

    def set_holding(self, held: Holding, *, renew_lease: bool = False) -> None:
        """Hold that from now on."""

    def hide(self) -> None:
        """Let what starts from now on see no device; what is held stays held."""

    def release_and_hide(self, how: End = End.OVER) -> None:
        """Release what is held, so that this process sees no device any more."""

    def wake(self) -> None:
        """Have the steps that are due looked at now."""


class Leaving(Enum):
    """What comes after this program, or this process."""

    COMMAND = auto()  # a program that knows nothing of this package, by exec
    KERNEL = auto()  # a kernel, which loads this package, by exec
    RESTART = auto()  # the next kernel, as this one restarts


class Wait(NamedTuple):
    """A wait in the queue that is over. asks: for what. began: in seconds since the epoch."""

    asks: str
    began: float
    waited_s: float
    how: End


class Feature:
    """What a capability adds; a session makes one when it is wanted first.

    Called on the session's thread, unless it says otherwise.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def begins(self) -> "list[Notice]":
        """Do what comes before a reservation; returns what to tell of it."""
        return []

    def limited(self, lease: Lease) -> Lease:
        """Return until when it can be held at most; perhaps under the mutex, so without a wait."""
        return lease

    def changed(self, change: Change) -> None:
        """Take in what has become of what was held; perhaps under the mutex, so without a wait."""

    def waited(self, wait: Wait) -> None:
        """Take in how a wait in the queue has ended."""

    def step(self) -> float | None:
        """Do what is due, between two calls; returns the seconds until the next step."""
        return None

    def show(self) -> None:
        """Show in a cell that has reserved how that stands; on the thread of the cell."""

    def cell_begins(self) -> list[str]:
        """Return warnings before a cell; on the thread of the cell."""
        return []

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return warnings after a cell, in which something is held; on the thread of the cell.

        look: returns what is on each device that is held, where whose it is can be seen.
        """
        return []

    def released(self) -> str:
        """Return what to tell who has released what was held; on their thread."""
        return ""

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """Return the error of a reservation, or one that says more; on the thread of the caller."""
        return error

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Leave what is held to what comes next; returns facts for this feature there."""
        return {}


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
    return jupyter_kernel.cells().shell is not None


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
