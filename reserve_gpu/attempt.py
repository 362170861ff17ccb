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
    from collections.abc import Callable, Iterator, Mapping

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
            is_above = False
            taken = _take(claim, _candidates(nvml, request, outside), seen, deadline)
            if not taken:
                from reserve_gpu import failure, possible

                # There a wait would be one for this process's own end.
                may_be_above = bool(outside[cuda.VISIBLE]) and not mine.current()
                is_above = may_be_above and failure.is_above(claim.refusals)
                may_wait = wait_s is not None and not is_above
                if may_wait and possible.may_come_free(claim.refusals, request):
                    from reserve_gpu.waiting import wait

                    mine.is_waiting = True
                    taken = wait(claim, seen, deadline, limit_s, progress)
            if taken:
                return _settle(mine, claim), _cautions(claim, directory)
            claim.refusals = list(claim.explained())
        except BaseException:
            if mine.reservation is previous:
                claim.undo()
                mine.go_back(variables)
            raise
        finally:
            mine.is_waiting = False
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
