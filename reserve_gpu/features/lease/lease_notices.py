"""The notice about the state of a lease: it lasts, its end is near, or it is over."""

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
NEAR_S = 2 * MINUTE_S  # a time within this has its seconds
NAMED_CHILDREN = 3
OVER = (  # the last text, without and with another reservation that follows
    "This reservation was released.",
    "Another reservation has taken the place of this one.",
)
JOB_OVER = "The end of the job has passed: this reservation lasts as long as its process."


class Action(Enum):
    """How a lease stands."""

    LASTS = "it lasts"
    WARN = "its end is near"
    WARN_AGAIN = "its end is very near"
    PUT_OFF = "it is over, and a cell runs"
    STAY = "it is over, and nobody waits"
    RELEASE = "it is over"
    LEAVE_TO_CHILD = "it is over, and a child uses the devices"
    MARK_OVERDUE = "it is over, and CUDA uses the devices"
    END_PROCESS = "it is over, and CUDA is to release the devices"


class LeaseNotice(NamedTuple):
    """The state of the lease of the held devices.

    Attributes:
        action: What happens to it.
        devices: The devices.
        lease: The lease.
        at: The time of its end, in seconds since the epoch.
        children: Processes started from here that still have the variables of the reservation.
        is_guest: This process has joined it, so only its holder can prolong it.
        size: The size of the part of each GPU; None for whole GPUs.
        longer_s: The seconds from now for which the rules still allow it.
        rule: The rule that limits it.
    """

    action: Action
    devices: Sequence[Device]
    lease: Lease
    at: float
    children: Sequence[str] = ()
    is_guest: bool = False
    size: Size | None = None
    longer_s: float = inf
    rule: Rule | None = None

    def text(self, frontend: Frontend) -> str:
        """Return the text for the holder."""
        if self.action is Action.LASTS:
            return self._lasts()
        if self.action is Action.RELEASE:
            text = f"{self._has_ended()}. No GPU is visible to this {frontend.sight} now."
            count = len(self.devices)
            again = Request(count=count if count > 1 else None, terms=ReservationTerms(self.size))
            what = f"{count} again" if count > 1 else "one"
            return f"{text}{self._still_visible()} To get {what}:\n{frontend.typed(again)}"
        if self.action is Action.END_PROCESS:
            what = f"the reservation of {labels(self.devices)} is over"
            return f"This {frontend.place} ends: {what}{self._why()}."
        return f"{self._goes_on(frontend)}{self._to_keep(frontend)}"

    def _goes_on(self, frontend: Frontend) -> str:
        """Return the sentence about a reservation near its end, or after it."""
        overdue = f"The reservation of {labels(self.devices)} is overdue{self._why()}."
        if self.action is Action.PUT_OFF:
            return f"{self._has_ended()}. It is released when the running cell ends."
        if self.action is Action.STAY:
            return f"{self._has_ended()}. It lasts until somebody waits for it."
        if self.action is Action.LEAVE_TO_CHILD:
            child = "A process that was started from here uses the GPU"
            return f"{overdue} {child}: the reservation ends with it."
        if self.action is Action.MARK_OVERDUE:
            cuda = f"CUDA runs in this {frontend.place} and keeps the GPU's memory"
            return f"{overdue} {cuda}: restart the {frontend.place} to free it."
        return self._near()

    def _lasts(self) -> str:
        """Return `GPU2 is yours until 18:00.`, with the other conditions of its end."""
        devices, lease = self.devices, self.lease
        ways = []
        if lease.until is not None:
            jobs = ", the job's end" if lease.is_jobs else ""
            ways.append(f"until {_clock(lease.until)}{jobs}")
        if lease.idle_s is not None:
            ways.append(f"until it is idle for {durations.time_limit(lease.idle_s)}")
        text = f"{labels(devices)} {phrases.be(len(devices))} yours {', or '.join(ways)}"
        return (
            f"{text}; after that, until somebody waits for it." if lease.if_wanted else f"{text}."
        )

    def _near(self) -> str:
        if self._is_jobs:
            return f"The job ends at {_clock(self.at)}, and all that runs in it: save your work."
        what = f"The reservation of {labels(self.devices)} ends at {_clock(self.at)}"
        why = ""
        if self._is_by_idleness:
            why = f", after {durations.time_limit(self.lease.idle_s or 0.0)} without use"
        if self.lease.if_wanted:
            why += ", or later if nobody waits for it"
        return f"{what}{why}."

    def _still_visible(self) -> str:
        """Name the processes started from here that have the variables of the reservation."""
        if not self.children:
            return ""
        named = [sanitize(child) for child in self.children[:NAMED_CHILDREN]]
        more = len(self.children) - len(named)
        named += [f"{more} more"] if more else []
        return (
            f" It still is to what was started from here: {phrases.listed(named)}. End what is to "
            f"use {labels(self.devices)} later."
        )

    def _to_keep(self, frontend: Frontend) -> str:
        """Return the command that prolongs it.

        The command has only the new end, because it is for the held devices: see `Holding.as_held`.
        """
        if self.is_guest or self._is_jobs:
            return ""
        lease = Lease(idle_s=self.lease.idle_s)
        if not self._is_by_idleness:
            longest_s = self.longer_s // MINUTE_S * MINUTE_S if self.rule else inf
            lease = Lease(lasts_s=min(2.0 * HOUR_S, longest_s))
            left_s = max(0.0, self.at - time.time())
            if self.rule and longest_s < left_s + MINUTE_S:
                return f" It can't last longer: {phrases.named(self.rule)}."
        typed = frontend.typed(Request(terms=ReservationTerms(lease=lease)))
        return f" To keep {labels(self.devices)}:\n{typed}"

    def _has_ended(self) -> str:
        return f"The reservation of {labels(self.devices)} has ended{self._why('at')}"

    def _why(self, when: str = "since") -> str:
        if self._is_by_idleness:
            return f": nothing has used it for {durations.time_limit(self.lease.idle_s or 0.0)}"
        return f" {when} {durations.moment(self.at, time.time())}"

    @property
    def _is_jobs(self) -> bool:
        """Return whether the batch system ends it."""
        return self.lease.is_jobs and not self._is_by_idleness

    @property
    def _is_by_idleness(self) -> bool:
        """Return whether idleness ends it before the clock does."""
        return self.lease.is_by_idleness(self.at)


def _clock(at: float) -> str:
    """Return a time, with its seconds if it is near."""
    now = time.time()
    is_near = at - now < NEAR_S
    return time.strftime("%H:%M:%S", time.localtime(at)) if is_near else durations.moment(at, now)
