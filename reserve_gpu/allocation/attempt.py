"""Make a single attempt to reserve the requested devices.

An attempt locks each device before reading the device's state. If it read the state first, another
process could reserve the device before this process locks it. An attempt that can't reserve all
requested devices reserves none of them.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import chain, islice
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

# Total timeout in seconds for all NVML queries of an attempt. The timeout is short because other
# processes might be waiting for the mutex. An initialized GPU responds within milliseconds unless
# the driver hangs.
READINGS_LIMIT_S = 2.0
LEAST_LIMIT_S = 0.5  # minimum timeout in seconds for a single NVML query
# Maximum number of devices that are locked before they are read together. It is small because each
# lock needs up to two file descriptors.
MOST_LOCKED = 4


class AttemptContext(NamedTuple):
    """The inputs to a reservation attempt.

    Attributes:
        request: The request.
        gpus: The NVML session.
        locks: The lock directory.
        inherited: The CUDA variables as they were before this process reserved anything.
        held: The locks that this process already holds, keyed by device UUID.
        memory_limit_mib: The size in MiB of the part that this process already holds on each
            device, or None if it holds whole devices.
        idle_mib: The maximum memory use of an idle device in MiB, or None for the default.
        driver: The driver version, if it matters for the request.
        rules: The administrator's rules for this user, or None if the user has none.
        is_taking_back: Whether CUDA has already started, in which case this process itself might be
            using the devices.
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
    """A locked device that satisfies the request.

    Attributes:
        device: The device.
        lock: The lock on the device.
        row: The device's state before this attempt.
    """

    device: Device
    lock: Lock
    row: DeviceStatus

    @property
    def rank(self) -> tuple[int, float]:
        """Return the device's rank for a partial reservation. Lower ranks are better.

        Devices that this process already holds come first. Shared devices come next, starting with
        the fullest, so that other GPUs remain entirely free. Idle devices follow. Devices that are
        in use without a reservation come last, because that use might grow at any time.
        """
        row, is_idle = self.row, self.row.use_state is State.IDLE
        if row.is_mine or row.usage is None:
            return 0, -1.0
        return 0 if row.holders else 1 if is_idle else 2, row.promisable_mib or 0.0


class UnreadDevice(NamedTuple):
    """A locked device whose usage has not been read yet.

    Attributes:
        device: The device.
        lock: The lock on the device.
        memory_limit_mib: The size of the requested part in MiB, or None for the whole device.
        shares: For a request for a part, the other processes that share the device, and this
            process's own share as in `DeviceScan._shares`.
    """

    device: Device
    lock: Lock
    memory_limit_mib: float | None
    shares: tuple[list[Holder], tuple[float, float | None]]


class Granted(NamedTuple):
    """The result of an attempt that locked the requested devices.

    Attributes:
        locked: The locked devices.
        lease: The reservation's lease.
    """

    locked: tuple[LockedDevice, ...]
    lease: Lease = NO_LEASE


class Denied(NamedTuple):
    """The result of an attempt that did not lock any device.

    Attributes:
        rows: The state of each candidate device.
        ahead: The tickets ahead of this process in the queue.
    """

    rows: tuple[DeviceStatus, ...]
    ahead: tuple[Ticket, ...] = ()


class AcquiredLocks(AbstractContextManager["AcquiredLocks"]):
    """The locks that an attempt has acquired.

    When the `with` block ends, all new locks are released, except those passed to `keep`.
    """

    def __init__(self, held: Mapping[str, Lock]) -> None:
        self._held = held
        self.locked: dict[str, LockedDevice] = {}
        self.rows: list[DeviceStatus] = []

    def __exit__(self, *_: object) -> None:
        for uuid, locked in self.locked.items():
            if locked.lock is not self._held.get(uuid):
                locked.lock.release_device(was_held=False)

    def add(self, answer: LockedDevice | DeviceStatus) -> None:
        """Add the result for one device."""
        if isinstance(answer, LockedDevice):
            self.locked[answer.device.uuid] = answer
            answer = _spare_row(answer.row)
        self.rows.append(answer)

    def granted(self, devices: Sequence[Device]) -> Granted:
        """Return the result for a granted request. The given devices must be locked."""
        return Granted(tuple(self.locked[device.uuid] for device in devices))

    def keep(self, granted: Granted) -> None:
        """Keep the locks on the granted devices when the `with` block ends."""
        for locked in granted.locked:
            del self.locked[locked.device.uuid]


def _spare_row(row: DeviceStatus) -> DeviceStatus:
    """Return the row for a device that is available, although too few others are."""
    state, is_part = row.state, row.promisable_mib is not None
    if row.is_mine:
        state = State.RESERVED
    elif not is_part and row.use_state is not State.IDLE:  # a part of a busy GPU can be reserved
        state = row.use_state or state
    return row._replace(state=state, would_be_taken=True)


def attempt(
    context: AttemptContext,
    hold: Callable[[Granted, Request], object] = lambda *_: None,
    entry: QueueEntry | None = None,
    mutex_limit_s: float = MUTEX_LIMIT_S,
    candidates: Sequence[Device | Fault] | None = None,
) -> Granted | Denied:
    """Lock the requested devices, or report why each device is not available.

    Args:
        context: The inputs to the attempt.
        hold: A function called under the mutex with the granted devices and a request for exactly
            these devices. If the function raises an exception, the locks are released.
        entry: This process's queue entry. Without one, the request comes after all waiters.
        mutex_limit_s: The timeout for acquiring the mutex, in seconds.
        candidates: The devices to try. Defaults to the devices that the request and the inherited
            limit allow.

    Raises:
        LockError: The lock directory can't be used, or the mutex is not available in time.
        RequestError: A name does not match any device, or a rule does not allow a longer lease.
    """
    rows: list[DeviceStatus] = []
    ahead: list[Ticket] = []
    queue = entry or QueueEntry(context.locks)
    # Rules count all of this user's devices, and a waiter for several devices might want any of the
    # machine's devices.
    is_wide = context.rules or queue.is_behind_several
    everything = tuple(context.gpus.walk()) if is_wide else ()
    left_s = READINGS_LIMIT_S
    for devices in _batches(context, candidates):
        with context.locks.mutex(mutex_limit_s), AcquiredLocks(context.held) as taken:
            if entry and not entry.is_valid():
                entry.join()
            ahead = queue.ahead()
            by_rules = context.rules and _rule_check(context, context.rules, devices, everything)
            scan = DeviceScan(context, queue, everything, by_rules, left_s)
            if chosen := scan.choose(devices, taken):
                granted = _with_lease(context, taken.granted(chosen))
                hold(granted, context.request.on(chosen))
                taken.keep(granted)
                return granted
            if entry:
                entry.want(policy.wanted_uuids(taken.rows))
            left_s = scan.readings_left_s
        rows += taken.rows
    if not context.request.devices:  # named devices stay in the request's order
        rows.sort(key=lambda row: (row.device.index, row.device.instance or 0))
    return Denied(tuple(rows), tuple(ahead))


def _batches(
    context: AttemptContext, candidates: Sequence[Device | Fault] | None
) -> Iterator[Sequence[Device | Fault]]:
    """Yield the candidates in batches that are scanned together.

    Initializing a GPU can take seconds, so the iterator initializes GPUs between batches, when the
    mutex is not held. If any free GPU will do, no GPU is initialized before it is needed. GPUs with
    a display then come last, followed by GPUs that look busy, because locking and reading them
    takes time.
    """
    request, gpus = context.request, context.gpus
    if candidates is not None:
        candidates = [_refreshed(gpus, device) for device in candidates]
        yield candidates if request.devices else sorted(candidates, key=gpus.has_screen)
        return
    if not policy.first_will_do(request):
        read = chain.from_iterable(inherited_limit.candidates(gpus, request, context.inherited))
        yield list(read) if request.devices else sorted(read, key=gpus.has_screen)
        return

    def is_wanted(devices: Sequence[Device | Fault]) -> bool:
        return any(map(partial(_is_promising, context), devices))

    last: list[Device | Fault] = []
    for batch in inherited_limit.candidates(gpus, request, context.inherited, is_wanted):
        first: list[Device | Fault] = []
        for device in batch:
            (last if _comes_last(context, device) else first).append(device)
        if first:
            yield first
    if last:
        yield sorted(last, key=partial(_looks_busy, context))


def _is_promising(context: AttemptContext, device: Device | Fault) -> bool:
    """Return whether the request will probably get this device unless it is reserved."""
    is_fit = not policy.unfit(device, context.request, context.driver)
    return isinstance(device, Device) and is_fit and not _comes_last(context, device)


def _comes_last(context: AttemptContext, device: Device | Fault) -> bool:
    """Return whether a device is only reserved if no other is available."""
    return _looks_busy(context, device) or context.gpus.has_screen(device)


def _looks_busy(context: AttemptContext, device: Device | Fault) -> bool:
    """Return whether a device was busy when it was first read, without a lock.

    This only determines the order in which devices are locked and read again.
    """
    if isinstance(device, Fault) or device.uuid in context.held:
        return False
    return context.gpus.was_busy(device, context.idle_mib)


def _refreshed(gpus: Nvml, device: Device | Fault) -> Device | Fault:
    """Return the device. If it was unusable, query it again, because it might work now."""
    if isinstance(device, Device):
        return device
    current = gpus.devices(device.index)
    return next((each for each in current if each.instance == device.instance), device)


def _rule_check(
    context: AttemptContext,
    rules: Rules,
    devices: Sequence[Device | Fault],
    everything: Sequence[Device | Fault],
) -> Callable[[Device], DeviceStatus | None]:
    """Return a function that checks whether the rules allow this user to reserve a device.

    Call `_rule_check` under the mutex. Devices that this process already holds don't count toward
    the limits, because the new reservation replaces the old one.
    """
    own_files = [lock.name for lock in context.held.values()]
    uuids = [device.uuid for device in everything if isinstance(device, Device)]
    since = [lock.since for lock in context.held.values()]
    by_device: dict[str, list[Holder]] = {}
    for holder in context.locks.holders_by(os.geteuid(), uuids, own_files):
        by_device.setdefault(device_of(holder.file or ""), []).append(holder)
    # Joined processes don't count, because they share the device of the holder that they joined.
    holders = [each for group in by_device.values() for each in without_joined(group, since)]
    return quota.build_check(rules, context.request, devices, context.held, holders)


def _with_lease(context: AttemptContext, granted: Granted) -> Granted:
    """Add a lease that starts now to the granted devices.

    Raises:
        RequestError: This process has already held a device for as long as a rule allows.
    """
    lease = context.request.terms.lease
    now = procfs.now()
    if context.rules is None:
        return granted._replace(lease=lease.begun(now))
    since = min((each.lock.taken for each in granted.locked), key=lambda taken: taken.boot)
    lease = quota.counted(quota.lease(lease, context.rules).begun(now), context.rules, since, now)
    if context.rules.time and lease.until is not None and lease.until <= now.wall:
        raise notice.cannot_extend(context.rules.time, lease.until)
    return granted._replace(lease=lease)


class DeviceScan:
    """Locks and queries devices under the mutex, and releases unsuitable devices.

    Args:
        context: The inputs to the attempt.
        queue: This process's queue entry.
        everything: All of the machine's devices, or empty if neither the rules nor a waiter ahead
            requires them.
        by_rules: A function that returns a row if the rules deny this user the device, and
            otherwise None. The argument itself is None if the user has no rules.
        readings_limit_s: The time for all readings of the scan, in seconds.
    """

    def __init__(
        self,
        context: AttemptContext,
        queue: QueueEntry,
        everything: Sequence[Device | Fault],
        by_rules: Callable[[Device], DeviceStatus | None] | None,
        readings_limit_s: float,
    ) -> None:
        self._context, self._request = context, context.request
        self._queue = queue
        self._everything = everything
        self._has_enough: dict[str, bool] = {}  # keyed by ticket name
        self._is_possible: dict[str, bool] = {}  # keyed by ticket name
        self._seen: dict[str, tuple[tuple[Holder, ...], Usage | None]] = {}  # keyed by UUID
        self._by_rules = by_rules
        # Keyed by device label. None until the claims are first needed.
        self._numbers: Mapping[str, Sequence[Claim]] | None = None
        self._readings_until = time.monotonic() + readings_limit_s
        self._first_will_do = policy.first_will_do(context.request)

    def choose(
        self, devices: Sequence[Device | Fault], taken: AcquiredLocks
    ) -> list[Device] | None:
        """Lock suitable devices and return the best of them, or None if there are too few.

        Args:
            devices: The devices to scan.
            taken: Collects each device's lock or row.
        """
        first_will_do = self._first_will_do
        # The devices of a waiter that needs several must not be locked when `_is_available` checks
        # whether the waiter could take them.
        most = 1 if self._queue.is_behind_several else MOST_LOCKED
        number = 1 if first_will_do else most
        left = list(devices)
        while left:
            group, left = left[:number], left[number:]
            number = min(2 * number, most)
            with closing(self._examine(group)) as outcomes:
                for outcome in outcomes:
                    taken.add(outcome)
                    if first_will_do and isinstance(outcome, LockedDevice):
                        return [outcome.device]
        if first_will_do:
            return None
        rank = {uuid: locked.rank for uuid, locked in taken.locked.items()}
        available = [locked.device for locked in taken.locked.values()]
        return policy.choose(available, self._request, rank, self._link)

    def _examine(
        self, devices: Sequence[Device | Fault]
    ) -> Generator[LockedDevice | DeviceStatus, None, None]:
        """Lock devices, then read them together, and yield each device's lock or row in order.

        When the generator is closed, it releases the locks that it has not yielded.
        """
        steps: deque[LockedDevice | DeviceStatus | UnreadDevice] = deque()
        try:
            for device in devices:
                fitting = self._fitting(device)
                steps.append(fitting if isinstance(fitting, DeviceStatus) else self._lock(fitting))
            unread = [step.device for step in steps if isinstance(step, UnreadDevice)]
            usages = self._context.gpus.usages(unread, lambda: self._limit_s)
            with closing(usages):
                while steps:
                    step = steps[0]
                    if isinstance(step, UnreadDevice):
                        step = self._judged(step, next(usages))
                    steps.popleft()
                    yield step
        finally:
            for step in steps:
                if not isinstance(step, DeviceStatus):
                    self._release(step.device, step.lock)

    @property
    def readings_left_s(self) -> float:
        """Return the seconds that are left for readings."""
        return max(0.0, self._readings_until - time.monotonic())

    def _link(self, one: Device, other: Device) -> int:
        left_s = self.readings_left_s
        return self._context.gpus.link(one, other, left_s) if left_s else Link.SYSTEM

    def _fitting(self, device: Device | Fault) -> Device | DeviceStatus:
        """Return the device, or a row that says why this user can't reserve it."""
        reason = device.reason if isinstance(device, Fault) else None
        if unfit := policy.unfit(device, self._request, self._context.driver):
            return DeviceStatus(device, State.UNFIT, reason=reason, unfit=unfit)
        if isinstance(device, Fault):
            return DeviceStatus(device, device.state, reason=reason)
        return (self._by_rules(device) if self._by_rules else None) or device

    def _lock(self, device: Device) -> LockedDevice | DeviceStatus | UnreadDevice:
        """Lock a device, or return a row that says why it can't be locked.

        A device that this process already holds does not have to be read.
        """
        held = self._context.held.get(device.uuid)
        memory_limit_mib = self._request.on([device]).terms.memory_limit_mib
        is_part, held_mib = memory_limit_mib is not None, self._context.memory_limit_mib
        lock: Lock | Holder | None = held
        step: LockedDevice | DeviceStatus | UnreadDevice | None = None
        try:
            if held is None or is_sharers(held.name) != is_part:
                lock = self._context.locks.lock_device(
                    device.uuid,
                    share=is_part,
                    held=held,
                    taken=held.taken if held else None,
                    has_record=held is not None or not self._first_will_do,
                )
            if not isinstance(lock, Lock):
                step = self._reserved_row(device, lock, held)
            elif held and (
                memory_limit_mib is None or policy.is_enough(held_mib, memory_limit_mib)
            ):
                # This process already holds the device, or a large enough part of it.
                holders = self._this_process(device)
                row = DeviceStatus(device, State.FREE, holders=holders, is_mine=True)
                step = LockedDevice(device, lock, row)
            else:
                # Read the sharers before the memory use, so that memory allocated in between is
                # counted twice rather than missed.
                shares = self._shares(device, lock) if is_part else ([], (0.0, 0.0))
                step = UnreadDevice(device, lock, memory_limit_mib, shares)
        except LockError as error:
            step = _unlockable_row(device, error)
        finally:
            if isinstance(lock, Lock) and (step is None or isinstance(step, DeviceStatus)):
                self._release(device, lock)
        return step

    def _judged(
        self, unread: UnreadDevice, reading: "Usage | DeviceError"
    ) -> LockedDevice | DeviceStatus:
        """Return a locked device if it satisfies the request, or else release its lock."""
        device, lock = unread.device, unread.lock
        row = None
        try:
            if isinstance(reading, DeviceError):
                row = DeviceStatus(device, reading.state, reason=str(reading))
            elif unread.memory_limit_mib is not None:
                row = self._part_row(unread, reading)
            else:
                row = self._whole_device_row(device, reading)
            if row.state is State.FREE and device.uuid not in self._context.held:
                row = self._numbered(device, row)
                is_whole = unread.memory_limit_mib is None
                if row.state is State.FREE and is_whole and self._first_will_do:
                    self._context.locks.lock_record(device.uuid, lock)  # busy devices need none
        except LockError as error:
            row = _unlockable_row(device, error)
        finally:
            if row is None or row.state is not State.FREE:
                self._release(device, lock)
        return LockedDevice(device, lock, row) if row.state is State.FREE else row

    def _release(self, device: Device, lock: Lock) -> None:
        """Release a lock that this attempt has acquired."""
        if lock is not self._context.held.get(device.uuid):
            lock.release_device(was_held=False)

    def _numbered(self, device: Device, row: DeviceStatus) -> DeviceStatus:
        """Mark a free device as reserved if a process is still using its number for another GPU."""
        locks, reason = self._context.locks, None
        if not locks.is_number_recorded(device.index, device.uuid):
            return row
        if self._numbers is None:
            self._numbers = locks.listed_numbers()
        if claims := locks.claims_on_other_devices(device.index, device.uuid, self._numbers):
            reason = snapshot.taken_number(self._context.gpus, claims)
        return row._replace(state=State.RESERVED, reason=reason) if reason else row

    def _reserved_row(
        self, device: Device, whole_holder: Holder | None, held: Lock | None
    ) -> DeviceStatus:
        """Return the row for a device that other processes hold, entirely or in part."""
        sharers = self._context.locks.sharers_of(device.uuid, [held.name] if held else ())
        if whole_holder and not (is_sharers(whole_holder.file or "") and sharers):
            sharers = (whole_holder, *sharers)
        return DeviceStatus(device, State.RESERVED, holders=sharers)

    def _this_process(self, device: Device) -> tuple[Holder, ...]:
        """Return this process as a holder, or an empty tuple if it does not hold the device."""
        lock = self._context.held.get(device.uuid)
        return (self._context.locks.holders.of(lock.name),) if lock else ()

    def _whole_device_row(self, device: Device, reading: "Usage") -> DeviceStatus:
        """Return the device's row for a request for whole devices."""
        row = self._row(device, reading)
        return row if self._context.is_taking_back else self._behind(device, row, lambda _: True)

    def _part_row(self, unread: UnreadDevice, reading: "Usage") -> DeviceStatus:
        """Return the device's row for a request for a part of a GPU."""
        device, memory_limit_mib = unread.device, unread.memory_limit_mib or 0.0
        sharers, own = unread.shares
        row = self._row(device, reading)
        parts = [(sharer.memory_limit_mib, sharer.used_mib) for sharer in sharers]
        free_mib = usage.promisable_mib(device, reading, parts, own)
        if free_mib is None:
            return row._replace(state=State.UNKNOWN, use_state=State.UNKNOWN)
        most_mib = free_mib + max(size_mib or 0.0 for size_mib in own)
        is_whole_free = row.use_state is State.IDLE and not sharers
        this_process = self._this_process(device)
        row = row._replace(
            holders=(*this_process, *sharers), is_mine=bool(this_process), promisable_mib=most_mib
        )
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
        return max(LEAST_LIMIT_S, self.readings_left_s)

    def _row(self, device: Device, reading: "Usage") -> DeviceStatus:
        """Return the device's row, marking the device as free if its current use is acceptable."""
        use = usage.judge(reading, self._context.idle_mib)
        is_open = policy.should_take(self._request, use, reading)
        is_open = is_open or self._context.is_taking_back  # this process itself might be using it
        return DeviceStatus(device, State.FREE if is_open else use, reading, use_state=use)

    def _behind(
        self, device: Device, row: DeviceStatus, is_free: Callable[[Ticket], bool]
    ) -> DeviceStatus:
        """Add the first waiter for a device to the device's row.

        Args:
            device: The device.
            row: The device's row.
            is_free: A function that returns whether a waiter could take this device now.
        """
        first = self._queue.first_ahead(
            device.uuid,
            is_open=row.state is State.FREE,
            is_free=lambda ahead: is_free(ahead) and self._has_enough_others(device, ahead),
            is_possible=partial(self._can_be_served, device),
        )
        if first is None:
            return row
        state = State.AWAITED if row.state is State.FREE else row.state
        return row._replace(state=state, awaited_by=first.holder)

    def _can_be_served(self, device: Device, ahead: Ticket) -> bool:
        """Return whether a waiter could ever get this device and all others that it needs."""
        if not _fits(device, ahead):
            return False
        is_known = not self._everything or ahead.name in self._is_possible
        if ahead.needs > 1 and not is_known:
            devices = (each for each in self._everything if isinstance(each, Device))
            candidates = [
                each for each in devices if ahead.could_use(each.uuid) and _fits(each, ahead)
            ]
            within_reach = list(filter(self._is_within_reach, candidates))
            instances = sum(each.instance is not None for each in within_reach)
            most = max(instances, len(within_reach) - instances)
            self._is_possible[ahead.name] = most >= ahead.needs
        return self._is_possible.get(ahead.name, True)

    def _is_within_reach(self, device: Device) -> bool:
        rules, (_, reading) = self._context.rules, self._read_unlocked(device)
        is_drained = rules is not None and names.is_one_of(device, rules.drained)
        return not is_drained and reading is not None and reading.mode != ComputeMode.PROHIBITED

    def _read_unlocked(self, device: Device) -> "tuple[tuple[Holder, ...], Usage | None]":
        """Return a device's holders and usage without locking the device."""
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

    def _has_enough_others(self, device: Device, ahead: Ticket) -> bool:
        """Return whether a waiter could now take all other devices that it needs."""
        if ahead.name not in self._has_enough:
            other_devices = (each for each in self._everything if isinstance(each, Device))
            candidates = (
                each for each in other_devices if each != device and ahead.could_use(each.uuid)
            )
            missing = ahead.needs - 1
            available = islice(filter(partial(self._is_available, ahead), candidates), missing)
            self._has_enough[ahead.name] = len(list(available)) == missing
        return self._has_enough[ahead.name]

    def _is_available(self, ahead: Ticket, device: Device) -> bool:
        """Return whether a waiter could take a device that this scan has not locked."""
        holders, reading = self._read_unlocked(device)
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
        """Return the other processes that share the device, and this process's own share.

        The other processes are returned with their memory use. This process's share is a tuple of
        its reserved size and its memory use, both in MiB. The memory use is None if it can't be
        read.
        """
        context = self._context
        held = context.held.get(device.uuid)
        sharers = context.locks.sharers_of(device.uuid, [lock.name])
        promised_mib = (context.memory_limit_mib or 0.0) if held else 0.0
        if not sharers and not context.held and not context.is_taking_back:
            return [], (0.0, 0.0)
        if not context.gpus.sees_all:  # a PID might refer to a different process here
            since = [lock.since for lock in context.held.values()]
            return without_joined(sharers, since), (promised_mib, None)
        this_holder = Holder(
            Record(since=held.since if held else None), os.getpid(), uid=os.geteuid()
        )
        holders = procfs.with_memory_use((this_holder, *sharers), context.gpus.processes(device))
        this_process, *known = without_joined(holders)
        return known, (promised_mib, this_process.used_mib)


def _unlockable_row(device: Device, error: LockError) -> DeviceStatus:
    """Return the row for a device whose lock file can't be used."""
    _require_of_device(error)
    return DeviceStatus(device, State.UNKNOWN, reason=str(error))


def _require_of_device(error: LockError) -> None:
    """Re-raise the error if this process, rather than the device's lock file, caused it."""
    if str(error) == TOO_MANY_FILES:
        raise error


def _fits(device: Device, ahead: Ticket) -> bool:
    """Return whether a device is large enough for the part that a waiter requests."""
    is_known = ahead.memory_limit_mib is not None and device.usable_mib is not None
    return not is_known or (ahead.memory_limit_mib or 0.0) <= (device.usable_mib or 0)
