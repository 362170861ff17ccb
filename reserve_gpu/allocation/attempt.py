"""One attempt to take what a request asks for: lock first, then look; all of it or nothing.

A look before the lock proves nothing, as somebody else may take the device in between.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.allocation import inherited_limit, policy, quota, snapshot
from reserve_gpu.gpus import names, usage
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Link, Nvml
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory, device_of
from reserve_gpu.locks.holders import is_sharers, without_joined
from reserve_gpu.locks.lock import Lock
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.devices import ComputeMode, Device, Fault, State
from reserve_gpu.model.errors import TOO_MANY_FILES, LockError
from reserve_gpu.model.holders import DeviceStatus, Holder, Record
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import NO_LEASE, Lease, Request, Rules
from reserve_gpu.render import notices as notice
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from reserve_gpu.model.devices import Usage
    from reserve_gpu.model.holders import Claim

# Others wait for the mutex meanwhile: the readings of a look have so long, all together. A GPU that
# was touched before answers within milliseconds, unless the driver hangs.
READINGS_LIMIT_S = 2.0
LEAST_LIMIT_S = 0.1  # for each reading
TOUCH_S = 0.02  # GPUs are touched for so long before the mutex is taken for a look at all of them


class AttemptContext(NamedTuple):
    """Who asks for what, and where: all that an attempt is given.

    inherited: the CUDA variables without our changes. held: locks that this process has
    already, by UUID. memory_limit_mib: of each of them what it was promised, if that is a part.
    idle_mib: memory in use up to which a device is idle, None for the default.
    driver: its version, where that matters. rules: the administrator's, where there are some.
    is_taking_back: CUDA has started, so this process itself may be on the devices.
    """

    request: Request
    gpus: Nvml
    locks: LockDirectory
    inherited: Mapping[str, str | None]
    held: Mapping[str, Lock]
    memory_limit_mib: float | None = None
    idle_mib: float | None = None
    driver: str | None = None
    rules: Rules | None = None
    is_taking_back: bool = False


class LockedDevice(NamedTuple):
    """A device that was locked and will do. row: how it stood before."""

    device: Device
    lock: Lock
    row: DeviceStatus

    @property
    def rank(self) -> tuple[int, float]:
        """Return less for what is better to have a part of: first of all what is held already.

        Then the fullest of those that others have parts of, so that whole ones stay whole; last of
        all where somebody runs who was promised nothing, and may use more at any time.
        """
        row, is_idle = self.row, self.row.use_state is State.IDLE
        if row.is_mine or row.usage is None:
            return 0, -1.0
        return 0 if row.holders else 1 if is_idle else 2, row.promisable_mib or 0.0


class Granted(NamedTuple):
    """An attempt that took what was asked for. lease: until when it is held."""

    locked: tuple[LockedDevice, ...]
    lease: Lease = NO_LEASE


class Denied(NamedTuple):
    """An attempt that took nothing. ahead: who comes before in the queue."""

    rows: tuple[DeviceStatus, ...]
    ahead: tuple[Ticket, ...] = ()


class AcquiredLocks(AbstractContextManager["AcquiredLocks"]):
    """What an attempt has taken so far; at its end it releases all that was not kept."""

    def __init__(self, held: Mapping[str, Lock]) -> None:
        self._held = held
        self.locked: dict[str, LockedDevice] = {}
        self.rows: list[DeviceStatus] = []

    def __exit__(self, *_: object) -> None:
        for uuid, locked in self.locked.items():
            if locked.lock is not self._held.get(uuid):
                locked.lock.release()

    def add(self, answer: LockedDevice | DeviceStatus) -> None:
        """Count what came of one device."""
        if isinstance(answer, LockedDevice):
            self.locked[answer.device.uuid] = answer
            answer = _spare(answer.row)
        self.rows.append(answer)

    def granted(self, devices: Sequence[Device]) -> Granted:
        """Return these of the devices."""
        return Granted(tuple(self.locked[device.uuid] for device in devices))

    def keep(self, granted: Granted) -> None:
        """Let these stay locked."""
        for locked in granted.locked:
            del self.locked[locked.device.uuid]


def _spare(row: DeviceStatus) -> DeviceStatus:
    """Return the row of a device that would be taken, if the others can't be had."""
    state, is_part = row.state, row.promisable_mib is not None
    if row.is_mine:
        state = State.RESERVED
    elif not is_part and row.use_state is not State.IDLE:  # a part needs no idle GPU
        state = row.use_state or state
    return row._replace(state=state, would_be_taken=True)


def attempt(
    context: AttemptContext,
    hold: Callable[[Granted, Request], object] = lambda *_: None,
    entry: QueueEntry | None = None,
    mutex_limit_s: float = MUTEX_LIMIT_S,
    candidates: Sequence[Device | Fault] | None = None,
) -> Granted | Denied:
    """Take what is asked for, or say of each device why it could not be had.

    hold: is given what was taken, under the mutex; if it raises, all of that is released.
    entry: The place in the queue. Without one, the request comes after all waiters.
    mutex_limit_s: for how long to wait for the mutex.
    candidates: the devices to try, None where that has still to be found out.
    Raises LockError, and RequestError for a name that means no device.
    """
    rows: list[DeviceStatus] = []
    ahead: list[Ticket] = []
    queue = entry or QueueEntry(context.locks)
    # Rules count what this user has of any device; who needs several may have any.
    is_wide = context.rules or queue.is_behind_several
    everything = tuple(context.gpus.walk()) if is_wide else ()
    for devices in _batches(context, candidates):
        with context.locks.mutex(mutex_limit_s), AcquiredLocks(context.held) as taken:
            if entry and not entry.is_valid():
                entry.join()
            ahead = queue.ahead()
            by_rules = context.rules and _by_rules(context, context.rules, devices, everything)
            if chosen := DeviceScan(context, queue, everything, by_rules).choose(devices, taken):
                granted = _with_lease(context, taken.granted(chosen))
                hold(granted, context.request.on(chosen))
                taken.keep(granted)
                return granted
            if entry:
                entry.want(policy.wanted(taken.rows))
        rows += taken.rows
    if not context.request.devices:  # in which order they were looked at is nothing to show
        rows.sort(key=lambda row: (row.device.index, row.device.instance or 0))
    return Denied(tuple(rows), tuple(ahead))


def _batches(
    context: AttemptContext, candidates: Sequence[Device | Fault] | None
) -> Iterator[list[Device | Fault]]:
    """Yield the devices to try, in parts that are looked at together.

    A GPU that is reached here is touched, which may take seconds, so this is done outside of the
    mutex. Where the first free one will do no GPU is touched needlessly: the first part is one GPU,
    the others what can be touched in an instant, as taking the mutex for each of many takes longer.
    """
    if candidates is not None:
        anew = [_refreshed(context.gpus, device) for device in candidates]
        yield anew if context.request.devices else [*context.gpus.screens_last(anew)]
        return
    devices = inherited_limit.candidates(context.gpus, context.request, context.inherited)
    if not policy.first_will_do(context.request):
        yield list(devices)
        return
    part: list[Device | Fault] = []
    touch_until = 0.0
    for device in devices:
        part.append(device)
        if time.monotonic() >= touch_until:
            yield part
            part, touch_until = [], time.monotonic() + TOUCH_S
    if part:
        yield part


def _refreshed(gpus: Nvml, device: Device | Fault) -> Device | Fault:
    """Read the device anew; what could not be used before may have come back."""
    if isinstance(device, Device):
        return device
    there = gpus.devices(device.index)
    return next((entry for entry in there if entry.instance == device.instance), device)


def _by_rules(
    context: AttemptContext,
    rules: Rules,
    devices: Sequence[Device | Fault],
    everything: Sequence[Device | Fault],
) -> Callable[[Device], DeviceStatus | None]:
    """Return what tells why the rules forbid this user a device; under the mutex.

    What this process has already does not count: what it asks for comes in its place.
    """
    names = [lock.name for lock in context.held.values()]
    uuids = [device.uuid for device in everything if isinstance(device, Device)]
    since = [lock.since for lock in context.held.values()]
    found: dict[str, list[Holder]] = {}
    for holder in context.locks.holders_by(os.geteuid(), uuids, names):
        found.setdefault(device_of(holder.file or ""), []).append(holder)
    # A joined process counts with its holder, which has the same device.
    elsewhere = [each for those in found.values() for each in without_joined(those, since)]
    return quota.build_check(rules, context.request, devices, context.held, elsewhere)


def _with_lease(context: AttemptContext, granted: Granted) -> Granted:
    """Return what is granted from now on; some of it this process may have had already.

    Raises RequestError where it has had that for as long as a rule allows.
    """
    lease = context.request.terms.lease
    now = procfs.now()
    if context.rules is None:
        return granted._replace(lease=lease.begun(now))
    since = min((each.lock.taken for each in granted.locked), key=lambda taken: taken.boot)
    lease = quota.counted(quota.lease(lease, context.rules).begun(now), context.rules, since, now)
    if context.rules.time and lease.until is not None and lease.until <= now.wall:
        raise notice.cannot_prolong(context.rules.time, lease.until)
    return granted._replace(lease=lease)


class DeviceScan:
    """One look at devices under the mutex: each is locked first, and kept only if it will do.

    everything: the machine's devices, where somebody comes first who needs several of them.
    by_rules: returns why this user may not have a device, None for one that is allowed.
    """

    def __init__(
        self,
        context: AttemptContext,
        queue: QueueEntry,
        everything: Sequence[Device | Fault],
        by_rules: Callable[[Device], DeviceStatus | None] | None,
    ) -> None:
        self._context, self._request = context, context.request
        self._queue = queue
        self._everything = everything
        self._has_enough: dict[str, bool] = {}  # of each ticket for several, as first found
        self._is_possible: dict[str, bool] = {}  # likewise
        self._seen: dict[str, tuple[tuple[Holder, ...], Usage | None]] = {}  # by UUID
        self._by_rules = by_rules
        self._numbers: Mapping[str, Sequence[Claim]] | None = None  # by label, read on first use
        self._readings_until = time.monotonic() + READINGS_LIMIT_S

    def choose(
        self, devices: Sequence[Device | Fault], taken: AcquiredLocks
    ) -> list[Device] | None:
        """Return the devices that will do best, all of them locked; None if they are too few."""
        first_will_do = policy.first_will_do(self._request)
        for device in devices:
            fitting = self._fitting(device)
            found = fitting if isinstance(fitting, DeviceStatus) else self._locked(fitting)
            taken.add(found)
            if first_will_do and isinstance(found, LockedDevice):
                return [found.device]
        if first_will_do:
            return None
        rank = {uuid: locked.rank for uuid, locked in taken.locked.items()}
        there = [locked.device for locked in taken.locked.values()]
        return policy.choose(there, self._request, rank, self._link)

    def _link(self, one: Device, other: Device) -> int:
        left_s = self._readings_until - time.monotonic()
        return self._context.gpus.link(one, other, left_s) if left_s > 0 else Link.SYSTEM

    def _fitting(self, device: Device | Fault) -> Device | DeviceStatus:
        """Return the device if it will do, whoever has it; else why it will not."""
        reason = device.reason if isinstance(device, Fault) else None
        if unfit := policy.unfit(device, self._request, self._context.driver):
            return DeviceStatus(device, State.UNFIT, reason=reason, unfit=unfit)
        if isinstance(device, Fault):
            return DeviceStatus(device, device.state, reason=reason)
        return (self._by_rules(device) if self._by_rules else None) or device

    def _locked(self, device: Device) -> LockedDevice | DeviceStatus:
        """Lock one device, look at it, and keep the lock only if it will do."""
        held, memory_limit_mib = (
            self._context.held.get(device.uuid),
            self._request.on([device]).terms.memory_limit_mib,
        )
        is_part, held_mib = memory_limit_mib is not None, self._context.memory_limit_mib
        lock: Lock | Holder | None = held
        is_kept = False
        try:
            if held is None or is_sharers(held.name) != is_part:
                taken = held.taken if held else None
                locks = self._context.locks
                lock = locks.lock_device(device.uuid, share=is_part, held=held, taken=taken)
            if not isinstance(lock, Lock):
                return self._of_others(device, lock, held)
            if held and (memory_limit_mib is None or policy.is_enough(held_mib, memory_limit_mib)):
                # It is this process's already, or as much of it.
                row = DeviceStatus(
                    device, State.FREE, holders=self._this_process(device), is_mine=True
                )
            elif memory_limit_mib is not None:
                row = self._part(device, lock, memory_limit_mib)
            else:
                row = self._whole(device)
            if held is None and row.state is State.FREE:
                row = self._numbered(device, row)
            is_kept = row.state is State.FREE
        except DeviceError as error:
            return DeviceStatus(device, error.state, reason=str(error))
        except LockError as error:
            _require_of_device(error)
            return DeviceStatus(device, State.UNKNOWN, reason=str(error))
        finally:
            if isinstance(lock, Lock) and lock is not held and not is_kept:
                lock.release()
        return LockedDevice(device, lock, row) if is_kept else row

    def _numbered(self, device: Device, row: DeviceStatus) -> DeviceStatus:
        """Return the row of a free device, or of one on which another process may start CUDA."""
        locks, reason = self._context.locks, None
        if self._numbers is None:
            self._numbers = locks.listed_numbers()
        if claims := locks.claims_on_other_devices(device.index, device.uuid, self._numbers):
            reason = snapshot.taken_number(self._context.gpus, claims)
        return row._replace(state=State.RESERVED, reason=reason) if reason else row

    def _of_others(self, device: Device, whole: Holder | None, held: Lock | None) -> DeviceStatus:
        """Return a device that others have: one the whole of it, or several parts."""
        sharers = self._context.locks.sharers_of(device.uuid, [held.name] if held else ())
        if whole and not (is_sharers(whole.file or "") and sharers):
            sharers = (whole, *sharers)
        return DeviceStatus(device, State.RESERVED, holders=sharers)

    def _this_process(self, device: Device) -> tuple[Holder, ...]:
        """Return this process as others see it, if it has the device."""
        lock = self._context.held.get(device.uuid)
        return (self._context.locks.holders.of(lock.name),) if lock else ()

    def _whole(self, device: Device) -> DeviceStatus:
        """Look at a device that is to be had alone. Raises DeviceError."""
        row = self._row(device, self._context.gpus.usage(device, self._limit_s))
        return row if self._context.is_taking_back else self._behind(device, row, lambda _: True)

    def _part(self, device: Device, lock: Lock, memory_limit_mib: float) -> DeviceStatus:
        """Look at a device of which a part is to be had. Raises DeviceError."""
        # Read before the memory: what a sharer takes in between is counted twice, never missed.
        sharers, own = self._shares(device, lock)
        reading = self._context.gpus.usage(device, self._limit_s)
        row = self._row(device, reading)
        parts = [(sharer.memory_limit_mib, sharer.used_mib) for sharer in sharers]
        free_mib = usage.promisable_mib(device, reading, parts, own)
        if free_mib is None:
            return row._replace(state=State.UNKNOWN, use_state=State.UNKNOWN)
        most_mib = free_mib + max(size_mib or 0.0 for size_mib in own)
        is_whole_free = row.use_state is State.IDLE and not sharers
        mine = self._this_process(device)
        row = row._replace(holders=(*mine, *sharers), is_mine=bool(mine), promisable_mib=most_mib)
        if row.state is not State.FREE:
            return row
        if most_mib < memory_limit_mib:
            return row._replace(state=State.FULL)

        def is_free(ahead: Ticket) -> bool:
            return (
                is_whole_free
                if ahead.memory_limit_mib is None
                else ahead.memory_limit_mib <= free_mib
            )

        return self._behind(device, row, is_free)

    @property
    def _limit_s(self) -> float:
        return max(LEAST_LIMIT_S, self._readings_until - time.monotonic())

    def _row(self, device: Device, reading: "Usage") -> DeviceStatus:
        """Return how a device is used: free, if it can be had where nobody else comes first."""
        use = usage.judge(reading, self._context.idle_mib)
        is_open = policy.is_to_be_taken(self._request, use, reading)
        is_open = is_open or self._context.is_taking_back  # this process itself may be on it
        return DeviceStatus(device, State.FREE if is_open else use, reading, use_state=use)

    def _behind(
        self, device: Device, row: DeviceStatus, is_free: Callable[[Ticket], bool]
    ) -> DeviceStatus:
        """Return the row of a device for which somebody in the queue may come first.

        is_free: tells whether that one could have it now.
        """
        first = self._queue.first_ahead(
            device.uuid,
            is_open=row.state is State.FREE,
            is_free=lambda ahead: is_free(ahead) and self._lie_together(device, ahead),
            is_possible=partial(self._can_be_served, device),
        )
        if first is None:
            return row
        state = State.AWAITED if row.state is State.FREE else row.state
        return row._replace(state=state, awaited_by=first.holder)

    def _can_be_served(self, device: Device, ahead: Ticket) -> bool:
        """Return whether a waiter that could use a device could ever have all that it needs."""
        if not _fits(device, ahead):
            return False
        is_known = not self._everything or ahead.name in self._is_possible
        if ahead.needs > 1 and not is_known:
            there = (each for each in self._everything if isinstance(each, Device))
            wanted = [each for each in there if ahead.could_use(each.uuid) and _fits(each, ahead)]
            within_reach = list(filter(self._is_within_reach, wanted))
            instances = sum(each.instance is not None for each in within_reach)
            most = max(instances, len(within_reach) - instances)
            self._is_possible[ahead.name] = most >= ahead.needs
        return self._is_possible.get(ahead.name, True)

    def _is_within_reach(self, device: Device) -> bool:
        rules, (_, reading) = self._context.rules, self._look_at(device)
        is_drained = rules is not None and names.is_one_of(device, rules.drained)
        return not is_drained and reading is not None and reading.mode != ComputeMode.PROHIBITED

    def _look_at(self, device: Device) -> "tuple[tuple[Holder, ...], Usage | None]":
        """Return the holders and the use of a device that this look has not locked."""
        if device.uuid not in self._seen:
            holders: tuple[Holder, ...] = ()
            reading = None
            try:
                holders = self._context.locks.holders_of(device.uuid)
                reading = self._context.gpus.usage(device, self._limit_s)
            except DeviceError:
                pass
            except LockError as error:
                _require_of_device(error)
            self._seen[device.uuid] = holders, reading
        return self._seen[device.uuid]

    def _lie_together(self, device: Device, ahead: Ticket) -> bool:
        """Tell whether one who waits could have, beside this device, all that it needs."""
        if ahead.name not in self._has_enough:
            others = (each for each in self._everything if isinstance(each, Device))
            wanted = (each for each in others if each != device and ahead.could_use(each.uuid))
            missing = ahead.needs - 1
            found = islice(filter(partial(self._lies_free, ahead), wanted), missing)
            self._has_enough[ahead.name] = len(list(found)) == missing
        return self._has_enough[ahead.name]

    def _lies_free(self, ahead: Ticket, device: Device) -> bool:
        """Tell whether one who waits could have a device that this look has not locked."""
        holders, reading = self._look_at(device)
        if reading is None:
            return False
        if ahead.memory_limit_mib is None or not all(
            is_sharers(each.file or "") for each in holders
        ):
            return not holders and usage.judge(reading, self._context.idle_mib) is State.IDLE
        parts = [(each.memory_limit_mib, each.used_mib) for each in holders]
        free_mib = usage.promisable_mib(device, reading, parts, (0.0, 0.0))
        return free_mib is not None and ahead.memory_limit_mib <= free_mib

    def _shares(
        self, device: Device, lock: Lock
    ) -> tuple[list[Holder], tuple[float, float | None]]:
        """Return the sharers of the device, with what they use, and what this process has of it.

        That is what it was promised, and what it uses; None where that can't be seen.
        """
        context = self._context
        held = context.held.get(device.uuid)
        sharers = context.locks.sharers_of(device.uuid, [lock.name])
        promised_mib = (context.memory_limit_mib or 0.0) if held else 0.0
        if not sharers and not context.held and not context.is_taking_back:
            return [], (0.0, 0.0)
        if not context.gpus.sees_all:  # a pid may be another process's in our PID namespace
            since = [lock.since for lock in context.held.values()]
            return without_joined(sharers, since), (promised_mib, None)
        own = Holder(Record(since=held.since if held else None), os.getpid(), uid=os.geteuid())
        everybody = procfs.with_uses((own, *sharers), context.gpus.processes(device))
        this_process, *known = without_joined(everybody)
        return known, (promised_mib, this_process.used_mib)


def _require_of_device(error: LockError) -> None:
    """Raise an error that is a fault of this process, and not of the device's lock file."""
    if str(error) == TOO_MANY_FILES:
        raise error


def _fits(device: Device, ahead: Ticket) -> bool:
    """Return whether the part that a waiter asks for fits into a device at all."""
    is_known = ahead.memory_limit_mib is not None and device.usable_mib is not None
    return not is_known or (ahead.memory_limit_mib or 0.0) <= (device.usable_mib or 0)
