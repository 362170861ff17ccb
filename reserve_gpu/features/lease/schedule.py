"""What is due of a lease, and when to look again. Pure functions of values."""

from math import inf
from typing import NamedTuple

from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.requests import Lease

# So long before the end people are warned; what lasts for less than SHORT_S has times of its own.
FIRST_S, LAST_S, LAST_OF_SHORT_S = 600.0, 60.0, 15.0
SHORT_S = 240.0
LONGEST_PAUSE_S = 60.0  # within it a suspension, or a wall clock that was set, is noticed
WANTED_S = 2.0  # between two looks at whether somebody waits
CHILD_S = 2.0  # between two looks at whether a child still uses a device


FINAL = frozenset({Action.RELEASE, Action.MARK_OVERDUE, Action.END_PROCESS})


class Circumstances(NamedTuple):
    """What decides.

    now: in seconds since the epoch. idle_s: for how long nothing has used the devices.
    is_running: a cell runs. is_wanted: somebody waits for a device. has_cuda: CUDA has started.
    has_child: a process that was started from here uses a device.
    boot: now by the boot clock.
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
        """Return this instant by both clocks."""
        return Instant(self.now, self.boot)


class Step(NamedTuple):
    """What to do, and when the lease ends, or has ended.

    pause_s: until the next look; None where nothing follows.
    """

    action: Action
    at: float
    pause_s: float | None


def end(lease: Lease, seen: Circumstances) -> float:
    """Return the moment at which the lease ends if nothing happens, in seconds since the epoch."""
    until = lease.at(seen.instant).until
    moments = [] if until is None else [until]
    if lease.idle_s is not None:
        moments.append(seen.now + lease.idle_s - seen.idle_s)
    return min(moments, default=inf)


def is_over(lease: Lease, seen: Circumstances) -> bool:
    """Tell whether the lease has ended, whatever puts that off."""
    return end(lease, seen) <= seen.now


def step(lease: Lease, began: float, seen: Circumstances) -> Step:
    """Decide the next step.

    began: when the lease began, by the wall clock as that is set now.
    """
    lease, at = lease.at(seen.instant), end(lease, seen)
    if not is_over(lease, seen):
        return _warnings(lease, at, began, seen.now)
    if seen.is_running and not lease.is_strict:
        return Step(Action.PUT_OFF, at, LONGEST_PAUSE_S)  # the end of the cell comes before
    if lease.if_wanted and not seen.is_wanted:
        return Step(Action.STAY, at, WANTED_S)
    is_used = seen.has_cuda or seen.has_child
    if is_used and lease.end_kernel:
        return Step(Action.END_PROCESS, at, None)
    if seen.has_cuda:
        return Step(Action.MARK_OVERDUE, at, None)
    if seen.has_child:  # it may end before this process
        return Step(Action.LEAVE_TO_CHILD, at, CHILD_S)
    return Step(Action.RELEASE, at, None)


def _warnings(lease: Lease, at: float, began: float, now: float) -> Step:
    """Return which warnings are due, and when the next one is."""
    left_s = at - now
    whole_s = (lease.idle_s or 0.0) if lease.is_by_idleness(at) else at - began
    leads = _leads(whole_s)
    due = sum(left_s <= lead_s for lead_s in leads)
    action = (Action.LASTS, Action.WARN, Action.WARN_AGAIN)[due]
    next_s = min([left_s, *(left_s - lead_s for lead_s in leads[due:])])
    return Step(action, at, min(next_s, LONGEST_PAUSE_S))


def _leads(whole_s: float) -> list[float]:
    """Return how long before the end the warnings are due, the first one first.

    whole_s: for how long the lease lasts from its begin to its end.
    """
    first_s = min(FIRST_S, whole_s / 2)
    return [first_s, LAST_S if whole_s >= SHORT_S else min(LAST_OF_SHORT_S, first_s / 2)]
