"""One attempt to take what a request asks for: lock first, then look; all of it or nothing.

A look before the lock proves nothing, as somebody else may take the device in between.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reserve_gpu import host
from reserve_gpu.calls import late
from reserve_gpu.errors import LockError
from reserve_gpu.gpus import usage
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Link, Nvml
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.locks.lock import Lock
from reserve_gpu.locks.queue import Place
from reserve_gpu.model import (
    Caution,
    Device,
    Fault,
    Holder,
    Lease,
    Process,
    Refusal,
    Request,
    Rules,
    State,
    Ticket,
    Usage,
)
from reserve_gpu.reservation import limit, parts, policy
from reserve_gpu.reservation.outcome import Denied, Granted, Locked, Taken

# Others wait for the mutex meanwhile: the readings of a look have so long, all together. A GPU that
# was touched before answers within milliseconds, unless the driver hangs.
READINGS_LIMIT_S = 2.0
LEAST_LIMIT_S = 0.1  # for each reading
TOUCH_S = 0.02  # GPUs are touched for so long before the mutex is taken for a look at all of them


class Claim(NamedTuple):
    """All that an attempt needs to know.

    outside: the CUDA variables as somebody outside set them. held: locks that this process has
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
    outside: Mapping[str, str | None]
    held: Mapping[str, Lock]
    part_mib: float | None = None
    idle_mib: float | None = None
    is_taking_back: bool = False
    candidates: Sequence[Device | Fault] | None = None
    driver: str | None = None
    rules: Rules | None = None
    by_rules: Callable[[Device], Refusal | None] | None = None


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
    refusals: list[Refusal] = []
    ahead: list[Ticket] = []
    queue = place or Place(claim.locks)
    for devices in _batches(claim):
        with claim.locks.mutex(mutex_limit_s), Taken(claim.held) as taken:
            if place and not place.stands():
                place.join()
            ahead = queue.ahead()
            lease = claim.request.promise.lease
            if claim.rules:
                claim, lease = _ruled(claim, claim.rules, devices)
            if chosen := _choose(claim, devices, queue, taken):
                granted = taken.granted(chosen)
                lease = _begun(claim, lease, granted)
                granted = granted._replace(lease=lease)
                keep(granted)
                taken.keep(granted)
                return granted
            if place:
                place.want(policy.wanted(taken.refusals))
        refusals += taken.refusals
    return Denied(tuple(refusals), tuple(ahead))


def cautions(claim: Claim, granted: Granted) -> list[Caution]:
    """What there is to be said against the devices that were taken."""
    found = [_caution(claim, locked, locked.usage) for locked in granted.locked if locked.usage]
    return [caution for caution in found if caution.state is not State.IDLE or caution.sharers]


def _caution(claim: Claim, locked: Locked, reading: Usage) -> Caution:
    """What others do on the device; what this process itself has there is no use to warn of.

    Nor is what those do who share it by parts: that was counted.
    """
    state, sharers = locked.state, tuple(map(host.with_user, locked.sharers))
    if locked.room_mib is not None:
        processes = _processes(claim, locked.device) if claim.gpus.sees_all else []
        strangers = parts.strangers(processes, locked.sharers)
        state = State.BUSY if strangers else State.IDLE
        return Caution(locked.device, state, reading, strangers)
    if state is State.IDLE:
        return Caution(locked.device, state, reading, (), sharers)
    processes = _processes(claim, locked.device)
    own_pid = os.getpid() if claim.gpus.sees_all else None  # else a pid may be another process's
    others = tuple(process for process in processes if process.pid != own_pid)
    count = (reading.compute or 0) + (reading.mps or 0)
    if processes and not others and len(processes) >= count:
        state = State.IDLE
    return Caution(locked.device, state, reading, others, sharers)


def explained(claim: Claim, refusal: Refusal) -> Refusal:
    """The refusal with what runs on the device and whose it is.

    Asked late, and only where somebody will read it: users, commands and readings can be slow.
    """
    if refusal.holder:
        refusal = refusal._replace(holder=host.with_user(refusal.holder))
    refusal = refusal._replace(sharers=tuple(map(host.with_user, refusal.sharers)))
    if not isinstance(refusal.device, Device) or refusal.fault or refusal.unfit:
        return refusal
    reading = refusal.usage
    if reading is None and refusal.state is State.RESERVED:
        reading = _usage(claim, refusal.device)
    is_used = reading is not None and usage.judge(reading, claim.idle_mib) is State.BUSY
    processes = tuple(_processes(claim, refusal.device)) if is_used else None
    if processes and refusal.state is State.FULL and claim.gpus.sees_all:
        strangers = parts.strangers(processes, refusal.sharers)
        processes = tuple(p._replace(has_reserved=p not in strangers) for p in processes)
    return refusal._replace(usage=reading, processes=processes)


def _batches(claim: Claim) -> Iterator[list[Device | Fault]]:
    """The devices to try, in parts that are looked at together.

    A GPU that is reached here is touched, which may take seconds, so this is done outside of the
    mutex. Where the first free one will do no GPU is touched needlessly: the first part is one GPU,
    the others what can be touched in an instant, as taking the mutex for each of many takes longer.
    """
    if claim.candidates is not None:
        yield [_refreshed(claim.gpus, device) for device in claim.candidates]
        return
    candidates = limit.candidates(claim.gpus, claim.request, claim.outside)
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
    """The same device; what could not be used before may have come back."""
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
        taken.add(_take(claim, device, queue, left_s))
        if policy.first_will_do(claim.request) and (chosen := choose()):
            return chosen
    return None if policy.first_will_do(claim.request) else choose()


def _ruled(claim: Claim, rules: Rules, devices: Sequence[Device | Fault]) -> tuple[Claim, Lease]:
    """The claim with what says which devices this user may have, and for how long; under the mutex.

    What this process has already does not count: what it asks for comes in its place.
    """
    quota = late("reservation.quota")  # which only rules need
    own = [lock.name for lock in claim.held.values()]
    elsewhere = claim.locks.holders_by(os.geteuid(), own)
    by_rules = quota.judge(rules, claim.request, devices, claim.held, elsewhere, claim.gpus.walk)
    return claim._replace(by_rules=by_rules), quota.lease(claim.request.promise.lease, rules)


def _begun(claim: Claim, lease: Lease, granted: Granted) -> Lease:
    """Return the lease from now on; some of it this process may have had already."""
    lease = lease.begun(time.time())
    if claim.rules is None:
        return lease
    quota = late("reservation.quota")
    counted: Lease = quota.counted(
        lease, claim.rules, min(each.lock.since for each in granted.locked)
    )
    return counted


def _take(claim: Claim, device: Device | Fault, queue: Place, limit_s: float) -> Locked | Refusal:
    """Lock one device, look at it, and keep the lock only if it will do."""
    request = claim.request
    fault = device.reason if isinstance(device, Fault) else None
    if reason := policy.unfit(device, request, claim.driver):
        return Refusal(device, State.UNFIT, unfit=reason, fault=fault)
    if isinstance(device, Fault):
        return Refusal(device, device.state, fault=fault)
    if claim.by_rules and (refusal := claim.by_rules(device)):
        return refusal
    own, is_part = claim.held.get(device.uuid), request.part_mib is not None
    if own and own.shared == request.share:
        return _look(claim, device, own, queue, limit_s) if is_part else Locked(device, own)
    try:
        lock = claim.locks.take(device.uuid, share=request.share, own=own)
    except LockError as error:
        return Refusal(device, State.UNKNOWN, fault=str(error))
    if not isinstance(lock, Lock):
        sharers = claim.locks.sharers_of(device.uuid, [own.name] if own else ())
        return Refusal(device, State.RESERVED, holder=lock, sharers=sharers)
    if own and not is_part:  # from whole to shared, or back
        return Locked(device, lock)
    is_kept = False
    try:
        answer = _look(claim, device, lock, queue, limit_s)
        is_kept = isinstance(answer, Locked)
        return answer
    finally:
        if not is_kept:
            lock.release()


def _look(
    claim: Claim, device: Device, lock: Lock, queue: Place, limit_s: float
) -> Locked | Refusal:
    """Whether the device, now locked, will do for all that others have or await of it."""
    # Read before the memory: what a sharer takes in between is counted twice rather than not.
    shares = _shares(claim, device, lock) if claim.request.part_mib is not None else None
    try:
        reading = claim.gpus.usage(device, limit_s)
    except DeviceError as error:
        return Refusal(device, error.state, fault=str(error))
    state = usage.judge(reading, claim.idle_mib)
    if shares is not None:
        room = parts.room(device, reading, *shares)
        return _look_for_part(claim, device, lock, queue, reading, state, room)
    sharers = claim.locks.sharers_of(device.uuid, [lock.name]) if claim.request.share else ()
    if claim.is_taking_back:  # this process itself may be on it
        return Locked(device, lock, state, reading, sharers)
    is_free = policy.is_to_be_taken(claim.request, state, reading, is_shared=bool(sharers))
    # A ticket doesn't say whether its holder would share: beside sharers nothing is an offer.
    if first := queue.first_for(device.uuid, is_free=lambda _: is_free and not sharers):
        return Refusal(device, State.AWAITED, reading, holder=first.holder, use=state)
    if is_free:
        return Locked(device, lock, state, reading, sharers)
    return Refusal(device, state, reading)


def _look_for_part(  # noqa: PLR0913, PLR0917 - of a look, with what was read in it
    claim: Claim,
    device: Device,
    lock: Lock,
    queue: Place,
    reading: Usage,
    state: State,
    room: parts.Room | None,
) -> Locked | Refusal:
    """Whether the device, now locked as one who shares it, has room for the part."""
    part_mib = claim.request.part_mib or 0.0
    if room is None:
        return Refusal(device, State.UNKNOWN, reading)
    is_shared = bool(room.sharers)
    is_open = policy.is_to_be_taken(claim.request, state, reading, is_shared=is_shared)
    if not is_open and not claim.is_taking_back:
        return Refusal(device, state, reading)
    if room.most_mib < part_mib:
        return Refusal(device, State.FULL, reading, room_mib=room.most_mib, sharers=room.sharers)

    def is_delayed(ahead: Sequence[Ticket]) -> bool:
        return room.is_delayed([ticket.part_mib for ticket in ahead], part_mib)

    def is_free(ahead: Ticket) -> bool:
        if ahead.part_mib is None:
            return state is State.IDLE and not is_shared and device.uuid not in claim.held
        return ahead.part_mib <= room.free_mib

    if first := queue.first_for(device.uuid, is_free=is_free, is_delayed=is_delayed):
        return Refusal(device, State.AWAITED, reading, holder=first.holder, use=state)
    is_held = device.uuid in claim.held
    return Locked(device, lock, state, None if is_held else reading, room.sharers, room.most_mib)


def _shares(claim: Claim, device: Device, lock: Lock) -> tuple[list[Holder], parts.Own]:
    """The others who share the device, with what they use of it; and this process."""
    sharers = claim.locks.sharers_of(device.uuid, [lock.name])
    promised_mib = (claim.part_mib or 0.0) if device.uuid in claim.held else 0.0
    if not sharers and not claim.held and not claim.is_taking_back:
        return [], parts.Own()
    if not claim.gpus.sees_all:  # a pid may be another process's in our PID namespace
        return list(sharers), parts.Own(promised_mib, None)
    everybody = (*sharers, Holder(os.getpid(), seen=True))
    *known, own = host.with_uses(everybody, claim.gpus.processes(device))
    return known, parts.Own(promised_mib, own.used_mib)


def _usage(claim: Claim, device: Device) -> Usage | None:
    try:
        return claim.gpus.usage(device, READINGS_LIMIT_S)
    except DeviceError:
        return None


def _processes(claim: Claim, device: Device) -> list[Process]:
    processes = claim.gpus.processes(device)
    if not claim.gpus.sees_all:  # a pid may be another process's in our PID namespace
        return processes
    return [host.identified(process) for process in processes]
