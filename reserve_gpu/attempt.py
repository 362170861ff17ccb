"""One attempt to get what is asked for: look, wait in line if that may help, settle or explain."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from reserve_gpu import choosing, cuda, myself, settings
from reserve_gpu.claim import Claim
from reserve_gpu.holding import Reservation
from reserve_gpu.locks import LockDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reserve_gpu.awaited import Wait
    from reserve_gpu.device import Device, Fault, Request
    from reserve_gpu.holding import Own
    from reserve_gpu.locks import Lock
    from reserve_gpu.nvml import Nvml


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
            is_above = not taken and _is_above(mine, claim, outside)
            if not (taken or is_above or wait_s is None):
                taken = _wait(mine, claim, seen, deadline, limit_s=limit_s, progress=progress)
            if taken:
                return _settle(mine, claim), _cautions(claim, directory)
            claim.refusals = list(claim.explained())
        except BaseException:
            if mine.reservation is previous:
                claim.undo()
                mine.go_back(variables)
            raise
    from reserve_gpu import failure

    raise failure.error(mine, claim, outside, wait_s, is_above=is_above)


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


def _is_above(mine: Own, claim: Claim, outside: Mapping[str, str | None]) -> bool:
    """Whether to wait would be to wait for this process's own end."""
    if not outside[cuda.VISIBLE] or mine.current():
        return False
    from reserve_gpu import failure

    return failure.is_above(claim.refusals)


def _wait(  # noqa: PLR0913 - what `waiting.wait` needs
    mine: Own,
    claim: Claim,
    seen: Sequence[Device | Fault],
    deadline: float,
    *,
    limit_s: float,
    progress: Callable[[Wait], object],
) -> bool:
    """Wait in line until the claim can be taken, True; False if it can't, or the time is over."""
    from reserve_gpu import possible

    if not possible.may_come_free(claim.refusals, claim.request):
        return False
    from reserve_gpu.waiting import wait

    mine.is_waiting = True
    try:
        return wait(claim, seen, deadline, limit_s, progress)
    finally:
        mine.is_waiting = False


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
    if not myself.is_private(directory.path):
        return list(claim.warnings.values())
    from reserve_gpu import refusal

    return [*claim.warnings.values(), refusal.private(directory.path)]
