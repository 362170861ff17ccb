"""Tell a holder about the end of the reservation: when it is, that it is near, that it is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.errors import REASON_LIMIT, shown
from reserve_gpu.model import Lease, Promise, Request
from reserve_gpu.report import times, words
from reserve_gpu.report.times import MINUTE_S
from reserve_gpu.report.words import labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model import Device
    from reserve_gpu.report.faces import Face

RELEASED = "This reservation was released."
REPLACED = "Another reservation has taken the place of this one."
HOUR_S = 3600
NEAR_S = 2 * MINUTE_S  # a moment that is so near has its seconds
NAMED_CHILDREN = 3


class LeaseEnd(NamedTuple):
    """The end of a reservation.

    at: when, or since when, in seconds since the epoch. face: where it is read.
    """

    devices: Sequence[Device]
    lease: Lease
    at: float
    face: Face

    @property
    def prolong(self) -> str:
        """Return what to type to hold it for longer, as it was asked for."""
        is_idle = self.is_by_idleness
        lease = Lease(idle_s=self.lease.idle_s) if is_idle else Lease(lasts_s=2.0 * HOUR_S)
        return self.face.typed(Request(promise=Promise(lease=lease)))

    @property
    def is_by_idleness(self) -> bool:
        """Tell whether idleness ends it before the clock does."""
        return self.lease.is_by_idleness(self.at)


def lasts(devices: Sequence[Device], lease: Lease, now: float) -> str:
    """Return `GPU2 is yours until 18:00.`, and when else it is released."""
    ways = []
    if lease.until is not None:
        ways.append(f"until {_clock(lease.until, now)}")
    if lease.idle_s is not None:
        ways.append(f"until it is idle for {times.time_limit(lease.idle_s)}")
    text = f"{labels(devices)} {words.be(len(devices))} yours {', or '.join(ways)}"
    return f"{text}; after that, until somebody waits for it." if lease.if_wanted else f"{text}."


def near(end: LeaseEnd) -> str:
    """Tell that the end is near."""
    what = f"The reservation of {labels(end.devices)} ends at {_clock(end.at, time.time())}"
    why = ""
    if end.is_by_idleness:
        why = f", after {times.time_limit(end.lease.idle_s or 0.0)} without use"
    if end.lease.if_wanted:
        why += ", or later if nobody waits for it"
    return f"{what}{why}.{_to_keep(end)}"


def put_off(end: LeaseEnd) -> str:
    """Say that it is over, and that the running cell may go on to its end."""
    return f"{_has_ended(end)}. It is released when the running cell ends.{_to_keep(end)}"


def may_go(end: LeaseEnd) -> str:
    """Say that it is over, and lasts until somebody waits."""
    return f"{_has_ended(end)}. It lasts until somebody waits for it.{_to_keep(end)}"


def gone(end: LeaseEnd, children: Sequence[str] = ()) -> str:
    """Say that it is released.

    children: what this process has started, which has the variables of the reservation still.
    """
    text = f"{_has_ended(end)}. No GPU is visible to this {end.face.sight} now."
    if children:
        named = [shown(child) for child in children[:NAMED_CHILDREN]]
        more = len(children) - len(named)
        named += [f"{more} more"] if more else []
        text += (
            f" It still is to what was started from here: {words.listed(named)}. End what is to "
            f"use {labels(end.devices)} later."
        )
    return f"{text} To get one:\n{end.face.typed(Request())}"


def overdue(end: LeaseEnd) -> str:
    """Say that it should have ended, and can't as long as CUDA runs here."""
    place = end.face.place
    return (
        f"The reservation of {labels(end.devices)} is overdue{_why(end)}. CUDA runs in this "
        f"{place} and keeps the GPU's memory: restart the {place} to free it.{_to_keep(end)}"
    )


def left_to_child(end: LeaseEnd) -> str:
    """Say that it should have ended, and can't as long as a child uses the devices."""
    return (
        f"The reservation of {labels(end.devices)} is overdue{_why(end)}. A process that was "
        f"started from here uses the GPU: the reservation ends with it.{_to_keep(end)}"
    )


def ending(end: LeaseEnd) -> str:
    """Say that the process is about to end."""
    what = f"the reservation of {labels(end.devices)} is over"
    return f"This {end.face.place} ends: {what}{_why(end)}."


def failed(name: str, why: str) -> str:
    """Say that a function of before_end() has failed. why: what it raised, in words."""
    return f"before_end: {shown(name)} {shown(why, REASON_LIMIT)}."


def _clock(at: float, now: float) -> str:
    """Return a moment, with its seconds where it is near."""
    is_near = at - now < NEAR_S
    return time.strftime("%H:%M:%S", time.localtime(at)) if is_near else times.moment(at, now)


def _to_keep(end: LeaseEnd) -> str:
    return f" To keep {labels(end.devices)}:\n{end.prolong}"


def _has_ended(end: LeaseEnd) -> str:
    return f"The reservation of {labels(end.devices)} has ended{_why(end, 'at')}"


def _why(end: LeaseEnd, when: str = "since") -> str:
    if end.is_by_idleness:
        return f": nothing has used it for {times.time_limit(end.lease.idle_s or 0.0)}"
    return f" {when} {times.moment(end.at, time.time())}"
