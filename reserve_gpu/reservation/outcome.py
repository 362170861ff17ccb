"""What an attempt comes to: what it has locked, what it was refused, and what it lets go of."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reserve_gpu.gpus import usage
from reserve_gpu.locks.lock import Lock
from reserve_gpu.model import NO_LEASE, Device, Holder, Lease, Refusal, State, Ticket, Usage


class Locked(NamedTuple):
    """A device that was locked and will do.

    usage: its reading, None for what was held before. sharers: who has it too.
    room_mib: what could have been promised of its memory, where a part is asked for.
    """

    device: Device
    lock: Lock
    state: State = State.IDLE
    usage: Usage | None = None
    sharers: tuple[Holder, ...] = ()
    room_mib: float | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better: what is held already; else what others use the least.

        Of parts the fullest of those that others have parts of, so that whole ones stay whole; last
        of all where somebody runs who was promised nothing, and may use more at any time.
        """
        if self.usage is None:
            return 0, -1.0
        if self.room_mib is not None:
            kind = 0 if self.sharers else 1 if self.state is State.IDLE else 2
            return kind, self.room_mib
        return self.state is not State.IDLE or bool(self.sharers), usage.used_mib(self.usage)


class Granted(NamedTuple):
    """An attempt that took what was asked for. lease: until when it is held."""

    locked: tuple[Locked, ...]
    lease: Lease = NO_LEASE


class Denied(NamedTuple):
    """An attempt that took nothing. ahead: who comes before in the queue."""

    refusals: tuple[Refusal, ...]
    ahead: tuple[Ticket, ...] = ()


class Taken:
    """What an attempt has taken so far; at its end it lets go of all that was not kept."""

    def __init__(self, held: Mapping[str, Lock]) -> None:
        self._held = held
        self.locked: dict[str, Locked] = {}
        self.refusals: list[Refusal] = []
        self._kept: frozenset[str] = frozenset()

    def __enter__(self) -> "Taken":  # noqa: PYI034 - typing has Self from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        for uuid, locked in self.locked.items():
            if uuid not in self._kept and locked.lock is not self._held.get(uuid):
                locked.lock.release()

    def add(self, answer: Locked | Refusal) -> None:
        """Count what came of one device."""
        if isinstance(answer, Refusal):
            self.refusals.append(answer)
        else:
            self.locked[answer.device.uuid] = answer
            self.refusals.append(_spare(answer))

    def granted(self, devices: Sequence[Device]) -> Granted:
        """Return these of the devices."""
        return Granted(tuple(self.locked[device.uuid] for device in devices))

    def keep(self, granted: Granted) -> None:
        """Let these stay locked."""
        self._kept = frozenset(locked.device.uuid for locked in granted.locked)


def _spare(locked: Locked) -> Refusal:
    """What is said of a device that would be taken, if the others can't be had."""
    state, holder = State.FREE if locked.state is State.IDLE else locked.state, None
    if locked.room_mib is not None:
        state = State.FREE  # as much of it as is asked for
    elif locked.sharers:
        state, holder = State.RESERVED, locked.sharers[0]
    return Refusal(locked.device, state, locked.usage, holder=holder, would_be_taken=True)
