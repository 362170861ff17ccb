"""A guest: a second process of a user on the devices that a first one has reserved.

It has the same devices and the same part, and a lock file beside the holder's, as a sharer has one:
so the devices are taken as long as one of the two lives, and its processes are no strangers'. The
holder's lease is the guest's: once the holder has gone, the guest is overdue.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from reserve_gpu.errors import LockError, RequestError
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import is_own_guest
from reserve_gpu.model import Device, Promise
from reserve_gpu.notices import HAS_GONE
from reserve_gpu.reservation import environment
from reserve_gpu.reservation.held import Guest, Held

if TYPE_CHECKING:
    from reserve_gpu.model import Reserved


def joined(reserved: Reserved, directory: LockDirectory) -> Held:
    """Lock the files of a guest; returns what it holds then. Under the mutex.

    Raises RequestError where the reservation has ended, and LockError.
    """
    host_of = {
        row.device: next(holder for holder in row.holders if holder.pid == reserved.holder.pid)
        for row in reserved.rows
        if isinstance(row.device, Device)
    }
    for device, host in host_of.items():
        there = directory.holders_of(device.uuid)
        if not any((each.since, each.pid) == (host.since, host.pid) for each in there):
            raise RequestError(HAS_GONE)
    # A guest's guest has joined the same as that one.
    since = {device: host.record.guest_of or host.since or 0.0 for device, host in host_of.items()}
    with ExitStack() as stack:  # all of them or none
        locks = {}
        for device in host_of:
            lock = directory.acquire_guests(device.uuid, since[device])
            locks[device.uuid] = lock
            stack.callback(lock.release)
        stack.pop_all()
    host = reserved.holder
    devices = environment.in_order(host_of, host.record.visible or "")
    of = tuple(since[device] for device in devices)
    return Held(devices, locks, Promise(host.record.promise.size), guest=Guest(of, host.name))


def own_pids(held: Held) -> set[int]:
    """Return this process and those that have joined what it holds, as far as they can be seen."""
    with suppress(LockError), LockDirectory() as directory:
        holders = [
            holder
            for device in held.devices
            for holder in directory.listed_own_sharers_of(device.uuid)
            if is_own_guest(holder, [held.locks[device.uuid].since])
        ]
        return {os.getpid(), *(holder.listed_pid for holder in holders if holder.listed_pid)}
    return {os.getpid()}


def is_left(held: Held, directory: LockDirectory) -> bool:
    """Tell whether the holder that a guest has joined has gone. Under the mutex."""
    if held.guest is None:
        return False
    return not all(
        any(
            holder.record.guest_of is None and holder.since == since and holder.uid == os.geteuid()
            for holder in directory.holders_of(device.uuid)
        )
        for device, since in zip(held.devices, held.guest.of, strict=True)
    )
