"""What an attempt comes to: what it has locked, what it was refused, and what it releases."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from reserve_gpu.locks.lock import Lock
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import NO_LEASE, Lease


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
