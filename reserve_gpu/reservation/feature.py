"""The interface of features, the table of all features, and imports made before a reservation.

No other module imports a feature, so you can remove a feature by deleting its folder and its row in
the table.

If a signal handler raises an exception during an import, the interrupted thread keeps Python's
import lock, and every other thread that imports a module blocks forever. So the caller's thread
imports all the modules that a call needs before the session's thread does the work.
"""

# ruff: noqa: ARG002 - the default methods ignore their arguments

import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reserve_gpu.gpus import bindings
from reserve_gpu.model.clocks import Instant
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
    """The result of checking whether this process or its descendants are using the devices.

    Attributes:
        now: The time of the check.
        at: The time of the check, by time.monotonic().
        is_used: Whether a device was in use, or its use is unknown.
    """

    now: Instant
    at: float
    is_used: bool


class Owner(Protocol):
    """The part of the session that features use.

    `held`, `run` and `run_within` may be used on any thread. All other members may be used only on
    the session's thread.

    Attributes:
        last_look: The result of the latest usage check, which features share.
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
        """Call the function on the session's thread, and wait for at most `limit_s` seconds."""

    def set_holding(self, held: Holding, *, renew_lease: bool = False) -> None:
        """Replace the reservation."""

    def hide(self) -> None:
        """Hide all devices from this process, but keep them reserved."""

    def release_and_hide(self, how: End = End.OVER) -> None:
        """Release the held devices, and hide all devices from this process."""

    def wake(self) -> None:
        """Make the session's thread call every feature's `step` method soon."""


class Leaving(Enum):
    """The kind of program that takes over this program's reservation."""

    COMMAND = auto()  # any other program, started by exec
    KERNEL = auto()  # a Jupyter kernel that uses this package, started by exec
    RESTART = auto()  # the next Jupyter kernel, after a restart


class Wait(NamedTuple):
    """A finished wait in the queue.

    Attributes:
        asks: The request, in words.
        began: When the wait began, in seconds since the epoch.
        waited_s: How long the wait lasted, in seconds.
        how: How the wait ended.
    """

    asks: str
    began: float
    waited_s: float
    how: End


class Feature:
    """A feature of reservations, which the session creates when a reservation first needs it.

    Each method is called on the session's thread, unless the method's docstring says otherwise.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def begins(self) -> "list[str]":
        """Prepare for a reservation request, and return notices for the user."""
        return []

    def limited(self, lease: Lease) -> Lease:
        """Return the lease with this feature's limits applied.

        Must not block, because the mutex might be held.
        """
        return lease

    def changed(self, change: Change) -> None:
        """Handle a change to the reservation.

        Must not block, because the mutex might be held.
        """

    def waited(self, wait: Wait) -> None:
        """Handle a finished wait in the queue."""

    def step(self) -> float | None:
        """Do periodic work, and return the seconds until the next step; None if there is none."""
        return None

    def show(self) -> None:
        """Show the reservation's state in the current cell. Called on the cell's thread."""

    def cell_begins(self) -> list[str]:
        """Return warnings to show before a cell runs. Called on the cell's thread."""
        return []

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return warnings to show after a cell has run.

        Called on the cell's thread, and only if a device is held.

        Args:
            look: A function that returns the processes on each held device. It returns an empty
                mapping if the processes can't be identified.
        """
        return []

    def released(self) -> str:
        """Return text to append to the release message. Called on the caller's thread."""
        return ""

    def explained(self, error: ReserveGPUError) -> ReserveGPUError:
        """Return the given error or a more specific one. Called on the caller's thread."""
        return error

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Hand over the reservation, and return this feature's data for the next program."""
        return {}


# -- all features ----------------------------------------------------------------------------------

# Environment variables that batch systems set in every job, or that Kubernetes sets in every pod.
JOBS = {"SLURM_JOB_ID", "FLUX_JOB_ID", "KUBERNETES_SERVICE_HOST"}


class FeatureRow(NamedTuple):
    """A row in the table of features.

    A reservation needs the feature if `is_wanted_here` or `is_wanted_for` returns True.

    Attributes:
        module: The name, relative to `reserve_gpu`, of the module that defines the feature.
        name: The name of the feature's class.
        is_wanted_here: A function that returns whether every reservation of this process needs the
            feature.
        is_wanted_for: A function that returns whether a reservation with the given terms needs the
            feature.
        options: The name of the module that defines the feature's request options. Empty if the
            feature has none.
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


# Features are called in this order. The history comes before the lease timer, which reuses the
# history's usage check.
FEATURES = (
    FeatureRow("features.job.job_end", "Job", lambda: any(name in os.environ for name in JOBS)),
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
    """Import the modules needed to read devices, and return whether any rules might apply.

    Raises:
        ReserveGPUError: The process can't open more files.
    """
    bindings.load()
    if settings.config_file() is None:
        return False
    load("allocation.admin_rules")
    return True


def load_for_reserving(terms: ReservationTerms | None = None) -> "dict[str, type[Feature]]":
    """Import the modules needed to reserve devices.

    Args:
        terms: The terms of the request; None if they are not known yet.

    Returns:
        The classes of the features that every reservation of this process needs, by name.

    Raises:
        ReserveGPUError: The process can't open more files.
    """
    may_end = load_for_reading() or terms is None  # a rule might limit the lease
    for row in FEATURES:
        if may_end or (terms and row.is_wanted_for(terms)):
            row.load()
    return {row.name: row.load() for row in FEATURES if row.is_wanted_here()}
