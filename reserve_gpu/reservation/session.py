"""The reservation of this process, and the changes of its environment, in one place.

A process has one session. Whatever changes it runs on the session's own thread, as
system/executor.py explains, so no signal handler sees or leaves a half-made change. A forked child
starts with an empty session, because its parent's locks are closed in it. The program that a
process becomes by exec takes over what was left to it.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation import policy
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks.directory import BRIEF_LIMIT_S, MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.locks.lock import myself
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import LockError, NoThreadError, RequestError
from reserve_gpu.model.holders import Record
from reserve_gpu.model.requests import NO_LEASE, End, Lease, Request, ReservationTerms
from reserve_gpu.render import notices as notice
from reserve_gpu.reservation import feature, joining, refresh
from reserve_gpu.reservation.environment_changes import OurVariables
from reserve_gpu.reservation.feature import FEATURES
from reserve_gpu.reservation.holding import NOTHING, Change, Holding
from reserve_gpu.system import executor, process_identity, procfs
from reserve_gpu.system.executor import Executor
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from reserve_gpu.allocation.attempt import Granted
    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.holders import Reserved
    from reserve_gpu.model.requests import Fact
    from reserve_gpu.reservation.exec_handover import Handover
    from reserve_gpu.reservation.feature import Feature, Leaving, UseLook

SIGN_S = 5.0  # for so long cells need not look at the record, which others may write


class Reservation:
    """Devices that this process holds; a context manager that releases them at the end.

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
        # Calls of reserve() outside of `with` blocks, and the thread of each `with` block. The
        # session's thread changes both.
        self._calls = 0
        self._threads: list[int] = []

    @property
    def is_inside(self) -> bool:
        """Return whether a `with` block of it runs."""
        return bool(self._threads)

    @property
    def is_over(self) -> bool:
        """Return whether its last `with` block has ended and no other caller counts on it."""
        return not (self._threads or self._calls)

    def count_call(self, thread: int) -> None:
        """Count a call of reserve(), unless it is inside a `with` block."""
        if thread not in self._threads:
            self._calls += 1

    def enter(self, thread: int) -> None:
        """Count the start of a `with` block in place of the call that it began with."""
        self._threads.append(thread)
        self._calls = max(0, self._calls - 1)

    def leave(self, thread: int) -> None:
        """Count the end of a `with` block, which another thread may have begun."""
        self._threads.remove(thread if thread in self._threads else self._threads[-1])

    def replace(self, other: Reservation) -> None:
        """Count the callers of another reservation too, which this one replaces."""
        self._calls += other._calls
        self._threads += other._threads

    @property
    def note(self) -> str | None:
        """Return what others read beside the devices."""
        return session().terms_of(self).note

    @property
    def lease(self) -> Lease:
        """Return until when it lasts, as long as it does."""
        return session().terms_of(self).lease.at(procfs.now())

    def release(self) -> None:
        """Release the devices and give the variables the values that they had before."""
        session().run_in_any_case(session().release, self)

    def __enter__(self) -> Self:
        session().run(session().enter, self)
        return self

    def __exit__(self, *_: object) -> None:
        session().run_in_any_case(session().leave, self)

    def __repr__(self) -> str:
        return f"<Reservation of {' and '.join(device.label for device in self.devices)}>"

    def __str__(self) -> str:
        lines = [f"Reserving {device.label}: {device.description}" for device in self.devices]
        values = [f"{name} = {value!r}" for name, value in sorted(self.environ.items())]
        return "\n".join([*lines, *values])


class Savepoint:
    """The reservation before a request changes it, and whether the request may wait."""

    def __init__(self, reservation: Reservation | None, *, waits: bool) -> None:
        self.reservation, self.waits = reservation, waits


class Session(Executor):
    """The reservation of this process.

    Properties may be read on any thread. Whatever changes something is called through `run`.

    variables: what it has done to its environment.
    reason: why the program before this one, in the same process, has left it no device.
    is_waiting: a call waits in the queue for a device.
    features: The features in use, by name, in the order of FEATURES.
    last_look: the last one of a feature whether what is held is used.
    unsigned: Devices whose lock files could not be written, with their directory and the reason.
    """

    def __init__(self) -> None:
        super().__init__(self._step)
        self.variables = OurVariables()
        self.reason: str | None = None
        self.is_waiting = False
        self.last_look: UseLook | None = None
        self._held: Holding | None = None
        self._reservation: Reservation | None = None  # of what is held
        self.features: Mapping[str, Feature] = {}  # replaced, never changed in place
        self._wanted_here: dict[str, type[Feature]] = {}  # the features of every reservation
        self._signed: tuple[str | None, float] = (None, 0.0)  # as which notebook, and until when
        self.unsigned: list[tuple[Device, str, str]] = []
        self._addresses: tuple[str, ...] | None = None  # PCI addresses at the last comparison
        self.has_adopted = False
        cuda_environment.remember_over_fork()

    @property
    def is_nested(self) -> bool:
        """Return whether a signal handler interrupted a call, or the start of a cell."""
        return super().is_nested or executor.is_mine(cells().quiet)

    def load(self, terms: ReservationTerms | None = None) -> None:
        """Import what a reservation needs, on the caller's thread.

        terms: those of the request; None if they are not known yet.
        """
        self._wanted_here = feature.load_for_reserving(terms)

    def wanted(self, terms: ReservationTerms) -> Collection[Feature]:
        """Return the features for these terms, and those from before; new ones are made."""
        features: dict[str, Feature] = {}
        for row in FEATURES:
            if row.name in self.features:
                features[row.name] = self.features[row.name]
            elif wanted := self._wanted_here.get(row.name):
                features[row.name] = wanted(self)
            elif row.is_wanted_for(terms):
                features[row.name] = row.load()(self)
        self.features = features
        return features.values()

    def _step(self) -> float | None:
        pauses = [each.step() for each in self.features.values()]
        return min((pause_s for pause_s in pauses if pause_s is not None), default=None)

    # -- what is held ------------------------------------------------------------------------------

    @property
    def held(self) -> Holding | None:
        """Return what is held; None where its locks were lost."""
        held = self._held
        return held if held and held.is_intact else None

    @property
    def holding(self) -> Holding:
        """Return what is held; a value without devices where that is nothing."""
        return self.held or NOTHING

    @property
    def reservation(self) -> Reservation | None:
        """Return the reservation of what is held."""
        return self._reservation if self.held else None

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the variables that are set for what is held."""
        return self.variables.environ

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that are held."""
        return self.holding.devices

    def terms_of(self, reservation: Reservation) -> ReservationTerms:
        """Return the terms of a reservation, as long as it is held."""
        held = self._held
        return held.terms if held and self._reservation is reservation else ReservationTerms()

    # -- changes of what is held -------------------------------------------------------------------

    def satisfy_from_current(self, request: Request) -> list[str] | None:
        """Answer a request with what is held already; returns what to say, None if it won't do.

        Where less is asked for than is held, release the rest, as long as CUDA has not started.
        """
        held = self.held
        if held and held.joined and joining.is_left(held):
            held = None  # it reserves anew
        is_more = request.terms.lease.has_end  # joining gives no time
        if held and held.joined and (is_more or not _is_met(held, request)):
            raise notice.has_joined(held.devices, held.joined.name)
        devices = held and policy.kept(held.devices, request)
        if not (held and devices):
            return None
        request = request.on(devices)
        if not policy.is_enough(held.terms.memory_limit_mib, request.terms.memory_limit_mib):
            return None
        rest = [device for device in held.devices if device not in devices]
        is_same = tuple(devices) == held.devices
        is_late = not is_same and cuda_environment.cuda_started()
        if is_late and not rest:  # another order
            return None
        held = self._prolong(held, request.terms.lease)
        is_inside = self._reservation is not None and self._reservation.is_inside
        note = held.terms.note if request.terms.note is None else request.terms.note
        if is_inside and request.terms.memory_limit_mib != held.terms.memory_limit_mib:
            return [*self._again(held, note), notice.PART_STAYS]
        if rest and (is_late or is_inside):
            return [*self._again(held, note), notice.stays(rest, is_late=is_late)]
        if is_same and held.terms.memory_limit_mib == request.terms.memory_limit_mib:
            return self._again(held, note)
        locks = {device.uuid: held.locks[device.uuid] for device in devices}
        now = held._replace(devices=tuple(devices), locks=locks, is_back=False)
        now = now._replace(terms=now.terms._replace(size=request.terms.size, note=note))
        previous = self._reservation
        self.set_holding(now if now.is_another_part_of(held) else now.anew())
        if previous and self._reservation and self._reservation is not previous:
            self._reservation.replace(previous)
        return self.variables.notices

    def hold(self, granted: Granted, request: Request) -> None:
        """Hold what was taken, and nothing else; if that fails, what was held before."""
        devices = tuple(locked.device for locked in granted.locked)
        locks = {locked.device.uuid: locked.lock for locked in granted.locked}
        were_idle = all(locked.row.use_state is State.IDLE for locked in granted.locked)
        terms = request.terms._replace(lease=granted.lease)
        held = Holding(devices, locks, terms, were_idle=were_idle).anew()
        before = self.held
        if before and held.is_another_part_of(before):  # for all who count on it
            # A rule gives a lease to what is new; growing is not.
            new = granted.lease if request.terms.lease.has_end else NO_LEASE
            terms = before.terms.changed_by(held.terms._replace(lease=new))
            held = before._replace(locks=locks, terms=terms, overdue=None, is_back=False)
        previous, reservation = self._held, self._reservation
        try:
            self.set_holding(held, renew_lease=True, how=End.CHANGED)
        except BaseException:  # what was taken is released then
            self.set_holding(previous)
            self._reservation = reservation
            self._update_reservation()
            raise

    def release(self, reservation: Reservation | None = None) -> tuple[Device, ...]:
        """Release the reservation if it is still this one, None for any; returns its devices."""
        if reservation not in (None, self._reservation):
            return ()
        devices = self.devices
        self.set_holding(None)
        return devices

    def roll_back(self, savepoint: Savepoint | None) -> None:
        """Return to the savepoint, because the caller does not know of a reservation made since."""
        if savepoint is None:
            return
        if self.reservation is not savepoint.reservation:
            self.forget(self.reservation)
        if savepoint.reservation or savepoint.waits:
            self.hide_if_unreserved()

    def forget(self, reservation: Reservation | None) -> None:
        """Release a reservation that no caller knows of.

        What CUDA uses stays reserved: nothing frees it as long as this process lives.
        """
        if reservation and not cuda_environment.cuda_started():
            self.release(reservation)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Tell calls of other threads meanwhile that this session waits."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def hide_if_unreserved(self) -> None:
        """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
        if not self.held:
            self.release_and_hide()

    def release_and_hide(self, how: End = End.OVER) -> None:
        """Release what is held, so that this process sees no device any more."""
        self.set_holding(None, is_hidden=True, how=how)

    def hide(self) -> None:
        """Let what starts from now on see no device; what is held stays held."""
        self.variables.hide()

    def enter(self, reservation: Reservation) -> None:
        """Begin a `with` block. Raises RequestError if the reservation has ended."""
        if self.reservation is not reservation:
            raise RequestError(notice.HAS_ENDED)
        reservation.enter(executor.caller())

    def leave(self, reservation: Reservation) -> None:
        """End a `with` block, and the reservation if nobody else was answered with it."""
        if self._reservation is not reservation or not reservation.is_inside:
            return
        reservation.leave(executor.caller())
        if reservation.is_over:
            self.set_holding(None)

    def renew(self, limit_s: float = MUTEX_LIMIT_S) -> list[str]:
        """Lock again what others don't respect any more; returns what to say of it.

        Somebody deleted the lock file, and others look at a new one; or other code in this process
        has closed all descriptors.
        limit_s: for the mutex. Raises LockError, also if another process has the device now.
        """
        held = self._held
        if held is None or not (devices := held.unprotected()):
            return []
        notices: list[str] = []
        with LockDirectory() as directory, directory.mutex(limit_s):
            for device in devices:
                held, what = held.relocked(device, directory)
                self.set_holding(held)
                notices.append(what)
        return notices

    def begin_cell(self) -> list[str]:
        """Correct the numbers of what is held, if this cell may be the one that starts CUDA.

        Returns notices for the user. Raises NoThreadError.
        """
        if self._held is None or self.is_busy or cuda_environment.cuda_started():
            return []
        addresses = refresh.pci_addresses()
        if addresses is not None and addresses == self._addresses:
            return []
        self._addresses = addresses
        # %reserve_gpu reports the faults.
        return [*self.run(refresh.refresh, self).changes]

    def end_cell(self) -> list[str]:
        """Let others see that a cell has ended; returns what the person has to know."""
        held = self._held
        if held is None or self.is_busy:
            return []
        notebook, sign_at = self._signed
        is_signed = notebook == process_identity.notebook() and time.monotonic() < sign_at
        are_set = is_signed and self.variables.are_as_set()
        if are_set and not held.joined and not held.unprotected():
            for lock in held.locks.values():
                lock.stamp()
            return []
        with suppress(NoThreadError):  # later is soon enough
            return self.run(self._end_cell)
        return []

    def _end_cell(self) -> list[str]:
        notices: list[str] = []
        try:
            notices = self.renew(BRIEF_LIMIT_S)
            held = self.held
            if held and held.joined and joining.is_left(held):
                notices.append(notice.left_alone(held.devices, held.joined.name))
        except LockError as error:
            notices = [str(error)]
        if self._held:
            notices += self.variables.changed_in_cell(self._held.devices)
            self.set_holding(
                self._held
            )  # VS Code names the notebook only after the kernel has started
            for lock in self._held.locks.values():
                lock.stamp()
        return notices

    def set_holding(
        self,
        held: Holding | None,
        *,
        is_hidden: bool = False,
        renew_lease: bool = False,
        is_adopted: bool = False,
        how: End = End.RELEASED,
    ) -> None:
        """Hold that, and nothing else: the only place where what this process holds changes.

        is_hidden: whether no device is shown if none is held; else those from before are.
        renew_lease: begin it anew. is_adopted: the variables are set already.
        how: in which way what was held has ended.
        First the variables change, then the locks that are not kept
        are released: what this process starts in between finds no GPU that is somebody else's.
        """
        before = self._held
        features: Collection[Feature] = self.features.values()
        if held:
            lease = held.lease
            features = self.wanted(held.terms)
            for feature in features:
                lease = feature.limited(lease)
            if lease != held.lease:
                held = held._replace(terms=held.terms._replace(lease=lease))
                features = self.wanted(held.terms)
        with no_fork:
            if held is None:
                self.variables.hide() if is_hidden else self.variables.unset()
            elif not (is_adopted or self._is_set_for(held)):
                self.variables.set_for(held)
            self._held, self._reservation = held, self._reservation_of(held)
            self._update_reservation()
        if held:
            self._sign(held)
        change = Change(before, held, how, time.time(), time.monotonic(), renew_lease)
        for feature in features:
            feature.changed(change)
        kept = list(held.locks.values()) if held else []
        for lock in before.locks.values() if before else ():
            if lock not in kept:
                lock.release()

    def _is_set_for(self, held: Holding) -> bool:
        """Return whether the variables are set for this reservation and these devices."""
        before = self._held
        if before is None or self.variables.are_hidden:
            return False
        return (before.number, before.devices, before.terms.memory_limit_mib) == (
            held.number,
            held.devices,
            held.terms.memory_limit_mib,
        )

    def _reservation_of(self, held: Holding | None) -> Reservation | None:
        """Return the caller's reservation of what is held, a new one if another one begins."""
        before = self._held
        if held is None or (before and before.number == held.number):
            return held and self._reservation
        reservation = Reservation((), {})
        if not held.number:  # joined or taken over: it stays until it is released
            reservation.count_call(executor.caller())
        return reservation

    def _update_reservation(self) -> None:
        """Show the caller's reservation what is held now; the devices may have new numbers."""
        if self._held and self._reservation:
            self._reservation.devices = self._held.devices
            self._reservation.environ = self.variables.environ
            self._reservation.memory_mib = self._held.terms.memory_limit_mib

    def _sign(self, held: Holding) -> None:
        """Write into the locks who holds them."""
        visible = cuda_environment.variables(held.devices)[cuda_environment.VISIBLE]
        who = myself()
        self._signed = who.notebook, time.monotonic() + SIGN_S
        record = Record(
            who,
            held.terms,
            visible=visible,
            overdue=held.overdue,
            kept_until=held.kept_until,
        )
        joined = held.joined.of if held.joined else [None] * len(held.devices)
        self.unsigned = []
        for device, since in zip(held.devices, joined, strict=True):
            lock = held.locks[device.uuid]
            own = record._replace(label=device.label, index=device.index, guest_of=since)
            if reason := lock.write(own):
                self.unsigned.append((device, os.path.dirname(lock.path), reason))

    # -- the same again ----------------------------------------------------------------------------

    def _prolong(self, held: Holding, lease: Lease) -> Holding:
        """Hold what is held by this lease too, if it says anything."""
        if lease.has_end:
            lease = held.lease.changed_by(lease.begun(procfs.now()))
            terms = held.terms._replace(lease=lease)
            held = held._replace(terms=terms, overdue=None)
            self.set_holding(held, renew_lease=True)
        return held

    def _again(self, held: Holding, note: str | None) -> list[str]:
        """Answer one more call with what is held; returns what was wrong and is mended."""
        self.set_holding(held._replace(terms=held.terms._replace(note=note)))
        notices = self.variables.mend(held)
        self._update_reservation()
        return notices

    # -- joining -----------------------------------------------------------------------------------

    def join(self, reserved: Reserved) -> None:
        """Hold, as a joined process, what another process of this user has reserved.

        Raises RequestError where that has released it by now, and LockError.
        """
        with LockDirectory() as directory, directory.mutex():
            self.set_holding(joining.joined(reserved, directory), renew_lease=True)

    # -- over exec ---------------------------------------------------------------------------------

    def leave_as(self, how: Leaving) -> dict[str, Fact]:
        """Let features leave what is held to what comes next; returns their facts for that."""
        return {name: f for each in self.features.values() for name, f in each.leaves(how).items()}

    def adopt(self) -> None:
        """Take over, once, what this process held before exec made it this program."""
        if procfs.held_by() == os.getpid():
            with no_fork:
                from reserve_gpu.reservation import exec_handover

            self.load()
            self.run(self._adopt, exec_handover.received)
        self.has_adopted = True

    def _adopt(self, received: Callable[[], Handover | None]) -> None:
        if self.has_adopted:
            return
        self.has_adopted = True
        given = received()
        if given is None:
            return
        self.reason = given.reason
        self.variables.adopt(given.changes)
        if given.held.devices:
            self.set_holding(given.held._replace(facts=given.facts), is_adopted=True)


# By process id; an entry of another process is its parent's.
_sessions: dict[int, Session] = executor.survive_reload("sessions", dict)


def session() -> Session:
    """Return the session of this very process."""
    pid = os.getpid()
    own = _sessions.get(pid) or _sessions.setdefault(pid, Session())  # one for all threads
    if not own.has_adopted:
        own.adopt()
    return own


def _is_met(held: Holding, request: Request) -> bool:
    """Tell whether what is held is just what is asked for."""
    kept = policy.kept(held.devices, request)
    memory_limit_mib = request.on(held.devices).terms.memory_limit_mib
    return tuple(kept or ()) == held.devices and held.terms.memory_limit_mib == memory_limit_mib
