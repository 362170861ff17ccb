"""Let a process join a reservation that another process of the same user holds.

A joined process shares the holder's devices, or the same parts of them. It locks its own file next
to the holder's lock file. So the devices stay reserved until neither process holds them, and use by
the joined process counts as reserved use. The joined process's lease ends with the holder's lease.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation import quota
from reserve_gpu.allocation.request import rules
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks.directory import BRIEF_LIMIT_S, LockDirectory
from reserve_gpu.locks.holders import has_joined_reservation, host_index
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import LockError, RequestError, command_line
from reserve_gpu.model.requests import NO_LEASE, Lease, ReservationTerms
from reserve_gpu.render.notices import JUST_RELEASED, LEASE_EXPIRED
from reserve_gpu.reservation.holding import Holding, Joined
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from reserve_gpu.model.holders import Holder, Reserved


def joined(reserved: Reserved, directory: LockDirectory) -> Holding:
    """Join a reservation by locking a file for each device. The caller must hold the mutex.

    Args:
        reserved: The reservation to join.
        directory: The lock directory.

    Returns:
        The joined process's reservation.

    Raises:
        RequestError: The reservation to join has been released, or its lease has expired.
        LockError: A file can't be locked.
    """
    host_of = {
        row.device: next(holder for holder in row.holders if holder.pid == reserved.holder.pid)
        for row in reserved.rows
        if isinstance(row.device, Device)
    }
    for device, host in host_of.items():
        holders = directory.holders_of(device.uuid)
        key = host.record.since, host.pid
        if not any((each.record.since, each.pid) == key for each in holders):
            raise RequestError(f"{JUST_RELEASED} {command_line('list')}")
    host, now = reserved.holder, procfs.now()
    taken = {device: _reserved_at(host, now) for device, host in host_of.items()}
    since = min(taken.values(), key=lambda instant: instant.boot)
    lease = _lease(host, since, now)
    if lease.until is not None and lease.until <= now.wall and not lease.if_wanted:
        raise RequestError(LEASE_EXPIRED)
    with ExitStack() as stack:  # release all locks if one can't be acquired
        locks = {}
        for device in host_of:
            lock = directory.acquire_joined(device.uuid, taken[device])
            locks[device.uuid] = lock
            stack.callback(lock.release)
        stack.pop_all()
    visible = host.record.visible if is_own_word(reserved.holder) else None
    devices = cuda_environment.in_visible_order(host_of, visible or "")
    of = tuple(taken[device].wall for device in devices)
    terms = ReservationTerms(host.record.terms.size, lease)
    return Holding(devices, locks, terms, joined=Joined(of, host.name))


def _reserved_at(host: Holder, now: Instant) -> Instant:
    """Return the time when the holder reserved a device.

    If the holder is itself a joined process, the time comes from the original reservation. If other
    users can write the holder's record, the record's boot-clock time is not trusted, and the
    clock's current time is returned instead.
    """
    record = host.record
    since = record.guest_of or record.since or 0.0
    if not is_own_word(host):
        return Instant(since, now.boot)
    return record._replace(since=since).taken(now) or now


def is_own_word(holder: Holder) -> bool:
    """Return whether only this process's user could have written the holder's record."""
    return holder.record_owner == os.geteuid()


def _lease(holder: Holder, since: Instant, now: Instant) -> Lease:
    """Return a joined process's lease, which ends with the holder's lease.

    A rule's time limit counts from the start of the original reservation. The lease has no idle
    limit, because the holder's idle limit already takes use by the joined process into account.
    """
    host_lease = holder.lease.at(now) if is_own_word(holder) else NO_LEASE
    lease = Lease(
        until=host_lease.until, if_wanted=host_lease.if_wanted, until_boot=host_lease.until_boot
    )
    if (active_rules := rules()) is None:
        return lease
    lease = quota.lease(NO_LEASE if host_lease.is_strict else lease, active_rules).begun(now)
    return quota.counted(lease, active_rules, since, now)._replace(idle_s=None)


def own_pids(held: Holding) -> set[int]:
    """Return the pids of this process and all visible processes that joined its reservation."""
    with suppress(LockError), LockDirectory() as directory:
        holders = [
            holder
            for device in held.devices
            for holder in directory.listed_own_sharers_of(device.uuid)
            if has_joined_reservation(holder, [held.locks[device.uuid].since])
        ]
        return {os.getpid(), *(holder.listed_pid for holder in holders if holder.listed_pid)}
    return {os.getpid()}


def prolonged(held: Holding) -> Holding | None:
    """Extend a joined process's lease if the holder has extended the original lease.

    Args:
        held: The reservation of a joined process.

    Returns:
        The reservation with the extended lease, or None if the holder has not extended its lease.

    Raises:
        LockError: The lock directory can't be used.
    """
    with LockDirectory() as directory, directory.mutex(BRIEF_LIMIT_S):
        hosts = [host for host in _hosts(held, directory) if host]
    now = procfs.now()
    until = held.lease.at(now).until
    for host in hosts:
        lease = _lease(host, held.since, now)
        if lease.until and lease.until > (until or lease.until):
            return held._replace(terms=held.terms._replace(lease=lease), overdue=None)
    return None


def has_lost_holder(held: Holding) -> bool:
    """Return whether the holder that this process has joined no longer holds the devices.

    Args:
        held: The reservation of a joined process.

    Raises:
        LockError: The lock directory can't be used.
    """
    with LockDirectory() as directory, directory.mutex(BRIEF_LIMIT_S):
        return None in _hosts(held, directory)


def _hosts(held: Holding, directory: LockDirectory) -> list[Holder | None]:
    """Return each joined device's holder, or None if that holder no longer holds the device."""
    hosts: list[Holder | None] = []
    for device, since in zip(held.devices, held.joined.of if held.joined else (), strict=False):
        holders = directory.holders_of(device.uuid)
        index = host_index(since, os.geteuid(), holders)
        hosts.append(None if index is None else holders[index])
    return hosts
