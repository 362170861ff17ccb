"""Take snapshots of the machine's devices, their use, their holders, and the queue.

Taking a snapshot does not lock any device. If a device can't be read, its row says so.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.gpus import names
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.usage import (
    has_managed_memory,
    judge,
    promisable_mib,
    split_graphics,
    split_uses,
)
from reserve_gpu.locks import queue
from reserve_gpu.locks.directory import LockDirectory, device_of, lock_name
from reserve_gpu.locks.holders import with_hosts
from reserve_gpu.model.devices import GRAPHICS, STUCK, Device, Fault, Process, State, Usage
from reserve_gpu.model.errors import LockError, MutexHeldError
from reserve_gpu.model.holders import Claim, DeviceStatus, Holder
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Rules
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import procfs
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from reserve_gpu.gpus.nvml import Reading

MUTEX_LIMIT_S = 0.5
READING_LIMIT_S = 2.0
# If processes are not visible, a device with less memory in use than this (in MiB) is assumed to
# have no CUDA processes. Even an idle CUDA context takes several hundred MiB.
CONTEXT_MIB = 64.0
NAME_LIMIT = 40  # maximum length of another process's name in a message, in characters


class Snapshot(NamedTuple):
    """The state of the machine's devices and queue at one moment.

    Attributes:
        rows: The state of each device.
        waiting: The tickets in the queue.
        problem: Why reservations might be missing, or None.
    """

    rows: tuple[DeviceStatus, ...]
    waiting: tuple[Ticket, ...] = ()
    problem: str | None = None


class Reservations(NamedTuple):
    """The reservations according to the lock directory. All mappings are keyed by device UUID.

    Attributes:
        holders: Each device's holders.
        faults: Why a device's holders are unknown.
        waiting: The tickets in the queue.
        problem: Why some or all reservations are unknown, or None.
        others: The holders of devices that the driver does not list, such as lost GPUs.
        old_numbers: The claims on other GPUs that had the device's number when they were reserved.
    """

    holders: Mapping[str, tuple[Holder, ...]]
    faults: Mapping[str, str]
    waiting: Sequence[Ticket] = ()
    problem: str | None = None
    others: tuple[Holder, ...] = ()
    old_numbers: Mapping[str, Sequence[Claim]] = {}


def take_snapshot(
    nvml: Nvml, *, idle_mib: float | None = None, active_rules: Rules | None = None
) -> Snapshot:
    """Take a snapshot of every device that the driver lists.

    If the lock directory can't be used, the snapshot contains the devices without reservations, and
    its `problem` attribute gives the reason.

    Args:
        nvml: The NVML session.
        idle_mib: The maximum memory use of an idle device in MiB. Defaults to the built-in limit.
        active_rules: The rules for this user, which might drain devices.

    Raises:
        DriverError: The driver can't be used.
    """
    devices = list(nvml.walk())
    reservations = _reservations(devices)
    # Look up users only after the mutex is released, because a directory server can be slow.
    waiting = [*map(queue.identified, reservations.waiting)]
    reservations = reservations._replace(waiting=waiting)
    readings = nvml.readings([device for device in devices if isinstance(device, Device)])
    rows = [_row(nvml, device, reservations, readings, idle_mib) for device in devices]
    rows = _with_traces(nvml, rows)
    drained = active_rules.drained if active_rules else ()
    rows = [
        row._replace(state=State.DRAINED, promisable_mib=None)
        if row.state not in STUCK and names.is_one_of(row.device, drained)
        else row
        for row in rows
    ]
    return Snapshot(tuple(rows), tuple(waiting), reservations.problem)


def reserved_without_driver() -> tuple[DeviceStatus, ...]:
    """Return the devices that are reserved according to their lock files, without the driver.

    Raises:
        LockError: The lock directory can't be used.
    """
    with LockDirectory() as directory, directory.mutex(MUTEX_LIMIT_S, reads_only=True):
        holders = directory.holders_of_other_devices(())
    by_index: dict[int, list[Holder]] = {}
    for holder in holders:
        by_index.setdefault(holder.record.index or 0, []).append(procfs.with_owner(holder))
    return tuple(
        DeviceStatus(
            Fault(index, "the driver does not answer"), State.RESERVED, holders=with_hosts(group)
        )
        for index, group in sorted(by_index.items())
    )


def is_own(holder: Holder) -> bool:
    """Return whether a holder is one of this user's processes, according to the Linux kernel."""
    return bool(holder.listed_pid and procfs.uid_of(holder.listed_pid) == os.geteuid())


def add_processes(
    nvml: Nvml,
    rows: Sequence[DeviceStatus],
    idle_mib: float | None = None,
    watch_s: float = 0.0,
) -> list[DeviceStatus]:
    """Add users and processes to an attempt's rows.

    The state in each row does not change. Looking up users, commands and devices can be slow, so
    call this function as late as possible, and only for rows that will be displayed.

    Args:
        nvml: The NVML session.
        rows: The attempt's rows.
        idle_mib: The maximum memory use of an idle device in MiB. Defaults to the built-in limit.
        watch_s: The time in seconds to watch whether an ended holder's memory is being freed.
    """
    reserved = [
        row.device
        for row in rows
        if isinstance(row.device, Device) and row.usage is None and row.state is State.RESERVED
    ]
    usages: dict[Device | Fault, Usage | DeviceError] = dict(
        zip(reserved, nvml.usages(reserved, lambda: READING_LIMIT_S), strict=True)
    )
    read = [_with_users(row, usages.get(row.device), idle_mib) for row in rows]
    used = [_with_processes(nvml, row, row.usage, idle_mib) if row.usage else row for row in read]
    return _with_traces(nvml, [_with_available_part(row) for row in used], watch_s)


def _with_available_part(row: DeviceStatus) -> DeviceStatus:
    """Add the memory that is still available to a reserved device of which only parts are held."""
    if row.state is not State.RESERVED or row.is_mine or row.promisable_mib is not None:
        return row
    parts = [(each.memory_limit_mib, each.used_mib) for each in row.holders if not each.beside]
    is_shared = bool(parts) and all(size is not None for size, _ in parts)
    if not is_shared or row.usage is None or not isinstance(row.device, Device):
        return row
    return row._replace(promisable_mib=promisable_mib(row.device, row.usage, parts))


def _with_traces(
    nvml: Nvml, rows: Sequence[DeviceStatus], watch_s: float = 0.0
) -> list[DeviceStatus]:
    """Add the traces that previous holders have left on devices in use without a reservation."""
    if not (nvml.sees_all and any(row.is_unreserved_use for row in rows)):
        return list(rows)
    with no_fork:
        from reserve_gpu.allocation import previous_holders  # only needed if a device is in use

    return previous_holders.add_traces(nvml, rows, watch_s)


def _with_users(
    row: DeviceStatus, reading: Usage | DeviceError | None, idle_mib: float | None
) -> DeviceStatus:
    """Add users to a row, and the device's usage, if it was read after the attempt."""
    if row.awaited_by:
        row = row._replace(awaited_by=procfs.with_owner(row.awaited_by))
    if row.holders:
        row = row._replace(holders=with_hosts([procfs.with_owner(h) for h in row.holders]))
    if isinstance(reading, DeviceError):
        return row._replace(reason=str(reading), is_unused=None)
    if reading:
        row = row._replace(usage=reading, use_state=row.use_state or judge(reading, idle_mib))
    return row


def _with_processes(
    nvml: Nvml, row: DeviceStatus, usage: Usage, idle_mib: float | None
) -> DeviceStatus:
    """Add the processes to a row if the device is in use. Desktop processes are left out."""
    is_idle = row.use_state is State.IDLE
    listed = [] if is_idle else split_graphics(usage.processes, usage.total_mib)[0]
    return _with_certain_use(_used(nvml, row, listed, idle_mib), idle_mib)


def identify_processes(
    nvml: Nvml, processes: Sequence[Process], holders: Sequence[Holder], *, is_complete: bool = True
) -> tuple[Process, ...]:
    """For each process, add its user, its command, and whether it belongs to a reservation.

    Args:
        nvml: The NVML session.
        processes: The processes on the device.
        holders: The device's holders.
        is_complete: Whether all of the device's holders are known.
    """
    if not nvml.sees_all:  # a PID might refer to a different process here
        return tuple(processes)
    pids = {holder.listed_pid for holder in holders if holder.listed_pid}
    default = False if is_complete and all(holder.seen for holder in holders) else None
    by_user = {h.user: h.name or "a process" for h in reversed(holders) if h.seen and not h.beside}
    identified = []
    for each in processes:
        has_reserved = procfs.is_descendant(each.pid, pids) or default
        process = procfs.with_identity(each)
        beside = by_user.get(process.user) if process.user and not has_reserved else None
        identified.append(process._replace(has_reserved=has_reserved, beside=beside))
    return tuple(identified)


def is_unused(usage: Usage, processes: Sequence[Process] = ()) -> bool | None:
    """Return whether none of a reserved device's holders is using it, or None if unknown.

    Args:
        usage: The device's use, as read from NVML.
        processes: The processes that the driver lists for the device.
    """
    count = (usage.compute or 0) + (usage.mps or 0)
    if any(process.has_reserved for process in processes):
        return False
    if not usage.sees_all or usage.compute is None:
        is_empty = usage.reserve_known and usage.used_mib is not None and not count
        return True if is_empty and (usage.used_mib or 0.0) < CONTEXT_MIB else None
    if len(processes) < count or any(process.has_reserved is None for process in processes):
        return None
    return True


def taken_number(nvml: Nvml, claims: Sequence[Claim]) -> str | None:
    """Return a reason to refuse a device whose number another reservation is still using, or None.

    A process that reserved another GPU when that GPU had this number still has the number in
    CUDA_VISIBLE_DEVICES, so CUDA in that process would start on this device. Any user can lock a
    file that is named after a missing device, so only one such claim per user counts.

    Args:
        nvml: The NVML session.
        claims: The claims on other GPUs that had the device's number when they were reserved.
    """
    readable = (each for each in nvml.walk() if isinstance(each, Device)) if claims else ()
    devices = {device_of(lock_name(device.uuid)): device for device in readable}
    for holder, device, claimed in claims:
        missing = [each for each in claimed if each not in devices]
        if device in missing and device != min(missing):
            continue
        if device in missing or not _is_on(nvml, devices[device], holder):
            name = sanitize(holder.name or "A process", NAME_LIMIT)
            return (
                f"{name} (pid {holder.pid}) reserved another GPU that used to have this number, "
                "and might still start CUDA on this GPU"
            )
    return None


def _is_on(nvml: Nvml, device: Device, holder: Holder) -> bool:
    """Return whether the holder or one of its descendants is using the device."""
    pids = (process.pid for process in nvml.processes(device)) if nvml.sees_all else ()
    return any(procfs.is_descendant(pid, {holder.listed_pid}) for pid in pids)


def _reservations(devices: Sequence[Device | Fault]) -> Reservations:
    """Read the devices' holders and the queue.

    Testing a lock can make another process fail to acquire it, so locks are tested under the mutex.
    If other processes hold the mutex for too long, the Linux kernel's lock list is used instead,
    even though it might not show every lock.
    """
    uuids = [device.uuid for device in devices if isinstance(device, Device)]
    unseen = dict.fromkeys(uuids, "its reservations can't be read at the moment")
    try:
        with LockDirectory() as directory:
            try:
                with directory.mutex(MUTEX_LIMIT_S, reads_only=True):
                    holders, faults = _holders(uuids, directory.holders_of)
                    is_some_lost = len(uuids) < len(devices)
                    others = directory.holders_of_other_devices(uuids) if is_some_lost else ()
                    return Reservations(
                        holders,
                        faults,
                        directory.tickets(),
                        others=others,
                        old_numbers=_old_numbers(directory, devices),
                    )
            except MutexHeldError as error:
                holders, faults = _holders(uuids, directory.listed_holders_of)
                waiting = directory.listed_tickets()
                return Reservations(holders, {**unseen, **faults}, waiting, str(error))
    except LockError as error:
        return Reservations({}, unseen, problem=str(error))


def _old_numbers(
    directory: LockDirectory, devices: Sequence[Device | Fault]
) -> dict[str, list[Claim]]:
    """For each device, return the claims on other GPUs that used to have the device's number."""
    readable = [device for device in devices if isinstance(device, Device)]
    recorded = [d for d in readable if directory.is_number_recorded(d.index, d.uuid)]
    numbers = directory.listed_numbers() if recorded else {}  # reading /proc/locks is slow
    return {d.uuid: directory.claims_on_other_devices(d.index, d.uuid, numbers) for d in recorded}


def _holders(
    uuids: Sequence[str], holders_of: Callable[[str], tuple[Holder, ...]]
) -> tuple[dict[str, tuple[Holder, ...]], dict[str, str]]:
    """Return each device's holders, or why they are unknown."""
    holders, faults = {}, {}
    for uuid in uuids:
        try:
            holders[uuid] = holders_of(uuid)
        except LockError as error:  # noqa: PERF203 - a fault affects only one device
            faults[uuid] = str(error)
    return holders, faults


def _row(
    nvml: Nvml,
    device: Device | Fault,
    reservations: Reservations,
    readings: "Mapping[Device, Reading | DeviceError]",
    idle_mib: float | None,
) -> DeviceStatus:
    if isinstance(device, Fault):
        lost = [holder for holder in reservations.others if _has(holder, device)]
        return _held(DeviceStatus(device, device.state, reason=device.reason), lost)
    fault = reservations.faults.get(device.uuid)
    first = next((t.holder for t in reservations.waiting if t.could_use(device.uuid)), None)
    row = DeviceStatus(device, State.FREE, awaited_by=first)
    row = _held(row, reservations.holders.get(device.uuid, ()))
    reading = readings[device]
    if isinstance(reading, DeviceError):
        state = State.RESERVED if row.holders else reading.state
        return row._replace(state=state, reason=str(reading), is_unreserved_use=None)
    usage, gauges = reading
    row = row._replace(usage=usage, use_state=judge(usage, idle_mib), **gauges._asdict())
    row = _used(nvml, row, usage.processes, idle_mib, is_complete=not fault)
    if row.holders:
        row = row._replace(state=State.RESERVED)
    elif row.use_state and row.use_state is not State.IDLE:
        row = row._replace(state=row.use_state)
    elif fault:
        row = row._replace(state=State.UNKNOWN, reason=fault)
    elif reason := taken_number(nvml, reservations.old_numbers.get(device.uuid, ())):
        row = row._replace(state=State.RESERVED, reason=reason)
    if fault:
        return row
    parts = [
        (holder.memory_limit_mib, holder.used_mib) for holder in row.holders if not holder.beside
    ]
    row = row._replace(promisable_mib=promisable_mib(device, usage, parts))
    return _with_certain_use(row, idle_mib)


def _has(holder: Holder, fault: Fault) -> bool:
    """Return whether the holder's record names this unusable device or one of its instances."""
    is_whole = fault.instance is None
    return holder.record.label == fault.label or (is_whole and holder.record.index == fault.index)


def _held(row: DeviceStatus, holders: Sequence[Holder]) -> DeviceStatus:
    """Add the holders to a device's row before its usage is queried."""
    ordered = with_hosts(sorted(map(procfs.with_owner, holders), key=_is_another))
    is_mine = bool(ordered) and not _is_another(ordered[0])
    return row._replace(holders=ordered, is_mine=is_mine, is_unused=None if ordered else False)


def _is_another(holder: Holder) -> bool:
    """Return whether the holder might be a process other than this one."""
    return holder.listed_pid != os.getpid()


def _used(
    nvml: Nvml,
    row: DeviceStatus,
    listed: Sequence[Process],
    idle_mib: float | None,
    *,
    is_complete: bool = True,
) -> DeviceStatus:
    """Add processes and their reservations to a device's row after its usage was queried.

    Args:
        nvml: The NVML session.
        row: The device's row.
        listed: The processes on the device.
        idle_mib: The maximum memory use of an idle device in MiB. Defaults to the built-in limit.
        is_complete: Whether all of the device's holders are known.
    """
    holders = row.holders
    if nvml.sees_all:
        holders = with_hosts(procfs.with_memory_use(row.holders, listed))
    processes = identify_processes(nvml, listed, holders, is_complete=is_complete) if listed else ()
    total_mib, mode = (row.usage.total_mib, row.usage.mode) if row.usage else (None, None)
    uses, background = split_uses(processes, total_mib, mode, idle_mib)
    row = row._replace(holders=holders, processes=tuple(uses), background=tuple(background))
    unused = is_unused(row.usage, row.processes) if row.holders and row.usage else False
    if unused and len(_jobs(row)) > len(row.processes) and row.use_state is not State.IDLE:
        unused = None  # the memory in use can be a holder's, although its process has none
    return row._replace(
        is_unused=unused, is_unreserved_use=_is_unreserved_use(row, is_known=is_complete)
    )


def _jobs(row: DeviceStatus) -> list[Process]:
    """Return the processes on a device, except a desktop's and others without device memory."""
    own = (p for p in row.background if p.has_reserved and p.kind != GRAPHICS)
    return [*row.processes, *own]


def _with_certain_use(row: DeviceStatus, idle_mib: float | None) -> DeviceStatus:
    """Mark the memory use of a device's only process as unknown if it can have managed memory.

    If the listed memory alone exceeds the holder's part, it is kept.
    """
    jobs = _jobs(row)
    if row.usage is None or not has_managed_memory(row.usage, jobs, idle_mib):
        return row
    (job,) = jobs
    unknown = job._replace(memory_mib=None)
    listed = [unknown if each == job else each for each in (*row.processes, *row.background)]
    holders = with_hosts(procfs.with_memory_use(row.holders, listed))
    pairs = zip(row.holders, holders, strict=True)
    return row._replace(holders=tuple(old if old.is_over else new for old, new in pairs))


def _is_unreserved_use(row: DeviceStatus, *, is_known: bool) -> bool | None:
    """Return whether a process without a reservation is using the device, or None if unknown."""
    if not row.holders:
        is_busy = row.use_state is State.BUSY
        return is_busy if is_known or not is_busy else None
    # Other processes run by a holder's owner don't count as unreserved use.
    belongings = {process.has_reserved for process in row.processes if not process.beside}
    if False in belongings:
        return True
    return None if None in belongings else False
