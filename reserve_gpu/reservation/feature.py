"""The interface of features, the table of all features, and the imports before a reservation.

No other module imports a feature, so you can delete a feature by deleting its folder and its row.

If a signal handler raises during an import, its thread keeps Python's import lock, and all other
threads that import a module block forever. So the caller's thread imports all modules that a call
needs before the session's thread does the work.
"""

# ruff: noqa: ARG002 - the default methods ignore their arguments

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
    """A check of whether this process or its descendants use the devices.

    Attributes:
        now: The time of the check, in seconds since the epoch.
        at: The time of the check by time.monotonic().
        is_used: Whether a device was in use.
    """

    now: float
    at: float
    is_used: bool


class Owner(Protocol):
    """The part of the session that features use.

    `held`, `run` and `run_within` may be used on any thread, the others only on the session's
    thread.

    Attributes:
        last_look: The latest check of use, which features share.
    """

    last_look: UseLook | None

    @property
    def held(self) -> Holding | None:
        """Return the current reservation."""

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the environment variables that are set for the reservation."""

    def run(self, function: "Callable[[Unpack[Ts]], T]", *arguments: "Unpack[Ts]") -> T:
        """Call the function on the session's thread and return its result."""

    def run_within(
        self, limit_s: float, function: "Callable[[Unpack[Ts]], object]", *arguments: "Unpack[Ts]"
    ) -> None:
        """Call the function on the session's thread, and wait at most `limit_s` seconds."""

    def set_holding(self, held: Holding, *, renew_lease: bool = False) -> None:
        """Replace the reservation."""

    def hide(self) -> None:
        """Hide all devices from this process. They stay reserved."""

    def release_and_hide(self, how: End = End.OVER) -> None:
        """Release the devices and hide them from this process."""

    def wake(self) -> None:
        """Make the session's thread call `Feature.step` of all features now."""


class Leaving(Enum):
    """The kind of program that takes over the reservation of this one."""

    COMMAND = auto()  # any program, after an exec, without this package
    KERNEL = auto()  # a kernel, after an exec, with this package
    RESTART = auto()  # the next kernel, after a restart


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
    """A feature of reservations. The session creates it when a reservation first needs it.

    The session's thread calls the methods, unless their docstrings say otherwise.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def begins(self) -> "list[str]":
        """Prepare a reservation, and return notices about it."""
        return []

    def limited(self, lease: Lease) -> Lease:
        """Return the lease, limited by this feature. Must not block: the mutex may be held."""
        return lease

    def changed(self, change: Change) -> None:
        """Handle a change of the reservation. Must not block: the mutex may be held."""

    def waited(self, wait: Wait) -> None:
        """Handle the end of a wait in the queue."""

    def step(self) -> float | None:
        """Do periodic work, and return the seconds until the next step; None for no next step."""
        return None

    def show(self) -> None:
        """Show the state of the reservation in the current cell. Called on the cell's thread."""

    def cell_begins(self) -> list[str]:
        """Return warnings to show before a cell. Called on the cell's thread."""
        return []

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return warnings to show after a cell. Called on the cell's thread if a device is held.

        Args:
            look: Returns the processes on each held device, if the driver identifies them.
        """
        return []

    def released(self) -> str:
        """Return text to add to the message about a release. Called on the caller's thread."""
        return ""

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """Return the given error or a more specific one. Called on the caller's thread."""
        return error

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Hand over the reservation, and return data for this feature in the next program."""
        return {}


# -- all features ----------------------------------------------------------------------------------

# Variables that a batch system sets in each job, and Kubernetes in each pod.
JOBS = {"SLURM_JOB_ID", "FLUX_JOB_ID", "KUBERNETES_SERVICE_HOST"}


class FeatureRow(NamedTuple):
    """A row in the table of features.

    A reservation needs the feature if `is_wanted_here` or `is_wanted_for` returns True.

    Attributes:
        module: The module that defines the feature, relative to `reserve_gpu`.
        name: The name of the feature's class.
        is_wanted_here: Returns whether every reservation of this process needs the feature.
        is_wanted_for: Returns whether a reservation with the given terms needs the feature.
        options: The module that defines the feature's request options; empty if there are none.
    """

    module: str
    name: str
    is_wanted_here: Callable[[], bool] = lambda: False
    is_wanted_for: Callable[[ReservationTerms], bool] = lambda _: False
    options: str = ""

    def load(self) -> "type[Feature]":
        """Import the feature's module and return the feature's class."""
        loaded: type[Feature] = getattr(load(self.module), self.name)
        return loaded


def _in_cells() -> bool:
    return jupyter_kernel.cells().shell is not None


# Features are called in this order. The history precedes the lease, which reuses its check of use.
FEATURES = (
    FeatureRow("features.job.job_end", "Job", lambda: not JOBS.isdisjoint(os.environ)),
    FeatureRow("features.history.journal", "History", settings.may_have_history),
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
    """Return the request options of all features."""
    rows = [row for row in FEATURES if row.options]
    return tuple(option for row in rows for option in load(row.options).OPTIONS)


def load_for_reading() -> bool:
    """Import the modules for reading devices, and return whether there may be rules.

    Raises:
        ReserveGPUError: The process can't open more files.
    """
    bindings.load()
    if settings.config_file() is None:
        return False
    load("allocation.admin_rules")
    return True


def load_for_reserving(terms: ReservationTerms | None = None) -> "dict[str, type[Feature]]":
    """Import the modules for reserving devices.

    Args:
        terms: The terms of the request; None if they are not known yet.

    Returns:
        The features that every reservation of this process needs, by name.

    Raises:
        ReserveGPUError: The process can't open more files.
    """
    may_end = load_for_reading() or terms is None  # a rule may give the reservation an end
    for row in FEATURES:
        if may_end or (terms and row.is_wanted_for(terms)):
            row.load()
    return {row.name: row.load() for row in FEATURES if row.is_wanted_here()}
