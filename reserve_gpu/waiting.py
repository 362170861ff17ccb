"""Waiting in line: cheap looks at whether anything has changed, dear ones at how all stands."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import awaited, line, myself
from reserve_gpu.device import Wait
from reserve_gpu.errors import MutexHeldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.claim import Claim
    from reserve_gpu.device import Device, Fault
    from reserve_gpu.locks import Lock

POLL_S = 0.25  # between two looks of a waiter at whether anything has changed
LOOK_S = 0.9  # between two looks at how all devices stand, where it has not
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
    progress: called at each look.
    """
    wants = claim.usable()
    about = {**myself.me(claim.request.note), "asks": awaited.asked(claim.request)}
    start = time.monotonic()
    looked = -math.inf
    lock: Lock | None = None
    try:
        while True:
            if time.monotonic() > looked + LOOK_S or not claim.is_hopeless():
                looked = time.monotonic()
                with suppress(MutexHeldError):  # another's driver hangs, perhaps not for ever
                    if lock is None or not lock.stands():  # or somebody deleted the ticket
                        deleted = lock
                        lock, claim.ticket = line.join(claim.directory, wants, about, deadline)
                        if deleted:
                            deleted.release()
                    if claim.take(candidates, deadline, afresh=True):
                        return True
            now = time.monotonic()
            if now >= deadline:
                return False
            place = 1 + sum(not ticket.wants.isdisjoint(wants) for ticket in claim.ahead)
            there = claim.explained(EXPLAIN_EVERY_S)
            progress(Wait(claim.request, place, now - start, there, limit_s))
            time.sleep(min(POLL_S, deadline - now))
    finally:
        if lock:
            lock.release()
