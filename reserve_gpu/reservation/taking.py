"""From a request to the reservation, or to what is said in its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reserve_gpu import host, interrupts
from reserve_gpu.errors import (
    ImpossibleError,
    NoFreeDeviceError,
    ReservedAboveError,
    TooLateError,
    WaitTimeoutError,
)
from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.model import Device
from reserve_gpu.report import messages
from reserve_gpu.reservation import environment, limit, policy
from reserve_gpu.reservation.claim import Claim, attempt, cautions
from reserve_gpu.reservation.outcome import Denied, Granted
from reserve_gpu.reservation.request import Deadline, idle_mib

if TYPE_CHECKING:
    from collections.abc import Callable

    from reserve_gpu.model import Request, Rules, Waiting
    from reserve_gpu.report.faces import Face
    from reserve_gpu.reservation.session import Reservation, Session

LEAST_WAIT_S = 1.0  # for the mutex: a deadline of no time is no reason to fail by another's look


def taken(  # noqa: PLR0913, PLR0917 - how it is asked for, and by whom
    own: Session,
    request: Request,
    deadline: Deadline,
    progress: Callable[[Waiting], object],
    face: Face,
    ruled: Rules | None,
) -> tuple[Reservation, list[str]]:
    """Take what is asked for; returns the reservation, and what there is to be said against it.

    own: of the thread that has the turn. face: as of `api.ask`. ruled: the administrator's rules.
    Raises TooLateError, ImpossibleError, NoFreeDeviceError, DriverError, LockError.
    """
    limit_mib = idle_mib()
    is_late = environment.cuda_started()
    if is_late and not environment.cuda_uuids():
        raise TooLateError(messages.too_late(own.devices, (), face))
    if ruled:
        with interrupts.no_fork():
            from reserve_gpu.reservation import quota
        quota.require_amount(request, ruled)
    with Nvml() as gpus:
        gpus.count()  # without a driver nothing is made
        request = own.in_place(request)
        if is_late:
            request = _only_what_cuda_sees(own, request, gpus, face)
        with LockDirectory() as locks:
            if not is_late:
                limit.inherit(gpus, locks)
            claim = Claim(
                request,
                gpus,
                locks,
                own.outside(),
                own.locks_in(locks.path),
                part_mib=own.part_mib,
                idle_mib=limit_mib,
                is_taking_back=is_late,
                driver=gpus.driver_version() if request.needed > 1 else None,
                rules=ruled,
            )
            outcome = _outcome(own, claim, deadline, progress)
            if isinstance(outcome, Granted):
                with outcome.let_go_if_it_fails(claim.held):
                    reservation = own.hold(outcome, request)
                return reservation, [*_warnings(claim, outcome), *own.notes]
            raise _failure(own, claim, outcome, deadline, face)


def _outcome(
    own: Session, claim: Claim, deadline: Deadline, progress: Callable[[Waiting], object]
) -> Granted | Denied:
    # Who waits anyway waits for one who is stopped while it has the mutex, too.
    limit_s = max(LEAST_WAIT_S, deadline.left_s) if deadline.waits else MUTEX_LIMIT_S
    outcome = attempt(claim, mutex_limit_s=limit_s)
    if isinstance(outcome, Granted) or not deadline.waits or _is_above(own, claim, outcome):
        return outcome
    if not policy.may_come_free(outcome.rows, claim.request):
        return outcome
    with interrupts.no_fork():
        from reserve_gpu.reservation.wait import wait_in_queue
    with own.waiting():
        return wait_in_queue(claim, outcome, deadline, progress)


def _failure(
    own: Session, claim: Claim, denied: Denied, deadline: Deadline, face: Face
) -> ImpossibleError | NoFreeDeviceError:
    """Why nothing was taken. Unless the request was wrong, no GPU is visible from now on."""
    with interrupts.no_fork():
        from reserve_gpu import machine  # which who gets a GPU never needs
        from reserve_gpu.report import pictures
    request, visible = claim.request, claim.outside[environment.VISIBLE]
    if policy.is_impossible(denied.rows, request):
        return ImpossibleError(messages.impossible(request, denied.rows, visible))
    is_above = _is_above(own, claim, denied)
    if not is_above:
        own.go_without()  # first: what follows may take long, and be interrupted
    rows = [machine.explained(claim.gpus, row, claim.idle_mib) for row in denied.rows]
    if is_above:
        values = {name: claim.outside[name] for name in environment.CUDA}
        return ReservedAboveError(messages.above(rows, values, face), rows)
    has_waited = deadline.waits and policy.may_come_free(rows, request)
    waited_s = deadline.limit_s if has_waited else None
    user = host.user_of(os.getpid())
    picture = pictures.refusal(
        request,
        rows,
        face,
        kept=own.devices,
        limit=visible,
        waited_s=waited_s,
        user=user,
        problems=claim.rules.problems if claim.rules else (),
    )
    return (WaitTimeoutError if has_waited else NoFreeDeviceError)(picture, rows)


def _is_above(own: Session, claim: Claim, denied: Denied) -> bool:
    """Whether what this process may use is reserved by one that it was started from."""
    if own.devices or not claim.outside[environment.VISIBLE]:
        return False
    is_held = any(row.holders for row in denied.rows)
    return is_held and policy.is_above(denied.rows, host.ancestors())


def _only_what_cuda_sees(own: Session, request: Request, gpus: Nvml, face: Face) -> Request:
    """The request by the names of the devices that CUDA sees here. Raises TooLateError.

    CUDA has started, so nothing else can be reserved; but this process may have released these.
    """
    everything = [device for device in gpus.walk() if isinstance(device, Device)]
    by_uuid = {names.bare_uuid(device.uuid): device for device in everything}
    seen = [by_uuid[uuid] for uuid in environment.cuda_uuids() if uuid in by_uuid]
    if narrowed := policy.take_back(request, seen):
        return narrowed
    # Who never reserved anything sees all GPUs: to reserve them all is no advice to give.
    is_limited = len(seen) < len(everything) or len(everything) == 1
    held = {device.uuid for device in own.devices}
    is_held = all(device.uuid in held for device in seen)
    raise TooLateError(
        messages.too_late(own.devices, seen if is_limited and not is_held else (), face)
    )


def _warnings(claim: Claim, granted: Granted) -> list[str]:
    texts = [messages.caution(row, claim.request) for row in cautions(claim, granted)]
    if host.is_private(claim.locks.path):
        texts.append(messages.private(claim.locks.path))
    return texts
