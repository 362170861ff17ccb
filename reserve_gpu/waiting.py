"""Waiting in line: a look at how all stands now and then, and whenever somebody lets go."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import awaited, line, myself
from reserve_gpu.awaited import Wait
from reserve_gpu.changes import Changes
from reserve_gpu.device import State
from reserve_gpu.errors import MutexHeldError
from reserve_gpu.files import file_name
from reserve_gpu.locks import MUTEX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.claim import Claim
    from reserve_gpu.device import Device, Fault
    from reserve_gpu.locks import Lock

LOOK_S = 1.0  # between two looks at devices that only the driver can tell about
QUIET_S = 5.0  # where all are reserved: so old may what is said of their holders be
POLL_S = 0.25  # between two looks where somebody has; so many who wait don't keep each other busy
LIVELY_S = 2.0  # so long after that: a GPU may be in use a little longer than it is reserved
EXPLAIN_EVERY_S = 5.0  # so often a waiter asks again which processes are on a busy device


def wait(
    claim: Claim,
    candidates: Sequence[Device | Fault],
    deadline: float,
    limit_s: float,
    progress: Callable[[Wait], object],
) -> bool:
    """Stand in line until the claim can be taken, True, or the time is over, False.

    deadline: by time.monotonic(), in seconds. limit_s: the time from the start to it.
    progress: called at each look, and now and then in between.
    """
    waiter = _Waiter(claim, candidates, deadline)
    start = time.monotonic()
    due = lively_until = -math.inf
    sees_all, is_told = myself.sees_all_locks(), False
    try:
        with Changes(
            claim.directory.descriptor, POLL_S, counts=not sees_all, unheard=MUTEX
        ) as changes:
            while True:
                is_due = time.monotonic() >= due
                if is_due or not waiter.stands() or (waiter.sees_less() if sees_all else is_told):
                    changes.forget()  # not after the look: of what happens meanwhile it is told
                    if waiter.gets_it():
                        return True
                    now = time.monotonic()
                    lively_until = lively_until if is_due else now + LIVELY_S
                    is_lively = now < lively_until or not waiter.has_looked
                    due = now + (POLL_S if is_lively else _pause_s(claim))
                now = time.monotonic()
                if now >= deadline:
                    return False
                there = claim.explained(EXPLAIN_EVERY_S)
                progress(Wait(claim.request, waiter.place(), now - start, there, limit_s))
                is_told = changes.wait(min(due - now, deadline - now, _to_the_next(now - start)))
    finally:
        waiter.leave()


class _Waiter:
    """Who stands in line for a claim, with a ticket that others see."""

    def __init__(self, claim: Claim, candidates: Sequence[Device | Fault], deadline: float) -> None:
        self._claim = claim
        self._candidates = candidates
        self._deadline = deadline
        unfit = {refusal.label for refusal in claim.refusals if refusal.state == "unfit"}
        # UUIDs of the devices that would do, were they free.
        self._wants = [d.uuid for label, d in claim.considered.items() if label not in unfit]
        self._about = {**myself.me(claim.request.note), "asks": awaited.asked(claim.request)}
        self._lock: Lock | None = None
        self._missing: set[str] = set()
        self.has_looked = False

    def stands(self) -> bool:
        """Whether the ticket is there, for others to see."""
        return self._lock is not None and self._lock.held() and self._lock.stands()

    def gets_it(self) -> bool:
        """Take what is asked for, if nobody else has it or waits for it before this process."""
        self.has_looked = False
        until = min(self._deadline, time.monotonic() + LOOK_S)
        with suppress(MutexHeldError):  # another's driver hangs, perhaps not for ever
            if not self.stands():  # or not any more, as somebody has deleted it
                self._join(until)
            taken = self._claim.take(self._candidates, until, afresh=True)
            self.has_looked = True
            return taken
        return False

    def sees_less(self) -> bool:
        """Whether somebody has let go of a device, or a place in the line, since it last asked.

        Cheap: it reads the kernel's list of locks, which must show all of them, and asks neither
        the driver nor for the mutex. What is missing there and taken all the same, as somebody has
        deleted the file, has been looked at once.
        """
        claim, before = self._claim, self._missing
        reserved = [
            claim.considered[r.label].uuid for r in claim.refusals if r.state == State.RESERVED
        ]
        files = [(file_name(uuid), file_name(uuid, shared=True)) for uuid in reserved]
        files += [(line.file_name(ticket.place),) * 2 for ticket in claim.ahead]
        locked = claim.directory.holders.locked([name for either in files for name in either])
        self._missing = {either[0] for either in files if locked.isdisjoint(either)}
        return not self._missing <= before

    def place(self) -> int:
        """The place in the line of those who could use the same devices; 1 is next."""
        return 1 + sum(not ticket.wants.isdisjoint(self._wants) for ticket in self._claim.ahead)

    def leave(self) -> None:
        """Leave the line."""
        if self._lock:
            self._lock.release()

    def _join(self, until: float) -> None:
        deleted = self._lock
        self._lock, self._claim.ticket = line.join(
            self._claim.directory, self._wants, self._about, until
        )
        if deleted:
            deleted.release()


def _to_the_next(waited_s: float) -> float:
    """The seconds to the next full one, so that who is shown them misses none."""
    return LOOK_S - waited_s % LOOK_S


def _pause_s(claim: Claim) -> float:
    """For how long to leave the driver alone."""
    states = {refusal.state for refusal in claim.refusals}
    return QUIET_S if states.isdisjoint({State.BUSY, State.UNKNOWN, State.BROKEN}) else LOOK_S
