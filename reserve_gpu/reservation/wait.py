"""Waiting in the queue: an attempt now and then, and whenever somebody has let go of something."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import calls
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.locks.queue import Place, Wakeups
from reserve_gpu.locks.record import Asks, Record, myself
from reserve_gpu.model import NO_LEASE, Device, State, Waiting
from reserve_gpu.report import messages
from reserve_gpu.reservation import policy
from reserve_gpu.reservation.claim import Claim, explained
from reserve_gpu.reservation.outcome import Denied, Granted

if TYPE_CHECKING:
    from collections.abc import Callable

    from reserve_gpu.model import Refusal
    from reserve_gpu.reservation.request import Deadline

SECOND_S = 1.0  # what counts seconds is shown anew each second
EXPLAIN_EVERY_S = 5.0  # so often a waiter asks again who is on a device that is refused as before


def wait_in_queue(
    claim: Claim,
    denied: Denied,
    deadline: Deadline,
    attempt: Callable[[Claim, Place], Granted | Denied],
    between: Callable[[], object],
) -> Granted | Denied:
    """Wait in the queue until what is asked for can be taken, or the time is over.

    denied: what came of the first attempt. attempt: makes another one. between: called again and
    again while this waits. Each second, and after each look, the caller is told how it stands.
    """
    claim = claim._replace(candidates=[refusal.device for refusal in denied.refusals])
    fitting = _fitting(denied)
    request = claim.request
    promise = request.promise._replace(lease=NO_LEASE)
    record = Record(myself(), promise, Asks(messages.asked(request), request.needed))
    explain = Explainer(claim)
    outcome: Granted | Denied = denied
    start = due = time.monotonic()
    lively_until = 0.0
    with (
        Place(claim.locks, policy.wanted(denied.refusals), record) as place,
        Wakeups(claim.locks) as wakeups,
    ):
        news = News(claim)
        while isinstance(outcome, Denied):
            if time.monotonic() >= due or not place.stands():
                outcome = _look(claim, outcome, place, wakeups, attempt)
                if isinstance(outcome, Granted):
                    break
                news.forget(outcome)
                due = time.monotonic() + policy.next_look_s(
                    outcome.refusals,
                    is_lively=time.monotonic() < lively_until or not place.stands(),
                    is_told=wakeups.is_told,
                )
            if not deadline.left_s:
                break
            place.heartbeat()
            waited_s = time.monotonic() - start
            number = 1 + sum(any(map(t.could_use, fitting)) for t in outcome.ahead)
            refusals = tuple(map(explain, outcome.refusals))
            calls.tell(Waiting(claim.request, number, waited_s, refusals, deadline.limit_s or 0.0))
            next_second = start + waited_s - waited_s % SECOND_S + SECOND_S
            if wakeups.wait(min(due, deadline.at, next_second), news, between):
                due = time.monotonic()
                lively_until = due + policy.LIVELY_S
    return outcome


class News:
    """Whether somebody may have let go of a device, or of a place in the queue, since a look."""

    def __init__(self, claim: Claim) -> None:
        self._locks = claim.locks
        self._names: list[str] = []
        self._missing: set[str] = set()

    def forget(self, denied: Denied) -> None:
        """Begin anew with what the last look has seen."""
        holders = [h for r in denied.refusals for h in (r.holder, *r.sharers) if h]
        self._names = [holder.file for holder in holders if holder.file]
        self._names += [ticket.name for ticket in denied.ahead]

    def __call__(self) -> bool:
        """Look into the kernel's list. What it does not show though it is held is no news twice."""
        before = self._missing
        with suppress(LockError):
            self._missing = self._locks.unlisted(self._names)
        return not self._missing <= before


class Explainer:
    """Explains refusals, and asks again about the same device only now and then."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._known: dict[str, tuple[Refusal, float, Refusal]] = {}

    def __call__(self, refusal: Refusal) -> Refusal:
        """Return the refusal with what runs on the device and whose it is."""
        before, asked_at, answer = self._known.get(refusal.label, (None, 0.0, refusal))
        if not _is_alike(before, refusal) or time.monotonic() - asked_at >= EXPLAIN_EVERY_S:
            answer = explained(self._claim, refusal)
            self._known[refusal.label] = refusal, time.monotonic(), answer
        return answer


def _look(
    claim: Claim,
    denied: Denied,
    place: Place,
    wakeups: Wakeups,
    attempt: Callable[[Claim, Place], Granted | Denied],
) -> Granted | Denied:
    """Try once more. A fault that may pass does not end the wait of one who is in the queue.

    Raises LockError where this process can't even join the queue.
    """
    try:
        if claim.locks.follow():
            wakeups.watch()
        return attempt(claim, place)
    except MutexHeldError:  # by one whose driver hangs, perhaps not for ever
        return denied
    except LockError:  # a full disk, say
        if not place.has_joined:
            raise
        return denied


def _fitting(denied: Denied) -> list[str]:
    """Return the UUIDs of the devices that would do if they were free."""
    fitting = [r.device for r in denied.refusals if r.state is not State.UNFIT]
    return [device.uuid for device in fitting if isinstance(device, Device)]


def _is_alike(before: Refusal | None, refusal: Refusal) -> bool:
    if before is None:
        return False
    people = [
        [h and (h.pid, h.part_mib) for h in (r.holder, *r.sharers)] for r in (before, refusal)
    ]
    return before.state is refusal.state and people[0] == people[1]
