"""Pure functions that decide what to do about a lease, and when to check it again."""

from math import inf
from typing import NamedTuple

from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.requests import Lease

# The first and last warnings are shown this many seconds before a lease ends. For a lease shorter
# than SHORT_S, the last warning is shown at most LAST_OF_SHORT_S seconds before the end.
FIRST_S, LAST_S, LAST_OF_SHORT_S = 600.0, 60.0, 15.0
SHORT_S = 240.0
LONGEST_PAUSE_S = 60.0  # maximum seconds before a suspension or clock change is noticed
WANTED_S = 2.0  # seconds between checks for waiters
CHILD_S = 2.0  # seconds between checks for a child process that is using a device

# After these actions, the lease is not checked again.
FINAL = frozenset({Action.RELEASE, Action.MARK_OVERDUE, Action.END_PROCESS})


class Circumstances(NamedTuple):
    """The facts that determine the next step for a lease.

    Attributes:
        now: The current time, in seconds since the epoch.
        idle_s: The seconds since a cell last ran or a device was last used, whichever is later.
        is_running: Whether a cell is running.
        is_wanted: Whether another process is waiting for a device.
        has_cuda: Whether CUDA has started in this process.
        has_child: Whether a child process is using a device.
        boot: The current time on the boot clock, in seconds.
    """

    now: float
    idle_s: float = 0.0
    is_running: bool = False
    is_wanted: bool = False
    has_cuda: bool = False
    has_child: bool = False
    boot: float = 0.0

    @property
    def instant(self) -> Instant:
        """Return the current time on the wall clock and the boot clock."""
        return Instant(self.now, self.boot)


class Step(NamedTuple):
    """What to do about a lease now, and when to check it again.

    Attributes:
        action: The action to take.
        at: The time at which the lease ends, in seconds since the epoch.
        pause_s: The seconds until the next check, or None if there is no further check.
    """

    action: Action
    at: float
    pause_s: float | None


def end(lease: Lease, seen: Circumstances) -> float:
    """Return the time at which the lease ends if the devices remain idle.

    Args:
        lease: The lease.
        seen: The current circumstances.

    Returns:
        The end time in seconds since the epoch, or infinity if the lease has no end.
    """
    until = lease.at(seen.instant).until
    ends = [] if until is None else [until]
    if lease.idle_s is not None:
        ends.append(seen.now + lease.idle_s - seen.idle_s)
    return min(ends, default=inf)


def is_over(lease: Lease, seen: Circumstances) -> bool:
    """Return whether the lease has ended, even if a cell or `--if-wanted` delays the release.

    Args:
        lease: The lease.
        seen: The current circumstances.
    """
    return end(lease, seen) <= seen.now


def step(lease: Lease, began: float, seen: Circumstances) -> Step:
    """Decide on the next step for a lease.

    Args:
        lease: The lease.
        began: The lease's start time, in seconds since the epoch, corrected for changes to the wall
            clock.
        seen: The current circumstances.
    """
    lease, at = lease.at(seen.instant), end(lease, seen)
    if not is_over(lease, seen):
        return _warnings(lease, at, began, seen.now)
    if seen.is_running and not lease.is_strict:
        return Step(Action.PUT_OFF, at, LONGEST_PAUSE_S)  # a check follows when the cell ends
    if lease.if_wanted and not seen.is_wanted:
        return Step(Action.STAY, at, WANTED_S)
    is_used = seen.has_cuda or seen.has_child
    if is_used and lease.end_kernel:
        return Step(Action.END_PROCESS, at, None)
    if seen.has_cuda:
        return Step(Action.MARK_OVERDUE, at, None)
    if seen.has_child:  # the child process might exit before this one, so check again
        return Step(Action.LEAVE_TO_CHILD, at, CHILD_S)
    return Step(Action.RELEASE, at, None)


def _warnings(lease: Lease, at: float, began: float, now: float) -> Step:
    """Return the step for a lease that has not ended, including any warning that is due."""
    left_s = at - now
    duration_s = (lease.idle_s or 0.0) if lease.is_by_idleness(at) else at - began
    leads = _leads(duration_s)
    due = sum(left_s <= lead_s for lead_s in leads)
    action = (Action.LASTS, Action.WARN, Action.WARN_AGAIN)[due]
    next_s = min([left_s, *(left_s - lead_s for lead_s in leads[due:])])
    return Step(action, at, min(next_s, LONGEST_PAUSE_S))


def _leads(duration_s: float) -> list[float]:
    """Return the lead times of the first and last warnings before the lease ends, in seconds."""
    first_s = min(FIRST_S, duration_s / 2)
    return [first_s, LAST_S if duration_s >= SHORT_S else min(LAST_OF_SHORT_S, first_s / 2)]
