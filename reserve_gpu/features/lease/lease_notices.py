"""Messages that tell the holder that a lease has started, will end soon, or has ended."""

import time
from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

from reserve_gpu.model.devices import Device
from reserve_gpu.model.requests import Lease, Request, ReservationTerms, Rule, Size
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, phrases
from reserve_gpu.render.durations import MINUTE_S
from reserve_gpu.render.frontends import Frontend
from reserve_gpu.render.phrases import labels

HOUR_S = 3600
NEAR_S = 2 * MINUTE_S  # times that are closer than this many seconds are shown with seconds
NAMED_CHILDREN = 3  # maximum number of child processes named in a message
OVER = (  # final messages; the second is for a reservation that was replaced
    "This reservation was released.",
    "This reservation was replaced by another one.",
)
JOB_OVER = "The job's end time has passed, so this reservation lasts until its process ends."


class Action(Enum):
    """What to do about a lease. The value describes the lease's state."""

    LASTS = "the lease has not ended"
    WARN = "the lease ends soon"
    WARN_AGAIN = "the lease ends very soon"
    PUT_OFF = "the lease has ended, but a cell is running"
    STAY = "the lease has ended, but no process is waiting for the devices"
    RELEASE = "the lease has ended"
    LEAVE_TO_CHILD = "the lease has ended, but a child process is using the devices"
    MARK_OVERDUE = "the lease has ended, but CUDA is using the devices"
    END_PROCESS = "the lease has ended, and the process must end to release the devices"


class LeaseNotice(NamedTuple):
    """The state of a lease, as needed for a message to the holder.

    Attributes:
        action: The action that follows from the lease's state.
        devices: The held devices.
        lease: The lease.
        at: The time at which the lease ends, in seconds since the epoch.
        children: Child processes that still have the reservation's environment variables.
        is_joined: Whether this is a joined process. Only the holder can extend the lease.
        size: The memory reserved on each GPU, or None for whole GPUs.
        longer_s: The maximum time for which the rules still allow the reservation, in seconds.
        rule: The administrator's rule that limits the time, or None if there is no limit.
    """

    action: Action
    devices: Sequence[Device]
    lease: Lease
    at: float
    children: Sequence[str] = ()
    is_joined: bool = False
    size: Size | None = None
    longer_s: float = inf
    rule: Rule | None = None

    def text(self, frontend: Frontend) -> str:
        """Return the message to the holder.

        Args:
            frontend: The front end that shows the message. It determines how commands are written.
        """
        if self.action is Action.LASTS:
            return self._lasts()
        if self.action is Action.RELEASE:
            text = f"{self._has_ended()}. No GPU is visible to this {frontend.sight} now."
            count = len(self.devices)
            again = Request(count=count if count > 1 else None, terms=ReservationTerms(self.size))
            what = f"{count} again" if count > 1 else "one"
            return f"{text}{self._still_visible()} To get {what}:\n{frontend.typed(again)}"
        if self.action is Action.END_PROCESS:
            ended = self._has_ended()
            return f"This {frontend.place} is ending because {ended[0].lower()}{ended[1:]}."
        return f"{self._continues(frontend)}{self._to_keep(frontend)}"

    def _continues(self, frontend: Frontend) -> str:
        """Describe a lease that will end soon, or that has ended without releasing the devices."""
        devices = labels(self.devices)
        if self.action is Action.PUT_OFF:
            return f"{self._has_ended()}. {devices} will be released when the running cell ends."
        if self.action is Action.STAY:
            return f"{self._has_ended()}. {self._kept_until_wanted()}"
        if self.action is Action.LEAVE_TO_CHILD:
            child = "A process started from here is still using a reserved GPU"
            return (
                f"{self._is_overdue()} {child}, so the reservation lasts until that process ends."
            )
        if self.action is Action.MARK_OVERDUE:
            cuda = f"CUDA is running in this {frontend.place} and holds GPU memory"
            return f"{self._is_overdue()} {cuda}: restart the {frontend.place} to free it."
        return self._near()

    def _lasts(self) -> str:
        """Return text such as `GPU2 is yours until 18:00.`, including all end conditions."""
        devices, lease = self.devices, self.lease
        ends = []
        if lease.until is not None:
            jobs = ", the job's end" if lease.is_jobs else ""
            ends.append(f"until {_clock(lease.until)}{jobs}")
        if lease.idle_s is not None:
            have = "it has" if len(devices) == 1 else "they have"
            ends.append(f"until {have} been idle for {durations.time_limit(lease.idle_s)}")
        text = f"{labels(devices)} {phrases.be(len(devices))} yours {', or '.join(ends)}."
        return f"{text} After that, {self._kept_until_wanted('you')}" if lease.if_wanted else text

    def _kept_until_wanted(self, you: str = "You") -> str:
        return f"{you} keep {labels(self.devices)} until another process waits for a GPU."

    def _near(self) -> str:
        if self._is_jobs:
            return f"The job and all its processes end at {_clock(self.at)}. Save your work."
        text = f"The reservation of {labels(self.devices)} ends at {_clock(self.at)}"
        if self._is_by_idleness:
            text += f", after {durations.time_limit(self.lease.idle_s or 0.0)} without use"
        if self.lease.if_wanted:
            text += ", or later if no other process is waiting for a GPU"
        return f"{text}."

    def _still_visible(self) -> str:
        """Return a warning that names the child processes that can still see the devices."""
        if not self.children:
            return ""
        named = [sanitize(child) for child in self.children[:NAMED_CHILDREN]]
        more = len(self.children) - len(named)
        named += [f"{more} more"] if more else []
        count = len(self.devices)
        return (
            f" {labels(self.devices)} {phrases.be(count)} still visible to processes started from "
            f"here: {phrases.listed(named)}. End any that might use "
            f"{'it' if count == 1 else 'them'} later."
        )

    def _to_keep(self, frontend: Frontend) -> str:
        """Return the command that extends the lease.

        The command specifies only the new end time, so it applies to the held devices (see
        `Holding.as_held`).
        """
        if self.is_joined or self._is_jobs:
            return ""
        lease = Lease(idle_s=self.lease.idle_s)
        if not self._is_by_idleness:
            longest_s = self.longer_s // MINUTE_S * MINUTE_S if self.rule else inf
            lease = Lease(lasts_s=min(2.0 * HOUR_S, longest_s))
            left_s = max(0.0, self.at - time.time())
            if self.rule and longest_s < left_s + MINUTE_S:
                return f" A rule doesn't allow you to extend it: {phrases.named(self.rule)}."
        typed = frontend.typed(Request(terms=ReservationTerms(lease=lease)))
        return f" To keep {labels(self.devices)}:\n{typed}"

    def _has_ended(self) -> str:
        """Return text such as `The reservation of GPU2 ended at 18:00`."""
        text = f"The reservation of {labels(self.devices)} ended"
        if self._is_by_idleness:
            return f"{text} after {durations.time_limit(self.lease.idle_s or 0.0)} without use"
        return f"{text} at {durations.moment(self.at, time.time())}"

    def _is_overdue(self) -> str:
        """Return text such as `The reservation of GPU2 has been overdue since 18:00.`."""
        text = f"The reservation of {labels(self.devices)}"
        if self._is_by_idleness:
            idle = durations.time_limit(self.lease.idle_s or 0.0)
            return f"{text} is overdue after {idle} without use."
        return f"{text} has been overdue since {durations.moment(self.at, time.time())}."

    @property
    def _is_jobs(self) -> bool:
        """Return whether the lease ends because the batch job ends."""
        return self.lease.is_jobs and not self._is_by_idleness

    @property
    def _is_by_idleness(self) -> bool:
        """Return whether the lease ends because of its idle limit."""
        return self.lease.is_by_idleness(self.at)


def _clock(at: float) -> str:
    """Return a time of day, including seconds if the time is less than NEAR_S seconds away."""
    now = time.time()
    is_near = at - now < NEAR_S
    return time.strftime("%H:%M:%S", time.localtime(at)) if is_near else durations.moment(at, now)
