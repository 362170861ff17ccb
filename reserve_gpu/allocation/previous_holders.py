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
    from collections.abc import Mapping, Sequence

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
    devices = {
        row.label: device_of(lock_name(row.device.uuid))
        for row in rows
        if row.is_unreserved_use and isinstance(row.device, Device)
    }
    with suppress(LockError), LockDirectory() as locks:
        reader = locks.holders
        previous = reader.previous(devices.values())
        holders = {label: previous[device] for label, device in devices.items()}
        rows = [
            _with_processes(row, holders[row.label], reader) if row.label in holders else row
            for row in rows
        ]
        rows = _with_openers(nvml, rows, holders, reader)
        return _with_last_holders(nvml, rows, holders, watch_s)
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


def _with_processes(row: DeviceStatus, holders: Sequence[Holder], reader: Holders) -> DeviceStatus:
    """Mark the listed processes that previous holders have left over on a device."""
    return row._replace(processes=tuple(_left_by(each, holders, reader) for each in row.processes))


def _with_openers(
    nvml: Nvml,
    rows: Sequence[DeviceStatus],
    holders: Mapping[str, Sequence[Holder]],
    reader: Holders,
) -> list[DeviceStatus]:
    """Add this user's processes that have opened a busy device and hold no reservation.

    A forked child keeps its parent's GPU memory for as long as it has the device file open, even if
    the driver does not list the child.
    """
    unexplained = {
        row.device: row.label
        for row in rows
        if row.label in holders and isinstance(row.device, Device) and is_unexplained(row)
    }
    if not unexplained:
        return [*rows]
    minors = nvml.minors([*unexplained])
    paths = {unexplained[device]: f"/dev/nvidia{minor}" for device, minor in minors.items()}
    openers = procfs.openers(paths.values()) if paths else {}
    return [
        _opened(row, openers[paths[row.label]], holders[row.label], reader)
        if row.label in paths
        else row
        for row in rows
    ]


def _opened(
    row: DeviceStatus, pids: Sequence[int], holders: Sequence[Holder], reader: Holders
) -> DeviceStatus:
    """Add the processes that have opened a device: those left over, or else all of them."""
    listed = {process.pid for process in row.processes}
    unreserved = [
        pid
        for pid in pids
        if pid not in listed and not procfs.is_descendant(pid, reader.device_pids)
    ]
    found = [Process(pid, has_reserved=False) for pid in unreserved[:MOST_OPENERS]]
    opened = [_left_by(procfs.with_identity(each), holders, reader) for each in found]
    if left := [process for process in opened if process.left_by]:
        left_pids = {process.pid for process in left}
        background = tuple(each for each in row.background if each.pid not in left_pids)
        return row._replace(processes=(*row.processes, *left), background=background)
    # A process that uses one of a GPU's MIG instances has opened the whole GPU's file.
    return row._replace(openers=() if row.device.instance is not None else tuple(opened))


def _with_last_holders(
    nvml: Nvml,
    rows: Sequence[DeviceStatus],
    holders: Mapping[str, Sequence[Holder]],
    watch_s: float,
) -> list[DeviceStatus]:
    """Add the last holder of each device whose memory the driver might still be freeing."""
    now_boot = procfs.now().boot
    rows = [
        row._replace(last_holder=last_holder(row, holders[row.label], now_boot))
        if holders.get(row.label) and is_unexplained(row)
        else row
        for row in rows
    ]
    falling = _falling(nvml, [row for row in rows if row.last_holder], watch_s)
    return [
        row._replace(last_holder=row.last_holder._replace(is_falling=True))
        if row.last_holder and row.label in falling
        else row
        for row in rows
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
