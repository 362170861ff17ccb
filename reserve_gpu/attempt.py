"""One attempt to get what is asked for: look, wait in line if that may help, settle or explain."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import choosing, cuda, processes, report, settings
from reserve_gpu.claim import Claim
from reserve_gpu.device import Wait
from reserve_gpu.errors import (
    ImpossibleError,
    MutexHeldError,
    NoFreeDeviceError,
    ReservedAboveError,
    WaitTimeoutError,
)
from reserve_gpu.holding import Reservation
from reserve_gpu.locks import LockDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reserve_gpu.device import Device, Fault, Request
    from reserve_gpu.holding import Own
    from reserve_gpu.locks import Lock
    from reserve_gpu.nvml import Nvml

POLL_S = 0.2  # between two looks of a waiter at whether anything has changed
LOOK_S = 0.9  # between two looks at how all devices stand, where it has not
EXPLAIN_EVERY_S = 5.0  # so often a waiter asks again which processes are on a busy device


def run(
    mine: Own,
    nvml: Nvml,
    request: Request,
    wait_s: float | None,
    progress: Callable[[Wait], object],
) -> tuple[Reservation, list[str]]:
    """Make what is asked for this process's reservation; returns it, and what speaks against it.

    mine: what this process holds. wait_s: for how long to wait in line, None for not at all.
    progress: called now and then while this waits. Raises what `reserve` says.
    """
    limit_s = math.inf if wait_s is None else wait_s
    deadline = time.monotonic() + limit_s
    outside, previous, variables = mine.outside_environment(), mine.reservation, mine.variables()
    idle_mib = settings.idle_mib()
    nvml.count()  # without a driver nothing is made
    with LockDirectory() as directory:
        claim = Claim(nvml, directory, request, _standing(mine, directory), idle_mib)
        try:
            seen: list[Device | Fault] = []
            taken = _take(claim, _candidates(nvml, request, outside), seen, deadline)
            # There a wait would be one for this process's own end.
            limited = outside[cuda.VISIBLE] and not mine.current()
            is_above = bool(not taken and limited) and claim.is_above()
            may_wait = not taken and wait_s is not None and not is_above
            if may_wait and choosing.may_come_free(claim.refusals, request):
                mine.is_waiting = True
                taken = _wait(
                    claim, directory, seen, deadline, lambda w: progress(w.replace(limit_s=limit_s))
                )
            if taken:
                return _settle(mine, claim), _cautions(claim, directory)
            refusals = claim.explained()
        except BaseException:
            if mine.reservation is previous:
                claim.undo()
                mine.go_back(variables)
            raise
        finally:
            mine.is_waiting = False
    _require_possible(claim, outside[cuda.VISIBLE])
    if is_above:
        raise ReservedAboveError(report.above(claim.refusals, outside))
    mine.go_without()
    kept = held.devices if (held := mine.current()) else ()
    has_waited = bool(wait_s and claim.ticket)
    visible = outside[cuda.VISIBLE]
    text = report.nothing_free(refusals, request.count, kept, visible, has_waited=has_waited)
    if wait_s is not None and claim.ticket:
        raise WaitTimeoutError(f"{report.waited(wait_s)}{text}")
    raise NoFreeDeviceError(text)


def _standing(mine: Own, directory: LockDirectory) -> dict[str, Lock]:
    """The locks of this process that others respect: those in the directory of now."""
    if not (held := mine.current()):
        return {}
    held.renew()
    return {
        u: lock for u, lock in held.locks.items() if os.path.dirname(lock.path) == directory.path
    }


def _candidates(
    nvml: Nvml, request: Request, outside: Mapping[str, str | None]
) -> Iterator[Device | Fault]:
    """The devices to try, in order: all, unless the request or somebody outside limits them."""
    if not (request.devices or request.exclude or outside[cuda.VISIBLE] is not None):
        return nvml.walk()
    from reserve_gpu import fence  # most requests need no rule of it

    return fence.candidates(nvml, request, outside)


def _take(
    claim: Claim, candidates: Iterator[Device | Fault], seen: list[Device | Fault], deadline: float
) -> bool:
    """Try the candidates, one by one where the first will do, else all of them together.

    A candidate is touched here, outside of the mutex: that may take seconds, which others need not
    wait for. seen: is given all that were touched. deadline: by time.monotonic(), in seconds.
    """
    one_by_one = choosing.first_will_do(claim.request)
    for one in candidates:
        seen.append(one)
        if one_by_one and claim.take([one], deadline):
            return True
    return not one_by_one and claim.take(seen, deadline)


def _wait(
    claim: Claim,
    directory: LockDirectory,
    candidates: Sequence[Device | Fault],
    deadline: float,
    progress: Callable[[Wait], object],
) -> bool:
    """Stand in line until the claim can be taken, True, or the time is over, False."""
    from reserve_gpu import line

    wants = claim.usable()
    about = {**processes.me(claim.request.note), "asks": report.asked(claim.request)}
    start = time.monotonic()
    looked = -math.inf
    lock: Lock | None = None
    try:
        while True:
            if time.monotonic() > looked + LOOK_S or not claim.is_hopeless():
                looked = time.monotonic()
                with suppress(MutexHeldError):  # another's driver hangs, perhaps not for ever
                    if lock is None or not lock.stands():  # or somebody deleted the ticket
                        lock, claim.ticket = line.join(directory, wants, about, deadline)
                    if claim.take(candidates, deadline, afresh=True):
                        return True
            now = time.monotonic()
            if now >= deadline:
                return False
            place = 1 + sum(not ticket.wants.isdisjoint(wants) for ticket in claim.ahead)
            there = claim.explained(EXPLAIN_EVERY_S)
            progress(Wait(claim.request, place, now - start, there))
            time.sleep(min(POLL_S, deadline - now))
    finally:
        if lock:
            lock.release()


def _settle(mine: Own, claim: Claim) -> Reservation:
    """Set the variables for what was claimed, and let go of what was held before."""
    before = mine.reservation
    values = cuda.variables(claim.devices)
    environ = {name: value for name, value in values.items() if value is not None}
    mine.set_environment(values)
    mine.reservation = Reservation(claim.devices, claim.locks, environ, claim.request.note)
    if before:
        before.hand_over(claim.locks)
    return mine.reservation


def _cautions(claim: Claim, directory: LockDirectory) -> list[str]:
    """What there is to be said against what was claimed."""
    private = [report.private(directory.path)] if settings.is_private(directory.path) else []
    return [*claim.warnings.values(), *private]


def _require_possible(claim: Claim, visible: str | None) -> None:
    """Raise ImpossibleError if no state of this machine could satisfy the request."""
    if reason := choosing.impossible(claim.refusals, claim.request):
        raise ImpossibleError(" ".join([reason, *report.limit(visible, len(claim.refusals))]))
    if claim.request.exclude and not claim.refusals:
        raise ImpossibleError("Every GPU that this process may use is excluded.")
