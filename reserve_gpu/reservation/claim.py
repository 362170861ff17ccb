"""One attempt to take what a request asks for: lock first, then look; all of it or nothing.

A look before the lock proves nothing, as somebody else may take the device in between.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu import host
from reserve_gpu.calls import Late
from reserve_gpu.errors import TOO_MANY_FILES, LockError
from reserve_gpu.gpus import usage
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Link, Nvml
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory, device_of
from reserve_gpu.locks.holders import is_sharers, without_guests
from reserve_gpu.locks.lock import Lock
from reserve_gpu.locks.queue import Place
from reserve_gpu.model import (
    Device,
    Fault,
    Holder,
    Lease,
    Request,
    Row,
    Rules,
    State,
    Ticket,
)
from reserve_gpu.reservation import limit, parts, policy
from reserve_gpu.reservation.outcome import Denied, Granted, Locked, Taken

if TYPE_CHECKING:
    from reserve_gpu.reservation import quota
else:
    quota = Late("reservation.quota")  # which only rules need

# Others wait for the mutex meanwhile: the readings of a look have so long, all together. A GPU that
# was touched before answers within milliseconds, unless the driver hangs.
READINGS_LIMIT_S = 2.0
LEAST_LIMIT_S = 0.1  # for each reading
TOUCH_S = 0.02  # GPUs are touched for so long before the mutex is taken for a look at all of them


class Claim(NamedTuple):
    """All that an attempt needs to know.

    inherited: the CUDA variables without our changes. held: locks that this process has
    already, by UUID. part_mib: of each of them what it was promised, if that is a part.
    idle_mib: memory in use up to which a device is idle, None for the default.
    is_taking_back: CUDA has started, so this process itself may be on the devices.
    candidates: the devices to try, None where that has still to be found out.
    driver: its version, where that matters. rules: the administrator's, where there are some.
    by_rules: in an attempt, why this user may not have a device, None for one that is allowed.
    """

    request: Request
    gpus: Nvml
    locks: LockDirectory
    inherited: Mapping[str, str | None]
    held: Mapping[str, Lock]
    part_mib: float | None = None
    idle_mib: float | None = None
    is_taking_back: bool = False
    candidates: Sequence[Device | Fault] | None = None
    driver: str | None = None
    rules: Rules | None = None
    by_rules: Callable[[Device], Row | None] | None = None


def attempt(
    claim: Claim,
    keep: Callable[[Granted], object] = lambda _: None,
    place: Place | None = None,
    mutex_limit_s: float = MUTEX_LIMIT_S,
) -> Granted | Denied:
    """Take what is asked for, or say of each device why it could not be had.

    keep: is given what was taken, under the mutex; if it raises, all of that is released.
    place: in the queue, of one who waits; who does not wait comes after all who do.
    mutex_limit_s: for how long to wait for the mutex.
    Raises LockError, and RequestError for a name that means no device.
    """
    rows: list[Row] = []
    ahead: list[Ticket] = []
    queue = place or Place(claim.locks)
    # Rules count what this user has of any device.
    everything = tuple(claim.gpus.walk()) if claim.rules else ()
    for devices in _batches(claim):
        with claim.locks.mutex(mutex_limit_s), Taken(claim.held) as taken:
            if place and not place.stands():
                place.join()
            ahead = queue.ahead()
            lease = claim.request.promise.lease
            if claim.rules:
                claim, lease = _ruled(claim, claim.rules, devices, everything)
            if chosen := _choose(claim, devices, queue, taken):
                granted = taken.granted(chosen)
                lease = _begun(claim, lease, granted)
                granted = granted._replace(lease=lease)
                keep(granted)
                taken.keep(granted)
                return granted
            if place:
                place.want(policy.wanted(taken.rows))
        rows += taken.rows
    return Denied(tuple(rows), tuple(ahead))


def _batches(claim: Claim) -> Iterator[list[Device | Fault]]:
    """Yield the devices to try, in parts that are looked at together.

    A GPU that is reached here is touched, which may take seconds, so this is done outside of the
    mutex. Where the first free one will do no GPU is touched needlessly: the first part is one GPU,
    the others what can be touched in an instant, as taking the mutex for each of many takes longer.
    """
    if claim.candidates is not None:
        yield [_refreshed(claim.gpus, device) for device in claim.candidates]
        return
    candidates = limit.candidates(claim.gpus, claim.request, claim.inherited)
    if not policy.first_will_do(claim.request):
        yield list(candidates)
        return
    part: list[Device | Fault] = []
    touch_until = 0.0
    for device in candidates:
        part.append(device)
        if time.monotonic() >= touch_until:
            yield part
            part, touch_until = [], time.monotonic() + TOUCH_S
    if part:
        yield part


def _refreshed(gpus: Nvml, device: Device | Fault) -> Device | Fault:
    """Return the same device read anew; what could not be used before may have come back."""
    if isinstance(device, Device):
        return device
    there = gpus.devices(device.index)
    return next((place for place in there if place.instance == device.instance), device)


def _choose(
    claim: Claim, devices: Sequence[Device | Fault], queue: Place, taken: Taken
) -> list[Device] | None:
    readings_until = time.monotonic() + READINGS_LIMIT_S

    def link(one: Device, other: Device) -> int:
        left_s = readings_until - time.monotonic()
        return claim.gpus.link(one, other, left_s) if left_s > 0 else Link.SYSTEM

    def choose() -> list[Device] | None:
        rank = {uuid: locked.rank for uuid, locked in taken.locked.items()}
        there = [locked.device for locked in taken.locked.values()]
        return policy.choose(there, claim.request, rank, link)

    for device in devices:
        left_s = max(LEAST_LIMIT_S, readings_until - time.monotonic())
        taken.add(_locked(claim, device, queue, left_s))
        if policy.first_will_do(claim.request) and (chosen := choose()):
            return chosen
    return None if policy.first_will_do(claim.request) else choose()


def _ruled(
    claim: Claim,
    rules: Rules,
    devices: Sequence[Device | Fault],
    everything: Sequence[Device | Fault],
) -> tuple[Claim, Lease]:
    """Return the claim with the rules for this user's devices and times; under the mutex.

    What this process has already does not count: what it asks for comes in its place.
    """
    held_names = [lock.name for lock in claim.held.values()]
    uuids = [device.uuid for device in everything if isinstance(device, Device)]
    since = [lock.since for lock in claim.held.values()]
    found: dict[str, list[Holder]] = {}
    for holder in claim.locks.holders_by(os.geteuid(), uuids, held_names):
        found.setdefault(device_of(holder.file or ""), []).append(holder)
    # A guest counts with its holder, which has the same device.
    elsewhere = [each for those in found.values() for each in without_guests(those, since)]
    by_rules = quota.judge(rules, claim.request, devices, claim.held, elsewhere, everything)
    return claim._replace(by_rules=by_rules), quota.lease(claim.request.promise.lease, rules)


def _begun(claim: Claim, lease: Lease, granted: Granted) -> Lease:
    """Return the lease from now on; some of it this process may have had already."""
    lease = lease.begun(time.time())
    if claim.rules is None:
        return lease
    return quota.counted(lease, claim.rules, min(each.lock.since for each in granted.locked))


def _locked(claim: Claim, device: Device | Fault, queue: Place, limit_s: float) -> Locked | Row:
    """Lock one device, look at it, and keep the lock only if it will do."""
    request = claim.request
    reason = device.reason if isinstance(device, Fault) else None
    if unfit := policy.unfit(device, request, claim.driver):
        return Row(device, State.UNFIT, reason=reason, unfit=unfit)
    if isinstance(device, Fault):
        return Row(device, device.state, reason=reason)
    if claim.by_rules and (row := claim.by_rules(device)):
        return row
    held_lock, is_part = claim.held.get(device.uuid), request.part_mib is not None
    if held_lock and held_lock.shared == request.share:
        if not is_part:
            return _kept(claim, device, held_lock)
        return _judged(claim, device, held_lock, queue, limit_s)
    lock = _lock(claim, device, held_lock)
    if isinstance(lock, Row):
        return lock
    if held_lock and not is_part:  # from whole to shared, or back
        return _kept(claim, device, lock)
    is_kept = False
    try:
        answer = _judged(claim, device, lock, queue, limit_s)
        is_kept = isinstance(answer, Locked)
        return answer
    finally:
        if not is_kept:
            lock.release()


def _lock(claim: Claim, device: Device, held_lock: Lock | None) -> Lock | Row:
    """Lock one device as it is asked for."""
    since = held_lock.since if held_lock else None
    try:
        lock = claim.locks.lock_device(
            device.uuid, share=claim.request.share, held=held_lock, since=since
        )
    except LockError as error:
        if str(error) == TOO_MANY_FILES:  # which is no fault of the device
            raise
        return Row(device, State.UNKNOWN, reason=str(error))
    if isinstance(lock, Lock):
        return lock
    sharers = claim.locks.sharers_of(device.uuid, [held_lock.name] if held_lock else ())
    is_whole = not is_sharers(lock.file or "")
    return Row(device, State.RESERVED, holders=(lock, *sharers) if is_whole else sharers or (lock,))


def _kept(claim: Claim, device: Device, lock: Lock) -> Locked:
    """Return a device that this process has already as one that will do."""
    row = Row(device, State.RESERVED, holders=_this_process(claim, device), is_mine=True)
    return Locked(device, lock, row)


def _this_process(claim: Claim, device: Device) -> tuple[Holder, ...]:
    """Return this process as others see it, if it has the device."""
    lock = claim.held.get(device.uuid)
    return (claim.locks.holders.of(lock.name),) if lock else ()


def _judged(claim: Claim, device: Device, lock: Lock, queue: Place, limit_s: float) -> Locked | Row:
    """Tell whether the device, now locked, will do for all that others have or await of it."""
    request, room = claim.request, None
    # Read before the memory: what a sharer takes in between is counted twice rather than not.
    shares = _shares(claim, device, lock) if request.part_mib is not None else None
    try:
        reading = claim.gpus.usage(device, limit_s)
    except DeviceError as error:
        return Row(device, error.state, reason=str(error))
    use = usage.judge(reading, claim.idle_mib)
    row = Row(device, use, reading, use=use)
    if shares is None:
        sharers = claim.locks.sharers_of(device.uuid, [lock.name]) if request.share else ()
        row = row._replace(holders=sharers)
    elif any(sharer.is_alone for sharer in shares[0]):  # whose holder has gone
        sharers = tuple(shares[0])
        row = row._replace(holders=sharers)
    elif room := parts.room(device, reading, *shares):
        sharers, mine = room.sharers, _this_process(claim, device)
        row = row._replace(holders=mine + sharers, is_mine=bool(mine), promisable_mib=room.most_mib)
    else:
        return row._replace(state=State.UNKNOWN, use=State.UNKNOWN)
    if any(sharer.is_alone for sharer in sharers):
        return row._replace(state=State.RESERVED)
    is_open = policy.is_to_be_taken(request, use, reading, is_shared=bool(sharers))
    is_open = is_open or claim.is_taking_back  # this process itself may be on it
    if room and is_open and room.most_mib < (request.part_mib or 0.0):
        return row._replace(state=State.FULL)
    first = _first(claim, device, queue, row, room, is_open=is_open)
    if first or not is_open:
        state = State.AWAITED if is_open else use
        return row._replace(state=state, awaited_by=first and first.holder)
    return Locked(device, lock, row)


def _first(  # noqa: PLR0913 - of a look, with what was found in it
    claim: Claim,
    device: Device,
    queue: Place,
    row: Row,
    room: parts.Room | None,
    *,
    is_open: bool,
) -> Ticket | None:
    """Return who in the queue comes before this process for the device, None for nobody."""
    if room is None:
        if claim.is_taking_back:
            return None
        # A ticket doesn't say whether its holder would share: beside sharers nothing is an offer.
        return queue.first_for(device.uuid, is_free=lambda _: is_open and not row.holders)
    if not is_open:
        return None
    is_whole_free = row.use is State.IDLE and not row.holders

    def is_delayed(ahead: Sequence[Ticket]) -> bool:
        return room.is_delayed([ticket.part_mib for ticket in ahead], claim.request.part_mib or 0.0)

    def is_free(ahead: Ticket) -> bool:
        return is_whole_free if ahead.part_mib is None else ahead.part_mib <= room.free_mib

    return queue.first_for(device.uuid, is_free=is_free, is_delayed=is_delayed)


def _shares(claim: Claim, device: Device, lock: Lock) -> tuple[list[Holder], parts.Own]:
    """Return the sharers of the device, with what they use of it, and this process."""
    sharers = claim.locks.sharers_of(device.uuid, [lock.name])
    promised_mib = (claim.part_mib or 0.0) if device.uuid in claim.held else 0.0
    if not sharers and not claim.held and not claim.is_taking_back:
        return [], parts.Own()
    if not claim.gpus.sees_all:  # a pid may be another process's in our PID namespace
        since = [lock.since for lock in claim.held.values()]
        return without_guests(sharers, since), parts.Own(promised_mib, None)
    held_lock = claim.held.get(device.uuid)
    taken = held_lock.since if held_lock else None
    own = Holder(os.getpid(), since=taken, seen=True, uid=os.geteuid())
    everybody = host.with_uses((own, *sharers), claim.gpus.processes(device))
    this_process, *known = without_guests(everybody)
    return known, parts.Own(promised_mib, this_process.used_mib)
