"""From a request to the reservation, or to what is said in its place."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reserve_gpu import host
from reserve_gpu.calls import Late
from reserve_gpu.errors import ImpossibleError, NoFreeDeviceError, ReserveGPUError, WaitTimeoutError
from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.model import Device, End, Holder, State
from reserve_gpu.reservation import environment, limit, policy
from reserve_gpu.reservation.claim import Claim, attempt
from reserve_gpu.reservation.outcome import (
    Denied,
    Granted,
    Locked,
    NotTaken,
    Refused,
    ReservedAbove,
    TooLate,
)
from reserve_gpu.reservation.request import Deadline, idle_mib, rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reserve_gpu import machine
    from reserve_gpu.locks.queue import Place
    from reserve_gpu.model import Request, Row, Rules
    from reserve_gpu.report import messages, pictures
    from reserve_gpu.report.faces import Face
    from reserve_gpu.reservation import journal, wait
    from reserve_gpu.reservation.session import Session
else:
    # What a grant mostly never needs.
    machine, pictures = Late("machine"), Late("report.pictures")
    messages, journal = Late("report.messages"), Late("reservation.journal")
    wait = Late("reservation.wait")


RETRY_MUTEX_LIMIT_S = 1.0  # who waits tries again rather than to wait long for the mutex
LEAST_WAIT_S = 1.0  # for the mutex: a deadline of no time is no reason to fail by another's look


def take(session: Session, request: Request, deadline: Deadline, ruled: Rules | None) -> list[str]:
    """Take what is asked for, and hold it; returns what there is to be said against it.

    session: this process's, on its thread. ruled: the administrator's rules.
    Raises NotTaken, ImpossibleError, DriverError, LockError.
    """
    limit_mib = idle_mib()
    is_late = environment.cuda_started()
    if is_late and not environment.cuda_uuids():
        raise TooLate(session.devices)
    with Nvml() as gpus:
        gpus.count()  # without a driver nothing is made
        request = session.in_place(request)
        if is_late:
            request = _only_what_cuda_sees(session, request, gpus)
        with LockDirectory() as locks:
            if not is_late:
                limit.inherit(gpus, locks)
            claim = Claim(
                request,
                gpus,
                locks,
                session.inherited(),
                session.locks_in(locks.path),
                part_mib=session.part_mib,
                idle_mib=limit_mib,
                is_taking_back=is_late,
                driver=gpus.driver_version() if request.needed > 1 else None,
                rules=ruled,
            )
            outcome = _outcome(session, claim, deadline)
            if isinstance(outcome, Granted):
                return [*_warnings(claim, outcome), *session.notes]
            raise _failure(session, claim, outcome, deadline)


def _outcome(session: Session, claim: Claim, deadline: Deadline) -> Granted | Denied:
    def keep(granted: Granted) -> None:
        session.hold(granted, claim.request)

    def try_again(claim: Claim, place: Place) -> Granted | Denied:
        # Meanwhile the rules may have changed, and the lease of what is held may have ended.
        held, part_mib = session.locks_in(claim.locks.path), session.part_mib
        claim = claim._replace(held=held, part_mib=part_mib, rules=rules())
        return attempt(claim, keep, place, RETRY_MUTEX_LIMIT_S)

    # Who waits anyway waits for one who is stopped while it has the mutex, too.
    limit_s = max(LEAST_WAIT_S, deadline.left_s) if deadline.waits else MUTEX_LIMIT_S
    outcome = attempt(claim, keep, mutex_limit_s=limit_s)
    if isinstance(outcome, Granted) or not deadline.waits or _is_above(session, claim, outcome):
        return outcome
    if not policy.may_come_free(outcome.rows, claim.request):
        return outcome
    with session.waiting(), _noted_wait(claim.request) as note:
        waited = wait.wait_in_queue(claim, outcome, deadline, try_again, session.between)
        if isinstance(waited, Granted):
            note(End.GRANTED)
    return waited


@contextmanager
def _noted_wait(request: Request) -> Iterator[Callable[[End], object]]:
    """Note in the history how long this waits, and how that ends; by default in vain."""
    began, start, ends = time.time(), time.monotonic(), [End.GAVE_UP]
    try:
        yield ends.append
    finally:
        if host.may_keep_history():
            journal.note_wait(messages.asked(request), began, time.monotonic() - start, ends[-1])


def _failure(
    session: Session, claim: Claim, denied: Denied, deadline: Deadline
) -> ImpossibleError | NotTaken:
    """Return why nothing was taken. Unless the request is wrong, no GPU is visible from now on."""
    request, visible = claim.request, claim.inherited[environment.VISIBLE]
    if policy.is_impossible(denied.rows, request):
        return ImpossibleError(messages.impossible(request, denied.rows, visible))
    is_above = _is_above(session, claim, denied)
    if not is_above:
        session.go_without()  # first: what follows may take long, and be interrupted
    rows = [machine.explained(claim.gpus, row, claim.idle_mib) for row in denied.rows]
    if is_above:
        return ReservedAbove(rows, {name: claim.inherited[name] for name in environment.CUDA})
    has_waited = deadline.waits and policy.may_come_free(rows, request)
    waited_s = deadline.limit_s if has_waited else None
    kept, free, user = session.devices, _free_others(claim, rows), host.user_of(os.getpid())
    problems = claim.rules.problems if claim.rules else ()

    def refusal(face: Face) -> ReserveGPUError:
        picture = pictures.refusal(
            request,
            rows,
            face,
            kept=kept,
            limit=visible,
            waited_s=waited_s,
            user=user,
            problems=problems,
            free=free,
        )
        return (NoFreeDeviceError if waited_s is None else WaitTimeoutError)(picture, rows)

    return Refused(refusal)


def _free_others(claim: Claim, rows: Sequence[Row]) -> list[Row]:
    """Return what is free in place of the named devices; rows: of these, and why they can't be had.

    Nothing if an inherited limit or a rule keeps others from this process, or CUDA has started.
    """
    request, ruled = claim.request, claim.rules
    is_limited = claim.inherited[environment.VISIBLE] is not None or claim.is_taking_back
    if not request.devices or is_limited or any(row.state is State.LIMITED for row in rows):
        return []
    seen = machine.look(claim.gpus, idle_mib=claim.idle_mib, drained=ruled.drained if ruled else ())
    return [
        row
        for row in seen.rows
        if row.state is State.FREE
        and not row.awaited_by
        and not policy.unfit(row.device, request, claim.driver)
        and not names.is_one_of(row.device, request.exclude)
    ]


def _is_above(session: Session, claim: Claim, denied: Denied) -> bool:
    """Tell whether an ancestor has reserved all that this process may use."""
    if session.devices or not claim.inherited[environment.VISIBLE]:
        return False
    is_held = any(row.holders for row in denied.rows)
    return is_held and policy.is_above(denied.rows, host.ancestors())


def _only_what_cuda_sees(session: Session, request: Request, gpus: Nvml) -> Request:
    """Return the request by the names of the devices that CUDA sees. Raises NotTaken.

    CUDA has started, so nothing else can be reserved; but this process may have released these.
    """
    everything = [device for device in gpus.walk() if isinstance(device, Device)]
    by_uuid = {names.bare_uuid(device.uuid): device for device in everything}
    seen = [by_uuid[uuid] for uuid in environment.cuda_uuids() if uuid in by_uuid]
    if narrowed := policy.reclaim(request, seen):
        return narrowed
    # Who never reserved anything sees all GPUs: to reserve them all is no advice to give.
    is_limited = len(seen) < len(everything) or len(everything) == 1
    held = {device.uuid for device in session.devices}
    is_held = all(device.uuid in held for device in seen)
    raise TooLate(session.devices, seen if is_limited and not is_held else ())


def _warnings(claim: Claim, granted: Granted) -> list[str]:
    texts = [messages.caution(row, claim.request) for row in _cautions(claim, granted)]
    if host.is_private(claim.locks.path):
        texts.append(messages.private(claim.locks.path))
    return texts


def _cautions(claim: Claim, granted: Granted) -> list[Row]:
    """Return the rows of the devices that were taken though something is to be said against it."""
    found = [_caution(claim, locked) for locked in granted.locked if not locked.row.is_mine]
    return [row for row in found if row.use is not State.IDLE or row.holders]


def _caution(claim: Claim, locked: Locked) -> Row:
    """Return what others do on the device; of what this process has there nobody is warned.

    Nor of what those do who share it by parts: that was counted.
    """
    row, is_part = locked.row, claim.request.part_mib is not None
    holders = () if is_part else tuple(map(host.with_user, row.holders))
    if row.usage is None or (row.use is State.IDLE and not (is_part and row.holders)):
        return row._replace(holders=holders)
    known = (Holder(os.getpid(), seen=True), *(row.holders if is_part else ()))
    on_it = machine.identified(claim.gpus, claim.gpus.processes(locked.device), known)
    # In a container whose they are can't be seen: a sharer's, perhaps.
    strange = (False,) if is_part else (False, None)
    others = tuple(process for process in on_it if process.has_reserved in strange)
    is_all_seen = len(on_it) >= max(1, (row.usage.compute or 0) + (row.usage.mps or 0))
    is_own = not others and (is_part or is_all_seen)
    use = State.IDLE if is_own else State.BUSY if is_part else row.use
    return row._replace(use=use, processes=others, holders=holders)
