"""A process's reservation as an immutable value: the devices, their locks, and the terms."""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from reserve_gpu.allocation import policy
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import without_joined
from reserve_gpu.locks.lock import Lock
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import Device
from reserve_gpu.model.holders import Holder
from reserve_gpu.model.requests import End, Fact, Lease, Request, ReservationTerms
from reserve_gpu.render import notices as notice
from reserve_gpu.system import procfs


class Joined(NamedTuple):
    """Another process's reservation that this process has joined.

    Attributes:
        of: When the holder reserved each device, in seconds since the epoch.
        name: The holder's short name, such as a notebook's name.
    """

    of: tuple[float, ...]
    name: str | None = None


_numbers = count(1)


class Holding(NamedTuple):
    """The devices that a process holds, with their locks and terms.

    Attributes:
        devices: The held devices, in the order in which CUDA numbers them.
        locks: Each device's lock, by device UUID.
        terms: The terms that other users can see, such as the lease and the reserved memory.
        overdue: When the reservation should have ended, in seconds since the epoch. None if the
            reservation is not overdue.
        kept_until: When the devices will be released if this kernel has not restarted by then, in
            seconds since the epoch. None if the kernel is not restarting.
        joined: The other process's reservation that this process has joined, or None.
        facts: Values that features stored before an exec.
        is_back: Whether the reservation was kept across a restart of this kernel, and has not
            changed since.
        number: A number that identifies the reservation within this process. It stays the same when
            the driver renumbers or loses a device.
        were_idle: Whether no other process was using the devices when they were reserved.
    """

    devices: tuple[Device, ...]
    locks: Mapping[str, Lock]
    terms: ReservationTerms = ReservationTerms()
    overdue: float | None = None
    kept_until: float | None = None
    joined: Joined | None = None
    facts: Mapping[str, Fact] = {}
    is_back: bool = False
    number: int = 0
    were_idle: bool = False

    def with_new_number(self) -> "Holding":
        """Return a copy with a new `number`, which marks the copy as a different reservation."""
        return self._replace(number=next(_numbers))

    @property
    def lease(self) -> Lease:
        """Return the reservation's lease."""
        return self.terms.lease

    def locks_in(self, directory: str) -> dict[str, Lock]:
        """Return the locks whose files are in the given lock directory, by device UUID."""
        locks = self.locks.items()
        return {uuid: lock for uuid, lock in locks if os.path.dirname(lock.path) == directory}

    @property
    def since(self) -> Instant:
        """Return the time when the first of the held devices was reserved."""
        return min((lock.taken for lock in self.locks.values()), key=lambda taken: taken.boot)

    def since_of(self, request: Request) -> Instant | None:
        """Return this reservation's start time, or None if it does not match the request.

        A reservation of device parts matches only a request for parts. A reservation of whole
        devices matches only a request for whole devices.
        """
        is_part, requests_part = self.terms.size is not None, request.terms.size is not None
        if is_part is not requests_part or not policy.matching_held(self.devices, request):
            return None
        return self.since

    def as_held(self, request: Request) -> Request:
        """Add the held memory size to a request that refers to this reservation.

        A request that sets only a lease or a note refers to this reservation. So does an empty
        request in a joined process, or in a kernel that kept its devices across a restart. In any
        other process, an empty request is for a whole device.

        Returns:
            The request with the memory size, or the unchanged request.
        """
        terms = request.terms._replace(size=None)
        is_unspecific = request == Request(terms=terms)
        if not (is_unspecific and (self.is_back or self.joined or terms != ReservationTerms())):
            return request
        return request._replace(terms=request.terms._replace(size=self.terms.size))

    @property
    def is_intact(self) -> bool:
        """Return whether this process still holds all its locks.

        Other code in this process might have closed their descriptors.
        """
        return all(map(Lock.held, self.locks.values()))

    def is_another_part_of(self, other: "Holding") -> bool:
        """Return whether both reservations are for parts of the same devices."""
        return (
            None not in (self.terms.memory_limit_mib, other.terms.memory_limit_mib)
            and self.devices == other.devices
        )

    def on(self, devices: Sequence[Device]) -> "Holding":
        """Return a copy with only these devices.

        Args:
            devices: The held devices to keep, as the driver now describes them.
        """
        joined = self.joined
        if joined:
            since = dict(zip((device.uuid for device in self.devices), joined.of, strict=True))
            joined = joined._replace(of=tuple(since[device.uuid] for device in devices))
        locks = {device.uuid: self.locks[device.uuid] for device in devices}
        return self._replace(devices=tuple(devices), locks=locks, joined=joined)

    def with_locks(self, locks: Iterable[Lock | None]) -> "Holding | None":
        """Return a copy with these locks. If one is missing, release the others and return None.

        Args:
            locks: Each device's lock, in the order of `devices`. None marks a missing lock.
        """
        acquired: list[Lock] = []
        for lock in locks:
            if lock is None:
                for each in acquired:
                    each.release()
                return None
            acquired.append(lock)
        uuids = (device.uuid for device in self.devices)
        return self._replace(locks=dict(zip(uuids, acquired, strict=True)))

    def unprotected(self) -> list[Device]:
        """Return the devices whose locks no longer exclude other processes."""
        return [device for device in self.devices if not self.locks[device.uuid].is_valid()]

    def relocked(self, device: Device, directory: LockDirectory) -> "tuple[Holding, str]":
        """Lock a device again after its lock was lost. The caller must hold the mutex.

        Args:
            device: One of the held devices.
            directory: The lock directory.

        Returns:
            A copy with the new lock, and a notice for the user.

        Raises:
            LockError: Another process has locked the device, or too little of the device's memory
                is still available.
        """
        old = self.locks[device.uuid]
        new: Lock | Holder
        if self.joined:
            new = directory.acquire_joined(device.uuid, old.taken)
        else:
            new = directory.lock_device(
                device.uuid, share=self.terms.memory_limit_mib is not None, taken=old.taken
            )
        path = old.path if old.held() else None
        if not isinstance(new, Lock):
            raise notice.lost(device, path, [procfs.with_owner(new)])
        sharers = without_joined(directory.sharers_of(device.uuid, [new.name]), [old.since])
        if not self._has_room(device, sharers):
            new.release()
            raise notice.lost(device, path, list(map(procfs.with_owner, sharers)))
        held = self._replace(locks={**self.locks, device.uuid: new})
        return held, notice.relocked(device, path)

    def _has_room(self, device: Device, sharers: Sequence[Holder]) -> bool:
        """Return whether the device has enough memory for this part and the sharers' parts."""
        if self.joined or self.terms.memory_limit_mib is None or device.usable_mib is None:
            return True
        promised_mib = sum(sharer.memory_limit_mib or 0.0 for sharer in sharers)
        return promised_mib + self.terms.memory_limit_mib <= device.usable_mib


NOTHING = Holding((), {})


class Change(NamedTuple):
    """A change to this process's reservation.

    Attributes:
        before: The reservation before the change, or None.
        held: The reservation after the change, or None.
        how: How the previous reservation ended.
        now: The time of the change, in seconds since the epoch.
        at: The time of the change, by time.monotonic().
        renew_lease: Whether the lease starts again, even if it is unchanged.
    """

    before: Holding | None
    held: Holding | None
    how: End
    now: float
    at: float
    renew_lease: bool
