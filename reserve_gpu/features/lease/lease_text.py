"""Tell a holder about the end of the reservation: when it is, that it is near, that it is over."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.model.errors import sanitize
from reserve_gpu.model.requests import Lease, Request, ReservationTerms
from reserve_gpu.render import durations, phrases
from reserve_gpu.render.durations import MINUTE_S
from reserve_gpu.render.phrases import labels

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend

HOUR_S = 3600
NEAR_S = 2 * MINUTE_S  # a moment that is so near has its seconds
NAMED_CHILDREN = 3
OVER = (  # the last word, and the same where another reservation follows
    "This reservation was released.",
    "Another reservation has taken the place of this one.",
)

JOB_OVER = "The end of the job has passed: this reservation lasts as long as its process."


def say(notice: LeaseNotice, frontend: Frontend) -> str:
    """Return what the holder reads there."""
    if notice.action is Action.LAST:
        return _lasts(notice)
    if notice.action is Action.RELEASE:
        text = f"{_has_ended(notice)}. No GPU is visible to this {frontend.sight} now."
        count = len(notice.devices)
        again = Request(count=count if count > 1 else None, terms=ReservationTerms(notice.size))
        what = f"{count} again" if count > 1 else "one"
        return f"{text}{_still_visible(notice)} To get {what}:\n{frontend.typed(again)}"
    if notice.action is Action.END_PROCESS:
        what = f"the reservation of {labels(notice.devices)} is over"
        return f"This {frontend.place} ends: {what}{_why(notice)}."
    return f"{_goes_on(notice, frontend)}{_to_keep(notice, frontend)}"


def _goes_on(notice: LeaseNotice, frontend: Frontend) -> str:
    """Say how a reservation goes on that ends, or should have ended."""
    overdue = f"The reservation of {labels(notice.devices)} is overdue{_why(notice)}."
    if notice.action is Action.PUT_OFF:
        return f"{_has_ended(notice)}. It is released when the running cell ends."
    if notice.action is Action.STAY:
        return f"{_has_ended(notice)}. It lasts until somebody waits for it."
    if notice.action is Action.LEAVE_TO_CHILD:
        child = "A process that was started from here uses the GPU"
        return f"{overdue} {child}: the reservation ends with it."
    if notice.action is Action.MARK_OVERDUE:
        cuda = f"CUDA runs in this {frontend.place} and keeps the GPU's memory"
        return f"{overdue} {cuda}: restart the {frontend.place} to free it."
    return _near(notice)


def _lasts(notice: LeaseNotice) -> str:
    """Return `GPU2 is yours until 18:00.`, and when else it is released."""
    devices, lease = notice.devices, notice.lease
    ways = []
    if lease.until is not None:
        jobs = ", the job's end" if lease.is_jobs else ""
        ways.append(f"until {_clock(lease.until)}{jobs}")
    if lease.idle_s is not None:
        ways.append(f"until it is idle for {durations.time_limit(lease.idle_s)}")
    text = f"{labels(devices)} {phrases.be(len(devices))} yours {', or '.join(ways)}"
    return f"{text}; after that, until somebody waits for it." if lease.if_wanted else f"{text}."


def _near(notice: LeaseNotice) -> str:
    if _is_jobs(notice):
        return f"The job ends at {_clock(notice.at)}, and all that runs in it: save your work."
    what = f"The reservation of {labels(notice.devices)} ends at {_clock(notice.at)}"
    why = ""
    if _is_by_idleness(notice):
        why = f", after {durations.time_limit(notice.lease.idle_s or 0.0)} without use"
    if notice.lease.if_wanted:
        why += ", or later if nobody waits for it"
    return f"{what}{why}."


def _still_visible(notice: LeaseNotice) -> str:
    """Name what was started from here, and has the variables of the reservation still."""
    if not notice.children:
        return ""
    named = [sanitize(child) for child in notice.children[:NAMED_CHILDREN]]
    more = len(notice.children) - len(named)
    named += [f"{more} more"] if more else []
    return (
        f" It still is to what was started from here: {phrases.listed(named)}. End what is to "
        f"use {labels(notice.devices)} later."
    )


def _clock(at: float) -> str:
    """Return a moment, with its seconds where it is near."""
    now = time.time()
    is_near = at - now < NEAR_S
    return time.strftime("%H:%M:%S", time.localtime(at)) if is_near else durations.moment(at, now)


def _to_keep(notice: LeaseNotice, frontend: Frontend) -> str:
    """Return what to type to hold it for longer, as it was asked for.

    An end alone is for what is held: see `Held.as_held`.
    """
    if notice.is_guest or _is_jobs(notice):
        return ""
    lease = Lease(idle_s=notice.lease.idle_s)
    if not _is_by_idleness(notice):
        longest_s = notice.longer_s // MINUTE_S * MINUTE_S if notice.rule else inf
        lease = Lease(lasts_s=min(2.0 * HOUR_S, longest_s))
        left_s = max(0.0, notice.at - time.time())
        if notice.rule and longest_s < left_s + MINUTE_S:
            return f" It can't last longer: {phrases.named(notice.rule)}."
    typed = frontend.typed(Request(terms=ReservationTerms(lease=lease)))
    return f" To keep {labels(notice.devices)}:\n{typed}"


def _has_ended(notice: LeaseNotice) -> str:
    return f"The reservation of {labels(notice.devices)} has ended{_why(notice, 'at')}"


def _why(notice: LeaseNotice, when: str = "since") -> str:
    if _is_by_idleness(notice):
        return f": nothing has used it for {durations.time_limit(notice.lease.idle_s or 0.0)}"
    return f" {when} {durations.moment(notice.at, time.time())}"


def _is_jobs(notice: LeaseNotice) -> bool:
    """Tell whether it is the batch system that ends it."""
    return notice.lease.is_jobs and not _is_by_idleness(notice)


def _is_by_idleness(notice: LeaseNotice) -> bool:
    """Tell whether idleness ends it before the clock does."""
    return notice.lease.is_by_idleness(notice.at)
