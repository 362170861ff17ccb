"""A joined process: a second process of a user on the devices that a first one has reserved.

It has the same devices and the same part, and a lock file beside the holder's, as a sharer has one:
so the devices are taken as long as one of the two lives, and its processes are no strangers'. It
ends when its holder's lease does: joining gives nobody more time.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation import quota
from reserve_gpu.allocation.request import rules
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks.directory import BRIEF_LIMIT_S, LockDirectory
from reserve_gpu.locks.holders import has_joined_own, place_of_host
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import LockError, RequestError, own_line
from reserve_gpu.model.requests import NO_LEASE, Lease, ReservationTerms
from reserve_gpu.render.notices import HAS_GONE, TIME_IS_OVER
from reserve_gpu.reservation.holding import Holding, Joined
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from reserve_gpu.model.holders import Holder, Reserved


def joined(reserved: Reserved, directory: LockDirectory) -> Holding:
    """Lock the files of a joined process; returns what it holds then. Under the mutex.

    Raises RequestError where the reservation has ended, or its time is over, and LockError.
    """
    host_of = {
        row.device: next(holder for holder in row.holders if holder.pid == reserved.holder.pid)
        for row in reserved.rows
        if isinstance(row.device, Device)
    }
    for device, host in host_of.items():
        there = directory.holders_of(device.uuid)
        key = host.record.since, host.pid
        if not any((each.record.since, each.pid) == key for each in there):
            raise RequestError(f"{HAS_GONE} {own_line('list')}")
    host, now = reserved.holder, procfs.now()
    taken = {device: _taken(host, now) for device, host in host_of.items()}
    since = min(taken.values(), key=lambda instant: instant.boot)
    lease = _lease(host, since, now)
    if lease.until is not None and lease.until <= now.wall and not lease.if_wanted:
        raise RequestError(TIME_IS_OVER)
    with ExitStack() as stack:  # all of them or none
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


def _taken(host: Holder, now: Instant) -> Instant:
    """Return the time at which the holder that a joined process joins took a device, by its record.

    If that holder has joined another one itself, both have the same holder. Every user can change
    the time in the record of an older version. The time of this process then counts from now on.
    """
    record = host.record
    since = record.guest_of or record.since or 0.0
    if not is_own_word(host):
        return Instant(since, now.boot)
    return record._replace(since=since).taken(now) or now


def is_own_word(holder: Holder) -> bool:
    """Return whether only the user of this process can have written a holder's record."""
    return holder.record_owner == os.geteuid()


def _lease(holder: Holder, since: Instant, now: Instant) -> Lease:
    """Return until when a joined process holds what it has joined: as long as its holder does.

    A rule counts from when the first holder took it, also for joined processes. The holder says the
    rest. Idleness ends the holder's lease alone, and joined processes count as use there.
    """
    host = holder.lease.at(now) if is_own_word(holder) else NO_LEASE
    own = Lease(until=host.until, if_wanted=host.if_wanted, until_boot=host.until_boot)
    if (ruled := rules()) is None:
        return own
    own = quota.lease(NO_LEASE if host.is_strict else own, ruled).begun(now)
    return quota.counted(own, ruled, since, now)._replace(idle_s=None)


def own_pids(held: Holding) -> set[int]:
    """Return this process and those that have joined what it holds, as far as they can be seen."""
    with suppress(LockError), LockDirectory() as directory:
        holders = [
            holder
            for device in held.devices
            for holder in directory.listed_own_sharers_of(device.uuid)
            if has_joined_own(holder, [held.locks[device.uuid].since])
        ]
        return {os.getpid(), *(holder.listed_pid for holder in holders if holder.listed_pid)}
    return {os.getpid()}


def prolonged(held: Holding) -> Holding | None:
    """Return the holding with the holder's longer lease, or None. Raises LockError."""
    with LockDirectory() as directory, directory.mutex(BRIEF_LIMIT_S):
        hosts = [host for host in _hosts(held, directory) if host]
    now = procfs.now()
    until = held.lease.at(now).until
    for host in hosts:
        lease = _lease(host, held.since, now)
        if lease.until and lease.until > (until or lease.until):
            return held._replace(terms=held.terms._replace(lease=lease), overdue=None)
    return None


def is_left(held: Holding) -> bool:
    """Tell whether the holder that a joined process has joined has gone. Raises LockError."""
    with LockDirectory() as directory, directory.mutex(BRIEF_LIMIT_S):
        return None in _hosts(held, directory)


def _hosts(held: Holding, directory: LockDirectory) -> list[Holder | None]:
    """Return the holder of each joined device, or None if it has gone."""
    hosts: list[Holder | None] = []
    for device, since in zip(held.devices, held.joined.of if held.joined else (), strict=False):
        there = directory.holders_of(device.uuid)
        at = place_of_host(since, os.geteuid(), there)
        hosts.append(None if at is None else there[at])
    return hosts
