"""What an attempt comes to: what it has locked, what it was refused, and what it releases."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.calls import Late
from reserve_gpu.errors import (
    ReservedAboveError,
    ReserveGPUError,
    TooLateError,
)
from reserve_gpu.gpus import usage
from reserve_gpu.locks.lock import Lock
from reserve_gpu.model import NO_LEASE, Device, Lease, Row, State, Ticket

if TYPE_CHECKING:
    from reserve_gpu.report import messages
    from reserve_gpu.report.faces import Face
else:
    messages = Late("report.messages")


class Locked(NamedTuple):
    """A device that was locked and will do. row: how it stood before."""

    device: Device
    lock: Lock
    row: Row

    @property
    def rank(self) -> tuple[int, float]:
        """Return less for what is better: what is held already; else what others use the least.

        Of parts the fullest of those that others have parts of, so that whole ones stay whole; last
        of all where somebody runs who was promised nothing, and may use more at any time.
        """
        row, is_idle = self.row, self.row.use is State.IDLE
        if row.is_mine or row.usage is None:
            return 0, -1.0
        if row.promisable_mib is not None:
            return 0 if row.holders else 1 if is_idle else 2, row.promisable_mib
        return not is_idle or bool(row.holders), usage.used_mib(row.usage)


class Granted(NamedTuple):
    """An attempt that took what was asked for. lease: until when it is held."""

    locked: tuple[Locked, ...]
    lease: Lease = NO_LEASE


class Denied(NamedTuple):
    """An attempt that took nothing. ahead: who comes before in the queue."""

    rows: tuple[Row, ...]
    ahead: tuple[Ticket, ...] = ()


class NotTaken(Exception):  # noqa: N818 - the error is made of it where people asked
    """Nothing could be taken: the values, which each face puts into its own words."""

    def error(self, face: "Face") -> ReserveGPUError:
        """Return the error in the words of a face."""
        raise NotImplementedError


class TooLate(NotTaken):
    """CUDA has started, and can't use what is asked for.

    held: what this process keeps. seen: what CUDA sees and this process may reserve.
    """

    def __init__(self, held: Sequence[Device], seen: Sequence[Device] = ()) -> None:
        super().__init__(held, seen)
        self.held, self.seen = held, seen

    def error(self, face: "Face") -> ReserveGPUError:
        """Return the error in the words of a face."""
        return TooLateError(messages.too_late(self.held, self.seen, face))


class ReservedAbove(NotTaken):
    """An ancestor has reserved all that this process may use. environ: the CUDA variables."""

    def __init__(self, rows: Sequence[Row], environ: Mapping[str, str | None]) -> None:
        super().__init__(rows, environ)
        self.rows, self.environ = rows, environ

    def error(self, face: "Face") -> ReserveGPUError:
        """Return the error in the words of a face."""
        return ReservedAboveError(messages.above(self.rows, self.environ, face), self.rows)


class Refused(NotTaken):
    """No device was to be had. made: makes the error, in the words of a face."""

    def __init__(self, made: "Callable[[Face], ReserveGPUError]") -> None:
        super().__init__(made)
        self.made = made

    def error(self, face: "Face") -> ReserveGPUError:
        """Return the error in the words of a face."""
        return self.made(face)


class Taken:
    """What an attempt has taken so far; at its end it releases all that was not kept."""

    def __init__(self, held: Mapping[str, Lock]) -> None:
        self._held = held
        self.locked: dict[str, Locked] = {}
        self.rows: list[Row] = []
        self._kept: frozenset[str] = frozenset()

    def __enter__(self) -> "Taken":  # noqa: PYI034 - typing has Self from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        for uuid, locked in self.locked.items():
            if uuid not in self._kept and locked.lock is not self._held.get(uuid):
                locked.lock.release()

    def add(self, answer: Locked | Row) -> None:
        """Count what came of one device."""
        if isinstance(answer, Locked):
            self.locked[answer.device.uuid] = answer
            answer = _spare(answer.row)
        self.rows.append(answer)

    def granted(self, devices: Sequence[Device]) -> Granted:
        """Return these of the devices."""
        return Granted(tuple(self.locked[device.uuid] for device in devices))

    def keep(self, granted: Granted) -> None:
        """Let these stay locked."""
        self._kept = frozenset(locked.device.uuid for locked in granted.locked)


def _spare(row: Row) -> Row:
    """Return the row of a device that would be taken, if the others can't be had."""
    state, is_part = row.state, row.promisable_mib is not None
    if row.is_mine or (row.holders and not is_part):
        state = State.RESERVED
    elif is_part or row.use is State.IDLE:  # of a part: as much as is asked for
        state = State.FREE
    return row._replace(state=state, would_be_taken=True)
