"""What this process holds, and what that has changed in its environment.

The one piece of state that a process has is here. The locks are imported where they are used: a
first reservation loads them while the driver starts.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from reserve_gpu import choosing, cuda, myself
from reserve_gpu.device import Holder
from reserve_gpu.errors import LockError, NoFreeDeviceError, RequestError, ReserveGPUWarning
from reserve_gpu.text import labels, reserved

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from reserve_gpu.device import Device, Request
    from reserve_gpu.handover import Handover
    from reserve_gpu.locks import Lock

Variables: TypeAlias = "tuple[dict[str, str | None], dict[str, str | None], dict[str, str | None]]"
POLL_S = 0.1  # between two looks at whether another thread waits in line


class Reservation:
    """Devices that this process holds; a context manager that lets go of them at the end.

    devices: in the order in which CUDA numbers them in this process.
    environ: the variables that were set for them.
    locks: what holds them, by UUID.
    note: what others read beside them.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        locks: Mapping[str, Lock],
        environ: Mapping[str, str],
        note: str | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.environ = dict(environ)
        self.locks = dict(locks)
        self.note = note
        # Which threads were answered with this one and may still want it, and which of them are in
        # a `with` block: its end is the end of the reservation, unless another one has it too.
        self._answered = [threading.get_ident()]
        self._inside: list[int] = []
        self._is_unnamed = not myself.notebook_path()  # signed without the name of a notebook

    def release(self) -> None:
        """Let go of the devices and give the variables the values that they had before."""
        mine = own()
        with mine.turn:
            if mine.reservation is self:
                mine.restore_environment()
            for lock in self.locks.values():
                lock.release()
            if mine.reservation is self:
                mine.reservation = None
            mine.close_strays()

    def satisfies(self, request: Request) -> bool:
        """Whether this is what the request asks for."""
        return choosing.satisfies(self.devices, request, shared=self._is_shared())

    def again(self, note: str | None) -> Reservation:
        """Answer one more call with this reservation; only a new note changes what others read.

        Raises LockError if somebody deleted its lock files and another process has the device now.
        """
        self.renew()
        self._set_again()
        if threading.get_ident() not in self._inside:
            self._answered.append(threading.get_ident())
        if note is not None:
            self.note = note
        if note is not None or self._is_shared():
            self.sign()  # another sharer may have written over it
        return self

    def hand_over(self, taken: Mapping[str, Lock]) -> None:
        """Let go of what the next reservation has not taken, and be none any more."""
        for uuid, lock in self.locks.items():
            if taken.get(uuid) is not lock:
                lock.release()
        self.locks = {}

    def sign(self) -> None:
        """Write into the locks who holds them."""
        self._is_unnamed = not myself.notebook_path()
        for lock in self.locks.values():
            lock.write(myself.me(self.note))

    def note_cell(self) -> None:
        """Note for others that a cell has ended, and the notebook if its name is known only now."""
        if self._is_unnamed and myself.notebook_path():
            self.sign()
        for lock in tuple(self.locks.values()):
            lock.touch()

    def renew(self) -> None:
        """Lock again what somebody deleted the lock file of: others look at a new one.

        Raises LockError if another process has the device now.
        """
        if all(lock.stands() for lock in self.locks.values()):
            return
        from reserve_gpu import refusal
        from reserve_gpu.files import file_name
        from reserve_gpu.locks import LockDirectory

        with LockDirectory() as directory, directory.mutex():
            for device in self.devices:
                lock = self.locks[device.uuid]
                if lock.stands():
                    continue
                name = file_name(device.uuid, shared=lock.shared)
                found = directory.acquire(name, shared=lock.shared, again=lock)
                if isinstance(found, Holder):
                    raise LockError(refusal.lost(device, lock.path, found))
                self.locks[device.uuid] = found
                lock.release()
        self.sign()

    def _is_shared(self) -> bool:
        return any(lock.shared for lock in self.locks.values())

    def _set_again(self) -> None:
        """Mend the variables, if somebody changed them since, as long as CUDA will read them."""
        expected = {name: self.environ.get(name) for name in cuda.VARIABLES}
        found = cuda.read()
        if found == expected:
            return
        from reserve_gpu import refusal

        is_late = cuda.started()
        if not is_late:
            cuda.write(expected)
        text = refusal.changed(found[cuda.VISIBLE], self.devices, is_late=is_late)
        warnings.warn(text, ReserveGPUWarning, stacklevel=4)

    def __enter__(self) -> Self:
        mine = own()
        with mine.turn:
            if mine.current() is not self:
                raise RequestError("This reservation has been released; ask for another one.")
            thread = threading.get_ident()
            if self._answered:  # perhaps another thread asked for it and handed it to this one
                self._answered.remove(thread if thread in self._answered else self._answered[-1])
            self._inside.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with own().turn:
            thread = threading.get_ident()
            self._inside.remove(thread if thread in self._inside else self._inside[-1])
            if not self._inside and not self._answered:
                self.release()

    def __repr__(self) -> str:
        return f"<Reservation of {labels(self.devices)}>"

    def __str__(self) -> str:
        return reserved(self.devices, self.environ)


class Own:
    """What this process holds, and what it did to its environment.

    turn: held by the thread that changes any of it. is_waiting: that thread waits in line.
    is_reserving: it is in the midst of a reservation, also where a handler of a signal asks.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.turn = threading.RLock()
        self.is_waiting = self.is_reserving = False
        self.reservation: Reservation | None = None
        self.before: dict[str, str | None] = {}
        self.written: dict[str, str | None] = {}
        self.reason: str | None = None  # why the program before this one has left it no device
        self.has_looked = False  # for what that has left

    def adopt(self) -> None:
        """Take over what this process held before exec made it this program."""
        with self.turn:
            if not self.has_looked and myself.held_by() == self.pid:
                from reserve_gpu import handover

                if given := handover.received():
                    self._take_over(given)
            self.has_looked = True

    def _take_over(self, given: Handover) -> None:
        self.before, self.written = dict(given.before), dict(given.written)
        self.reason = given.reason
        if given.devices:
            environ = {name: value for name, value in given.written.items() if value is not None}
            self.reservation = Reservation(given.devices, given.locks, environ, given.note)
            self.reservation.sign()  # the notebook is known only now, in VS Code later

    def leave(self, reason: str | None) -> None:
        """Leave all of it to the program that this process becomes with its next exec.

        reason: why no device is held, for that program to tell.
        """
        from reserve_gpu import handover

        held = self.reservation
        handover.offer(
            handover.Handover(
                before=self.before,
                written=self.written,
                devices=held.devices if held else (),
                locks=held.locks if held else {},
                note=held.note if held else None,
                reason=reason,
            )
        )

    @contextmanager
    def turn_within(self, wait_s: float | None) -> Iterator[None]:
        """Let one thread reserve at a time.

        wait_s: for how long to wait for one that waits in line; for one that does not, for ever.
        Raises NoFreeDeviceError.
        """
        deadline = time.monotonic() + (wait_s or 0.0)
        before = None
        try:
            while not self.turn.acquire(timeout=POLL_S):
                if self.is_waiting and time.monotonic() >= deadline:
                    self.go_without()
                    raise NoFreeDeviceError(
                        "Another thread of this process is waiting in line for a GPU; this one "
                        "gets the same GPU if it waits as long: wait=True."
                    )
            before, self.is_reserving = self.is_reserving, True
            yield
        finally:
            if before is not None:
                self.is_reserving = before
                self.close_strays()
            with suppress(RuntimeError):  # this thread doesn't have it: interrupted, or refused
                self.turn.release()

    def current(self) -> Reservation | None:
        """The reservation, unless its locks were lost."""
        held = self.reservation
        return held if held and all(lock.held() for lock in held.locks.values()) else None

    def go_without(self) -> None:
        """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
        if not self.current():
            self.set_environment(cuda.NO_DEVICES)

    def close_strays(self) -> None:
        """Close the locks that an interruption left open, all but the reservation's."""
        if self.is_reserving:  # they may be those of what is under way
            return
        from reserve_gpu import descriptors

        locks = self.reservation.locks.values() if self.reservation else ()
        descriptors.close_strays([d for lock in locks for d in (lock.descriptor, lock.witness)])

    def outside_environment(self) -> dict[str, str | None]:
        """The variables as somebody outside of this extension set them."""
        now = cuda.read()
        return {
            name: self.before[name]
            if name in self.written and self.written[name] == value
            else value
            for name, value in now.items()
        }

    def variables(self) -> Variables:
        """What the variables are and were, for go_back."""
        return self.before, self.written, cuda.read()

    def go_back(self, variables: Variables) -> None:
        """Undo what was done to the variables since."""
        self.before, self.written, values = variables
        cuda.write(values)

    def set_environment(self, values: Mapping[str, str | None]) -> None:
        """Set the variables; None unsets one."""
        self.before = self.outside_environment()
        # First: interrupted after this, what is not yet written is not taken for ours.
        self.written = {**self.written, **values}
        cuda.write(values)

    def restore_environment(self) -> None:
        """Give the variables the values that they had before; not those that others changed."""
        cuda.write(self.outside_environment())
        self.written = {}


_states: dict[int, Own] = {}  # by process id: of this one, and of those that it was forked from


def note_cell() -> None:
    """Note for others that a cell of this kernel has just ended; costs next to nothing."""
    state = _states.get(os.getpid())
    if state and (held := state.reservation):
        held.note_cell()


def own() -> Own:
    """The state of this very process: a forked child holds nothing of its parent's."""
    pid = os.getpid()
    state = _states.get(pid) or _states.setdefault(pid, Own())  # one for all threads
    if not state.has_looked:
        state.adopt()
    return state
