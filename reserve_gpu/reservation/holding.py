"""The reservation of this process as a value: devices, their locks, and the terms."""

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
    """What makes a reservation a joined process's.

    of: since when the holder that was joined has each of the devices.
    name: what that holder is, in a word.
    """

    of: tuple[float, ...]
    name: str | None = None


_numbers = count(1)


class Holding(NamedTuple):
    """Devices that are held.

    locks: By UUID. terms: What others may count on.
    overdue: since when it should have ended, where it has not.
    kept_until: for how long it is kept for the restart of this kernel, which ends now.
    joined: The reservation of another process of this user that this one has joined.
    facts: what features have left to themselves in the program before this one.
    is_back: it was kept over the restart, and not asked for by size.
    number: Identifies the reservation within this process, however its devices change.
    were_idle: Whether nobody else used the devices when they were reserved.
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

    def anew(self) -> "Holding":
        """Return a copy that belongs to a new reservation."""
        return self._replace(number=next(_numbers))

    @property
    def lease(self) -> Lease:
        """Return until when it is held."""
        return self.terms.lease

    def locks_in(self, directory: str) -> dict[str, Lock]:
        """Return the locks, by UUID, that others respect who use that directory."""
        locks = self.locks.items()
        return {uuid: lock for uuid, lock in locks if os.path.dirname(lock.path) == directory}

    @property
    def since(self) -> Instant:
        """Return the time at which the first of the devices was reserved."""
        return min((lock.taken for lock in self.locks.values()), key=lambda taken: taken.boot)

    def since_of(self, request: Request) -> Instant | None:
        """Return when what is asked for was reserved, if it is held, or a part of it."""
        is_part, asks_part = self.terms.size is not None, request.terms.size is not None
        if is_part is not asks_part or not policy.kept(self.devices, request):
            return None
        return self.since

    def as_held(self, request: Request) -> Request:
        """Return a request that names no device and no size as one for what is held.

        An end or a note alone is for what the process has. So is a bare request of a joined
        process, and of a kernel that got back a part after its restart. Any other bare request is
        for a whole device.
        """
        wishes = request.terms._replace(size=None)
        is_unspecific = request == Request(terms=wishes)
        if not (is_unspecific and (self.is_back or self.joined or wishes != ReservationTerms())):
            return request
        return request._replace(terms=request.terms._replace(size=self.terms.size))

    @property
    def is_intact(self) -> bool:
        """Return whether this process still has all the locks: other code may have closed them."""
        return all(map(Lock.held, self.locks.values()))

    def is_another_part_of(self, other: "Holding") -> bool:
        """Return whether both are parts of the same devices."""
        return (
            None not in (self.terms.memory_limit_mib, other.terms.memory_limit_mib)
            and self.devices == other.devices
        )

    def on(self, devices: Sequence[Device]) -> "Holding":
        """Return a copy that holds only these devices.

        Args:
            devices: Some of the held ones, by their UUIDs, as the driver describes them now.
        """
        joined = self.joined
        if joined:
            since = dict(zip((device.uuid for device in self.devices), joined.of, strict=True))
            joined = joined._replace(of=tuple(since[device.uuid] for device in devices))
        locks = {device.uuid: self.locks[device.uuid] for device in devices}
        return self._replace(devices=tuple(devices), locks=locks, joined=joined)

    def with_locks(self, locks: Iterable[Lock | None]) -> "Holding | None":
        """Return what is held with these locks, in the order of the devices.

        None where one can't be had: the others are released then.
        """
        own: list[Lock] = []
        for lock in locks:
            if lock is None:
                for each in own:
                    each.release()
                return None
            own.append(lock)
        uuids = (device.uuid for device in self.devices)
        return self._replace(locks=dict(zip(uuids, own, strict=True)))

    def unprotected(self) -> list[Device]:
        """Return the devices whose locks don't keep others off any more."""
        return [device for device in self.devices if not self.locks[device.uuid].is_valid()]

    def relocked(self, device: Device, directory: LockDirectory) -> "tuple[Holding, str]":
        """Lock the device anew; returns what is held then, and what to tell of it. Under the mutex.

        Raises LockError if others have the device now, or so much of it that the part has no room.
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
            raise notice.lost(device, path, [procfs.with_user(new)])
        sharers = without_joined(directory.sharers_of(device.uuid, [new.name]), [old.since])
        if not self._has_room(device, sharers):
            new.release()
            raise notice.lost(device, path, list(map(procfs.with_user, sharers)))
        held = self._replace(locks={**self.locks, device.uuid: new})
        return held, notice.locked_anew(device, path)

    def _has_room(self, device: Device, sharers: Sequence[Holder]) -> bool:
        """Tell whether the part of it fits beside the parts of those who share the device."""
        if self.joined or self.terms.memory_limit_mib is None or device.usable_mib is None:
            return True
        promised_mib = sum(sharer.memory_limit_mib or 0.0 for sharer in sharers)
        return promised_mib + self.terms.memory_limit_mib <= device.usable_mib


NOTHING = Holding((), {})


class Change(NamedTuple):
    """What has become of what was held: what is held now, how the other has ended, and when.

    now: in seconds since the epoch. at: the same by time.monotonic(). renew_lease: it begins anew.
    """

    before: Holding | None
    held: Holding | None
    how: End
    now: float
    at: float
    renew_lease: bool
