"""Find the traces that previous holders have left on devices that are in use.

A holder's lock is free as soon as its process has ended. Two traces can remain on the device:
processes that the holder started, and memory that the driver is still freeing. The traces are only
displayed; no decision depends on them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.locks.directory import LockDirectory, device_of, lock_name
from reserve_gpu.model.devices import Device, Process, State
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import DeviceStatus, Holder, LastHolder
from reserve_gpu.system import executor, procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.gpus.nvml import Nvml
    from reserve_gpu.locks.holders import Holders

# The driver needs time to free a process's memory after the process has ended. Tests of other
# projects wait up to 30 s (https://github.com/sgl-project/sglang/pull/39545).
FREEING_S = 30.0
POLL_S = 0.1
READING_LIMIT_S = 1.0
LEAST_FALL_MIB = 1.0
MOST_OPENERS = 16  # maximum number of processes to describe that have opened a device


def add_traces(
    nvml: Nvml, rows: Sequence[DeviceStatus], watch_s: float = 0.0
) -> list[DeviceStatus]:
    """Add the traces of previous holders to the rows of devices in use without a reservation.

    Rows do not change if the traces can't be read.

    Args:
        nvml: The NVML session. It must see the processes of all PID namespaces.
        rows: The devices' rows, with their processes.
        watch_s: The time in seconds to watch whether the driver is freeing memory.
    """
    with suppress(LockError), LockDirectory() as locks:
        reader = locks.holders
        previous = [
            reader.previous(device_of(lock_name(row.device.uuid)))
            if row.is_unreserved_use and isinstance(row.device, Device)
            else []
            for row in rows
        ]
        with_processes = [
            _with_processes(nvml, row, holders, reader)
            for row, holders in zip(rows, previous, strict=True)
        ]
        return _with_last_holders(nvml, with_processes, previous, watch_s)
    return list(rows)


def is_unexplained(row: DeviceStatus) -> bool:
    """Return whether a device is busy, but no living process that the driver lists uses it."""
    usage = row.usage
    if usage is None or row.use_state is not State.BUSY or row.holders:
        return False
    is_all_listed = len(row.processes) >= (usage.compute or 0) + (usage.mps or 0)
    return is_all_listed and all(process.has_ended for process in row.processes)


def last_holder(row: DeviceStatus, holders: Sequence[Holder], now_boot: float) -> LastHolder | None:
    """Return the previous holder whose memory the driver might still be freeing, or None.

    The time at which a process ended is unknown, so a holder that did not release the device is
    always returned.

    Args:
        row: The device's row.
        holders: The previous holders, the latest first.
        now_boot: The current time in seconds since boot.
    """
    ended = {process.pid for process in row.processes if process.has_ended}
    listed = [holder for holder in holders if holder.pid in ended]
    (holder, *_) = listed or holders
    released_s = None
    if holder.record.released:
        released_s = now_boot - (holder.record.written_boot or 0.0)
        if not 0.0 <= released_s <= FREEING_S:
            return None
    return LastHolder(procfs.with_file_owner(holder), released_s, is_listed=bool(listed))


def _with_processes(
    nvml: Nvml, row: DeviceStatus, holders: Sequence[Holder], reader: Holders
) -> DeviceStatus:
    """Add the processes that previous holders have left over on a device."""
    if not row.is_unreserved_use:
        return row
    processes = tuple(_left_by(process, holders, reader) for process in row.processes)
    row = row._replace(processes=processes)
    if not is_unexplained(row):
        return row
    opened = _openers(nvml, row, holders, reader)
    if left := [process for process in opened if process.left_by]:
        pids = {process.pid for process in left}
        background = tuple(process for process in row.background if process.pid not in pids)
        return row._replace(processes=(*processes, *left), background=background)
    # A process that uses one of a GPU's MIG instances has opened the whole GPU's file.
    return row._replace(openers=() if row.device.instance is not None else tuple(opened))


def _with_last_holders(
    nvml: Nvml,
    rows: Sequence[DeviceStatus],
    previous: Sequence[Sequence[Holder]],
    watch_s: float,
) -> list[DeviceStatus]:
    """Add the last holder of each device whose memory the driver might still be freeing."""
    now_boot = procfs.now().boot
    candidates = [
        last_holder(row, holders, now_boot) if holders and is_unexplained(row) else None
        for row, holders in zip(rows, previous, strict=True)
    ]
    watched = [row for row, last in zip(rows, candidates, strict=True) if last]
    falling = _falling(nvml, watched, watch_s)
    return [
        row._replace(last_holder=last._replace(is_falling=row.label in falling)) if last else row
        for row, last in zip(rows, candidates, strict=True)
    ]


def _left_by(process: Process, holders: Sequence[Holder], reader: Holders) -> Process:
    """Add the name of the previous holder that started a process and has ended.

    Args:
        process: A process that uses the device or has opened it.
        holders: The device's previous holders.
        reader: The reader that identifies holders. Holders of any device and their descendants
            have not been left over.
    """
    if not holders or process.has_ended or process.has_reserved:
        return process
    leaders = procfs.exited_leaders(process.pid)
    uid = procfs.uid_of(process.pid)
    for holder in holders:
        # A user can write anything into a record, but only about the user's own processes.
        if holder.record.who.pid in leaders and holder.record_owner == uid:
            if procfs.is_descendant(process.pid, reader.device_pids):
                break
            if not could_start(holder, procfs.start_time_boot(process.pid)):
                continue
            started = procfs.start_time(process.pid)
            return process._replace(left_by=holder.name or "a process", started=started)
    return process


def could_start(holder: Holder, began_boot: float | None) -> bool:
    """Return whether a process began before the holder released the device.

    After a release, the holder's pid might have been reused.

    Args:
        holder: A previous holder.
        began_boot: The process's start time in seconds since boot, or None if it has ended.
    """
    if not holder.record.released or began_boot is None:
        return True
    return began_boot <= (holder.record.written_boot or 0.0)


def _openers(
    nvml: Nvml, row: DeviceStatus, holders: Sequence[Holder], reader: Holders
) -> list[Process]:
    """Return this user's processes that have opened a device but hold no reservation.

    A forked child keeps its parent's GPU memory for as long as it has the device file open, even if
    the driver does not list the child.
    """
    minor = nvml.minor(row.device) if isinstance(row.device, Device) else None
    listed = {process.pid for process in row.processes}
    pids = () if minor is None else procfs.openers(f"/dev/nvidia{minor}")
    unreserved = [
        pid
        for pid in pids
        if pid not in listed and not procfs.is_descendant(pid, reader.device_pids)
    ]
    found = [Process(pid, has_reserved=False) for pid in unreserved[:MOST_OPENERS]]
    return [_left_by(procfs.with_identity(each), holders, reader) for each in found]


def _falling(nvml: Nvml, rows: Sequence[DeviceStatus], watch_s: float) -> set[str]:
    """Return the labels of the devices that use less memory now than in their rows' readings."""
    falling: set[str] = set()
    until = time.monotonic() + watch_s
    while len(falling) < len(rows) and time.monotonic() < until:
        executor.sleep(POLL_S)
        falling |= {row.label for row in rows if _uses_less(nvml, row)}
    return falling


def _uses_less(nvml: Nvml, row: DeviceStatus) -> bool:
    """Return whether a device uses less memory now than in the row's reading."""
    before = row.usage.used_mib if row.usage else None
    if before is None or not isinstance(row.device, Device):
        return False
    with suppress(DeviceError):
        now = nvml.usage(row.device, READING_LIMIT_S).used_mib
        return now is not None and now <= before - LEAST_FALL_MIB
    return False
