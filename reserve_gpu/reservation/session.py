"""What this process holds, and what that has changed in its environment: the one place for both.

A process has one session. A forked child begins with an empty one, as its parent's locks are closed
in it; the program that a process becomes by exec takes over what was left to it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reserve_gpu import host, interrupts
from reserve_gpu.errors import LockError, NoFreeDeviceError, RequestError
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.model import NO_TERMS, Terms
from reserve_gpu.report import messages
from reserve_gpu.reservation import environment, policy
from reserve_gpu.reservation.claim import signature
from reserve_gpu.reservation.environment import Changes
from reserve_gpu.reservation.held import Held
from reserve_gpu.reservation.turn import Turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from reserve_gpu.locks.lock import Lock
    from reserve_gpu.model import Device, Request
    from reserve_gpu.reservation.ending import Endings
    from reserve_gpu.reservation.outcome import Granted
    from reserve_gpu.reservation.request import Deadline

RENEW_LIMIT_S = 1.0  # for the mutex, at the end of a cell


class Reservation:
    """Devices that this process holds; a context manager that lets go of them at the end.

    devices: in the order in which CUDA numbers them in this process.
    environ: the variables that were set for them.
    memory_mib: the part of each that this process may use, None for all of it.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        environ: Mapping[str, str],
        memory_mib: float | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.environ = dict(environ)
        self.memory_mib = memory_mib

    @property
    def note(self) -> str | None:
        """What others read beside the devices."""
        return session().note_of(self)

    @property
    def terms(self) -> Terms:
        """Until when it lasts, as long as it does."""
        return session().terms_of(self)

    def release(self) -> None:
        """Let go of the devices and give the variables the values that they had before."""
        session().release(self)

    def __enter__(self) -> Self:
        session().enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session().leave(self)

    def __repr__(self) -> str:
        return messages.reservation(self.devices)

    def __str__(self) -> str:
        return messages.reserved(self.devices, self.environ)


class Session:
    """What this process holds, and what it did to its environment.

    reason: why the program before this one, in the same process, has left it no device.
    notes: what there is to say of the caps that keep frameworks within a part.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.notes: list[str] = []
        self._held: Held | None = None
        self._reservation: Reservation | None = None  # of what is held
        self._changes = Changes()
        self._turn = Turn()
        self._looking: list[int] = []  # the threads that do
        self._over: frozenset[Device] = frozenset()  # of which it uses more than its part
        self._endings: Endings | None = None
        self._has_adopted = False
        environment.remember_over_fork()

    @contextmanager
    def turn(self, deadline: Deadline | None = None) -> Iterator[Self]:
        """Let one thread at a time change what is held, without an interrupt half-way.

        deadline: of a call that may wait; one that may not doesn't wait for one that does.
        Raises NoFreeDeviceError then, and RequestError in a handler of a signal that came in the
        midst of another call, also of one that looks: who reserves would wait for its mutex.
        """
        if self._turn.is_own or (deadline and threading.get_ident() in self._looking):
            raise RequestError(messages.NESTED)

        def give_up() -> None:
            if deadline and self._turn.is_waiting and time.monotonic() >= deadline.at:
                self._go_without()
                raise NoFreeDeviceError(messages.ANOTHER_THREAD_WAITS)

        with self._turn.take(give_up):
            yield self

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look in the block, by whichever thread, at what others hold."""
        thread = threading.get_ident()
        self._looking.append(thread)
        try:
            yield
        finally:
            self._looking.remove(thread)

    @contextmanager
    def letting_go_if_interrupted(self, deadline: Deadline) -> Iterator[None]:
        """Let go of what was taken in the block if it ends by Ctrl-C: nobody gets to know of it.

        What comes after a wait, or after a reservation that is gone, sees no GPU.
        """
        before = self.reservation
        try:
            yield
            interrupts.checkpoint()
        except KeyboardInterrupt:
            if self.reservation is not before:
                self._release()
            if before or deadline.waits:
                self._go_without()
            raise

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let other threads know that this one, which has the turn, waits in the queue."""
        self._turn.is_waiting = True
        try:
            yield
        finally:
            self._turn.is_waiting = False

    @property
    def reservation(self) -> Reservation | None:
        """What is held, unless its locks were lost."""
        return self._reservation if self._held and self._held.is_intact else None

    @property
    def held(self) -> Held | None:
        """What is held, with all that is known of it; None where its locks were lost."""
        return self._held if self.reservation else None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that are held."""
        reservation = self.reservation
        return reservation.devices if reservation else ()

    @property
    def part_mib(self) -> float | None:
        """The part of each of them that was promised, None for all of it."""
        return self._held.part_mib if self._held and self.reservation else None

    def in_place(self, request: Request) -> Request:
        """The request for the devices that are held, where it is for another part of them.

        Who holds a part and asks for a larger one means more of the same device.
        """
        is_part = None not in (self.part_mib, request.part_mib)
        devices = policy.kept(self.devices, request, is_shared=True) if is_part else None
        if not devices or request.devices:
            return request
        return request._replace(devices=tuple(d.number for d in devices), count=None, exclude=())

    def note_of(self, reservation: Reservation) -> str | None:
        """What others read beside it, while it is held."""
        return self._held.note if self._held and self._reservation is reservation else None

    def terms_of(self, reservation: Reservation) -> Terms:
        """Until when it is held, while it is."""
        return self._held.terms if self._held and self._reservation is reservation else NO_TERMS

    def outside(self) -> dict[str, str | None]:
        """The CUDA variables as somebody outside of this package set them."""
        return self._changes.outside()

    def locks_in(self, directory: str) -> dict[str, Lock]:
        """The locks, by UUID, that others respect who use that directory."""
        locks = self._held.locks if self._held and self.reservation else {}
        return {u: lock for u, lock in locks.items() if os.path.dirname(lock.path) == directory}

    def since_of(self, request: Request) -> float | None:
        """When what is asked for was reserved, if this process holds it: whole, or a part of it."""
        held, devices = self._held, self.devices
        if held is None or not policy.kept(devices, request, is_shared=held.is_shared):
            return None
        return min(lock.since for lock in held.locks.values())

    def met_by(self, request: Request) -> tuple[Reservation, list[str]] | None:
        """The reservation, if what is held already is what is asked for, and what to say of it.

        Where less is asked for than is held, the rest is let go of, as long as CUDA has not
        started.
        """
        held, reservation = self._held, self.reservation
        if held is None or reservation is None:
            return None
        devices = policy.kept(reservation.devices, request, is_shared=held.is_shared)
        if devices is None or not policy.is_enough(held.part_mib, request.part_mib):
            return None
        rest = [device for device in reservation.devices if device not in devices]
        is_another_order = not rest and tuple(devices) != reservation.devices
        if is_another_order and environment.cuda_started():
            return None
        self._prolong(request.terms)
        if tuple(devices) == reservation.devices and held.part_mib == request.part_mib:
            return reservation, self._again(request.note)
        if held.inside and request.part_mib != held.part_mib:
            return reservation, [*self._again(request.note), messages.PART_STAYS]
        is_late = bool(rest) and environment.cuda_started()
        if rest and (is_late or held.inside):
            stays = messages.stays(rest, is_late=is_late)
            return reservation, [*self._again(request.note), stays]
        locks = {device.uuid: held.locks[device.uuid] for device in devices}
        held = self._held or held  # with its new terms
        note = held.note if request.note is None else request.note
        now = held._replace(devices=tuple(devices), locks=locks, note=note)
        now = now._replace(part_mib=request.part_mib, part_unit=request.part_unit)
        now = now._replace(answers=held.answers + 1)
        reservation = self._change(now)
        self._sign()
        return reservation, self.notes

    def hold(self, granted: Granted, request: Request) -> Reservation:
        """Hold what was taken, and nothing else: set the variables, then let go of the rest."""
        devices = tuple(locked.device for locked in granted.locked)
        locks = {locked.device.uuid: locked.lock for locked in granted.locked}
        part = request.part_mib, request.part_unit
        held = Held(devices, locks, request.note, *part, granted.terms)
        if self._held and self._is_another_part(held):  # for all who count on it
            before = self._held.answered(threading.get_ident())
            note = before.note if request.note is None else request.note
            held = held._replace(note=note, answers=before.answers, inside=before.inside)
            # A rule gives terms to what is new; growing is not.
            new = granted.terms if request.terms.has_end else NO_TERMS
            held = held._replace(terms=before.terms.changed_by(new))
        reservation = self._change(held)
        if (held.note, held.terms) != (request.note, granted.terms):  # growing takes them from none
            self._sign()
        return reservation

    def release(self, reservation: Reservation | None = None) -> tuple[Device, ...]:
        """Let go of the reservation if it is still this one, None for any; returns its devices.

        In a handler of a signal that came in the midst of another call it is done at its end.
        """
        if self._turn.is_own:
            self._turn.at_end(lambda: self._release_if(reservation))
            return ()
        with self.turn():
            return self._release_if(reservation)

    def go_without(self) -> None:
        """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
        if self._turn.is_own:
            self._go_without()
        else:
            with self.turn():
                self._go_without()

    def enter(self, reservation: Reservation) -> None:
        """Begin a `with` block. Raises RequestError if the reservation has ended."""
        with self.turn():
            held = self._held
            if held is None or self.reservation is not reservation:
                raise RequestError(messages.HAS_ENDED)
            self._held = held.entered(threading.get_ident())

    def leave(self, reservation: Reservation) -> None:
        """End a `with` block, and the reservation if nobody else was answered with it."""
        with self.turn():
            held = self._held
            if held is None or self._reservation is not reservation or not held.inside:
                return
            self._held = held.left(threading.get_ident())
            if self._held.is_over:
                self._release()

    def note_cell(self) -> list[str]:
        """Note for others that a cell has ended; returns lines that the person has to know."""
        held = self._held
        if held is None or self._turn.is_taken:
            return []
        with self.turn():
            for lock in self._held_locks().values():
                lock.stamp()
            try:
                lines = self.renew(RENEW_LIMIT_S)
            except LockError as error:
                lines = [str(error)]
            if held.is_unnamed and host.notebook_path():
                self._sign()
            return lines

    def news(self) -> list[str]:
        """What a cell that begins has to tell of the end of a reservation, mostly nothing."""
        return self._endings.take_news() if self._endings else []

    def show_end(self) -> None:
        """Show a cell until when it has what it has reserved, if that ends."""
        held = self.held  # another thread may let go of it
        if held and held.terms.has_end:
            self.endings.begin_to_show()

    @property
    def endings(self) -> Endings:
        """What there is for a reservation that ends."""
        if self._endings is None:
            with interrupts.no_fork():
                from reserve_gpu.reservation.ending import Endings  # which few need
            self._endings = Endings(self)
        return self._endings

    def forget_idleness(self) -> None:
        """Promise no more to let go of what lies idle: the program that comes can't know it."""
        with self.turn():
            if self._held and self._held.terms.idle_s is not None:
                terms = self._held.terms._replace(idle_s=None)
                self._held = self._held._replace(terms=terms)
                self._sign()
                self._follow_end()

    def let_go(self) -> None:
        """Let go of what is held, in a turn, so that this process sees no device any more."""
        with interrupts.no_fork():
            self._drop()
        self._go_without()

    def mark_overdue(self, since: float) -> None:
        """Let everybody see that what is held should have ended at that moment; in a turn."""
        if self._held:
            self._held = self._held._replace(overdue=since)
            self._sign()

    def note_use(self, uses: Mapping[Device, float | None]) -> list[str]:
        """Note what this process uses of its parts; returns what to say of those that it exceeds.

        uses: in MiB, None where it can't be seen.
        """
        held = self._held  # another thread may let go of it
        if held is None:
            return []
        with interrupts.no_fork():
            from reserve_gpu.reservation import caps  # which only parts need
        self._over, lines = caps.exceeded(held, self._changes.written, uses, self._over)
        return lines

    def renew(self, limit_s: float = MUTEX_LIMIT_S) -> list[str]:
        """Lock again what others don't respect any more.

        Somebody deleted the lock file, and others look at a new one; or other code in this process
        has closed all descriptors.
        limit_s: for the mutex. Returns what to say of it. Raises LockError if another process has
        the device now.
        """
        held = self._held
        if held is None or not (devices := held.unprotected()):
            return []
        texts = []
        with LockDirectory() as directory, directory.mutex(limit_s):
            for device in devices:
                old = held.locks[device.uuid]
                self._held, text = held.relocked(device, directory)
                held = self._held
                old.release()
                texts.append(text)
        self._sign()
        self._follow_end()  # without its locks there was none to follow
        return texts

    def leave_to_next_program(self, reason: str | None) -> None:
        """Leave all of it to the program that this process becomes with its next exec."""
        with interrupts.no_fork():
            from reserve_gpu.reservation import handover  # which only `reserve-gpu run` needs
        held = self._held
        devices = held.devices if held else ()
        given = handover.Handover(self._changes, devices, self._held_locks(), reason=reason)
        if held:
            part_mib, part_unit = held.part_mib, held.part_unit
            given = given._replace(note=held.note, part_mib=part_mib, part_unit=part_unit)
            given = given._replace(terms=held.terms)
        handover.offer(given)

    def adopt(self) -> None:
        """Take over, once, what this process held before exec made it this program."""
        if self._has_adopted:
            return
        with self.turn():
            if not self._has_adopted:
                self._has_adopted = True
                self._adopt()

    def _adopt(self) -> None:
        if host.held_by() != os.getpid():
            return
        with interrupts.no_fork():
            from reserve_gpu.reservation import handover
        given = handover.received()
        if given is None:
            return
        self.reason, self._changes = given.reason, given.changes
        if given.devices:
            environ = _set_only(given.changes.written)
            self._reservation = Reservation(given.devices, environ, given.part_mib)
            part = given.part_mib, given.part_unit
            self._held = Held(given.devices, given.locks, given.note, *part, given.terms)
            self._follow_end()
            self._sign()  # the notebook is known only now, in VS Code later

    def _prolong(self, terms: Terms) -> None:
        """Hold what is held by these terms, if they say anything."""
        if self._held is None or not terms.has_end:
            return
        terms = self._held.terms.changed_by(terms.begun(time.time()))
        self._held = self._held._replace(terms=terms, overdue=None)
        self._sign()
        self._follow_end(in_cell=True)

    def _follow_end(self, *, in_cell: bool = False) -> None:
        """Wait for the end of what is held now. in_cell: who has called this may be a cell."""
        held = self._held
        if self._endings is None and not (held and held.terms.has_end):
            return
        if in_cell and held and held.terms.has_end:
            self.endings.watch_cells()
        self.endings.follow(held)

    def _again(self, note: str | None) -> list[str]:
        """Answer one more call with what is held; only a new note changes what others read.

        Of a part they read its size again: without it, where a full disk has lost it, it counts as
        the whole device.
        """
        if self._held is None or self._reservation is None:
            return []
        self._held = self._held.answered(threading.get_ident())
        if note is not None or self._held.part_mib is not None:
            self._sign(note)
        return [*self._mend_variables(self._reservation), *self._mend_caps(self._reservation)]

    def _mend_variables(self, reservation: Reservation) -> list[str]:
        """Set the variables again if somebody changed them, as long as CUDA will read them."""
        expected = {name: reservation.environ.get(name) for name in environment.CUDA}
        values = environment.read(environment.CUDA)
        if values == expected:
            return []
        is_late = environment.cuda_started()
        if not is_late:
            environment.write(expected)
        visible = values[environment.VISIBLE]
        return [messages.changed(visible, reservation.devices, is_late=is_late)]

    def _mend_caps(self, reservation: Reservation) -> list[str]:
        """Set the caps again that are gone; one that somebody has changed is theirs from now on.

        What is said to be set is what frameworks find.
        """
        held = self._held
        if held is None or held.part_mib is None:
            return []
        values, notes = self._caps(held, self._without_inherited_caps())
        said = {name: v for name, v in reservation.environ.items() if name in environment.CAPS}
        if _set_only(values) == said and environment.read(values) == values:
            return []
        self._changes = self._changes.to(values)
        others = {name: v for name, v in reservation.environ.items() if name not in said}
        reservation.environ = {**others, **_set_only(values)}
        return notes

    def _change(self, held: Held) -> Reservation:
        """Hold that, and nothing else: set the variables, then let go of the rest."""
        values = environment.variables(held.devices, held.part_mib)
        outside = self.outside()
        inherited = environment.inherited_caps(outside)
        outside |= inherited
        caps, notes = self._caps(held, outside)
        values |= caps
        environ = _set_only(values)
        reservation = Reservation(held.devices, environ, held.part_mib)
        if self._reservation and self._is_another_part(held):
            reservation = self._reservation
            reservation.environ, reservation.memory_mib = environ, held.part_mib
        before = self._held_locks()
        with interrupts.no_fork():
            self._changes = self._changes.to(inherited | values)
            self._held = held._replace(is_unnamed=not host.notebook_path())
            self._reservation = reservation
            self.notes = notes
            self._follow_end(in_cell=True)
        for uuid, lock in before.items():
            if held.locks.get(uuid) is not lock:
                lock.release()
        return reservation

    def _without_inherited_caps(self) -> dict[str, str | None]:
        """The variables as somebody outside set them, without the caps of a part held above."""
        outside = self.outside()
        return outside | environment.inherited_caps(outside)

    def _is_another_part(self, held: Held) -> bool:
        """Whether that is what is held but for its size: then it is the same reservation."""
        before = self._held if self.reservation else None
        return before is not None and (
            None not in (before.part_mib, held.part_mib) and before.devices == held.devices
        )

    @staticmethod
    def _caps(held: Held, outside: Mapping[str, str | None]) -> tuple[Mapping[str, str], list[str]]:
        """Return the caps to set for what is held, and what to tell the user about them."""
        if held.part_mib is None:
            return {}, []
        with interrupts.no_fork():
            from reserve_gpu.reservation import caps  # which only parts need
        values = caps.marked(held.devices, held.part_mib, outside)
        is_late = environment.cuda_started()
        return values, caps.notes(held.devices, held.part_mib, outside, values, is_late=is_late)

    def _release_if(self, reservation: Reservation | None) -> tuple[Device, ...]:
        """Let go of what is held if that is the reservation; None for any."""
        return self._release() if reservation in (None, self._reservation) else ()

    def _release(self) -> tuple[Device, ...]:
        devices = self.devices
        with interrupts.no_fork():
            self._drop()
            self._follow_end()
        return devices

    def _drop(self) -> None:
        for lock in self._held_locks().values():
            lock.release()
        self._held = self._reservation = None
        self._changes = self._changes.undo()
        self._over = frozenset()

    def _go_without(self) -> None:
        if not self.reservation:
            self._changes = self._changes.to(environment.NO_DEVICES)

    def _held_locks(self) -> Mapping[str, Lock]:
        return self._held.locks if self._held else {}

    def _sign(self, note: str | None = None) -> None:
        """Write into the locks who holds them. note: a new one, None to keep what there is."""
        if self._held:
            note = self._held.note if note is None else note
            self._held = self._held._replace(note=note, is_unnamed=not host.notebook_path())
            held = self._held
            part = held.part_mib, held.part_unit
            record = signature(held.devices, note, *part, held.terms, held.overdue)
            for device in self._held.devices:
                self._held.locks[device.uuid].write(record, device)


# By process id; an entry of another process is its parent's.
_sessions: dict[int, Session] = host.kept("sessions", dict)


def session() -> Session:
    """The session of this very process."""
    pid = os.getpid()
    own = _sessions.get(pid) or _sessions.setdefault(pid, Session())  # one for all threads
    own.adopt()
    return own


def _set_only(values: Mapping[str, str | None]) -> dict[str, str]:
    """Those that are set, for people; not what only processes below read."""
    return {n: v for n, v in values.items() if v is not None and n != environment.OWN_CAPS}
