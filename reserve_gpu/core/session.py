"""What this process holds, and what that has changed in its environment: the one place for both.

A process has one session. Whatever changes it runs on the session's own thread (see calls.py), so
no signal handler ever sees, or leaves, anything half done. A forked child begins with an empty
session, as its parent's locks are closed in it; the program that a process becomes by exec takes
over what was left to it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

from reserve_gpu import calls, proc, settings, this_process
from reserve_gpu.calls import Executor, Late
from reserve_gpu.cells import cells
from reserve_gpu.core import environment, policy
from reserve_gpu.core.environment import Changes
from reserve_gpu.core.held import Answered, Change, Held
from reserve_gpu.errors import LockError, NoThreadError, RequestError
from reserve_gpu.forks import no_fork
from reserve_gpu.gpus import names
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.locks.record import myself
from reserve_gpu.model import NO_LEASE, Answer, End, Lease, Promise, Record, Request
from reserve_gpu.notices import (
    HAS_ENDED,
    PART_STAYS,
    Changed,
    Failure,
    IsGuest,
    LeaseDisplay,
    LeftAlone,
    ReleasedBy,
    SomebodyWaits,
    Stays,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from reserve_gpu.core import caps, elsewhere, guests, handover, journal, restart, waiters
    from reserve_gpu.core import lease as lease_timer
    from reserve_gpu.core.outcome import Granted
    from reserve_gpu.locks.lock import Lock
    from reserve_gpu.model import Device, Process, Reserved, Variables
    from reserve_gpu.notices import Notice
else:
    caps, handover = Late("core.caps"), Late("core.handover")
    restart = Late("core.restart")  # which only kernels of Jupyter need
    guests, waiters = Late("core.guests"), Late("core.waiters")
    elsewhere = Late("core.elsewhere")  # which only IPython needs
    lease_timer = Late("core.lease")  # which only what ends needs
    journal = Late("core.journal")  # which only a history needs


NOTHING = Held((), {})
QUICK_S = 0.02  # a look at the devices that takes longer is not made after each cell
RENEW_LIMIT_S = 1.0  # for the mutex, at the end of a cell


class Reservation(Answered):
    """Devices that this process holds; a context manager that releases them at the end.

    devices: in the order in which CUDA numbers them in this process.
    environ: the variables that were set for them.
    memory_mib: the part of each that this process may use, None for all of it.
    """

    @property
    def note(self) -> str | None:
        """Return what others read beside the devices."""
        return session().promise_of(self).note

    @property
    def lease(self) -> Lease:
        """Return until when it lasts, as long as it does."""
        return session().promise_of(self).lease

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
        lines = [f"Reserving {device.label}: {names.described(device)}" for device in self.devices]
        values = [f"{name} = {value!r}" for name, value in sorted(self.environ.items())]
        return "\n".join([*lines, *values])


class Session(Executor):
    """What this process holds, and what it did to its environment.

    Properties may be read on any thread. Whatever changes something is called through `run`.

    reason: why the program before this one, in the same process, has left it no device.
    cap_notices: what there is to tell of the caps that keep frameworks within a part.
    is_waiting: a call waits in the queue for a device.
    make_display: returns what shows people how a lease stands.
    """

    def __init__(self) -> None:
        super().__init__(self._step)
        self.make_display: Callable[[], LeaseDisplay] = LeaseDisplay
        self.reason: str | None = None
        self.cap_notices: list[Notice] = []
        self.is_waiting = False
        self._held: Held | None = None
        self._changes = Changes()
        self._over: frozenset[Device] = frozenset()  # of which it uses more than its part
        self._timer: lease_timer.LeaseTimer | None = None
        self._journal: journal.Journal | None = None
        self._changes_to_log: list[Change] = []
        self._has_adopted = False
        self._has_taken_over = False
        self._is_back = False  # what is held was kept over the restart, and not asked for by size
        self._listener: elsewhere.Listener | None = None
        self._told: set[tuple[str, int]] = set()  # who waits, or uses a device, and was told of
        self._told_change: Changed | None = None
        self._seen: Answered | None = None  # the reservation whose devices were looked at so
        self._look_at = 0.0  # what is on the devices, after a cell; by time.monotonic()
        self._told_until = 0.0  # before which nobody is told of, by time.monotonic()
        self._notices: list[Notice] = []  # for the next cell, beside those of the lease
        environment.remember_over_fork()

    @property
    def is_nested(self) -> bool:
        """Tell whether a signal handler has come in the midst of a call, or as a cell begins."""
        return super().is_nested or calls.is_mine(cells().quiet)

    def _step(self) -> float | None:
        pauses = [self.log()]
        if self._timer:
            if self._held and self._held.guest:
                self._follow_holder()
            pauses.append(self._timer.step())
        return min((pause_s for pause_s in pauses if pause_s is not None), default=None)

    # -- what is held ------------------------------------------------------------------------------

    @property
    def held(self) -> Held | None:
        """Return what is held; None where its locks were lost."""
        held = self._held
        return held if held and held.is_intact else None

    @property
    def reservation(self) -> Reservation | None:
        """Return the reservation of what is held."""
        return cast("Reservation | None", (self.held or NOTHING).reservation)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices that are held."""
        return (self.held or NOTHING).devices

    @property
    def lease(self) -> Lease:
        """Return until when what is held is held."""
        return (self.held or NOTHING).lease

    @property
    def part_mib(self) -> float | None:
        """Return the part of each of them that was promised, None for all of it."""
        return (self.held or NOTHING).part_mib

    def promise_of(self, reservation: Reservation) -> Promise:
        """Return what a reservation promises, as long as it is held."""
        held = self._held
        return held.promise if held and held.reservation is reservation else Promise()

    def inherited(self) -> dict[str, str | None]:
        """Return the CUDA variables without our changes."""
        return self._changes.inherited()

    def locks_in(self, directory: str) -> dict[str, Lock]:
        """Return the locks, by UUID, that others respect who use that directory."""
        locks = (self.held or NOTHING).locks
        return {u: lock for u, lock in locks.items() if os.path.dirname(lock.path) == directory}

    def since_of(self, request: Request) -> float | None:
        """Return when what is asked for was reserved, if this process holds it or a part of it."""
        held = self.held
        is_other = held is None or (held.part_mib is None) is not (request.part_mib is None)
        if held is None or is_other or not policy.kept(held.devices, request):
            return None
        return min(lock.since for lock in held.locks.values())

    def as_held(self, request: Request) -> Request:
        """Return a request that wishes for nothing particular as one for what is held.

        That is for a kernel that has got back a part after its restart, and for a guest: both ask
        for what they have.
        """
        held = self.held
        if held is None or not (self._is_back or held.guest):
            return request
        if request != Request(promise=request.promise._replace(size=None)):
            return request
        return request._replace(promise=request.promise._replace(size=held.promise.size))

    def in_place(self, request: Request) -> Request:
        """Return the request by name, where it is for the devices that are held, in another way.

        Whoever holds a part and asks for a larger one means more of the same device. A guest whose
        holder has gone means what it has.
        """
        is_part = None not in (self.part_mib, request.part_mib) or self._is_left()
        devices = policy.kept(self.devices, request) if is_part else None
        if not devices or request.devices:
            return request
        return request._replace(devices=tuple(d.number for d in devices), count=None)

    # -- changes of what is held -------------------------------------------------------------------

    def met_by(self, request: Request) -> list[Notice] | None:
        """Answer a request with what is held already; returns what to say, None if it won't do.

        Where less is asked for than is held, release the rest, as long as CUDA has not started.
        """
        held = None if self._is_left() else self.held  # a guest that is left reserves anew
        is_more = request.promise.lease.has_end  # joining gives no time
        if held and held.guest and (is_more or not _is_met(held, request)):
            raise Failure(IsGuest(held.devices, held.guest.name))
        devices = held and policy.kept(held.devices, request)
        if not (held and devices):
            return None
        request = request.on(devices)
        if not policy.is_enough(held.part_mib, request.part_mib):
            return None
        rest = [device for device in held.devices if device not in devices]
        is_same = tuple(devices) == held.devices
        is_late = not is_same and environment.cuda_started()
        if is_late and not rest:  # another order
            return None
        held = self._prolong(held, request.promise.lease).answered(calls.caller())
        note = held.promise.note if request.promise.note is None else request.promise.note
        if held.inside and request.part_mib != held.part_mib:
            return [*self._again(held, note), PART_STAYS]
        if rest and (is_late or held.inside):
            return [*self._again(held, note), Stays(rest, is_late)]
        if is_same and held.part_mib == request.part_mib:
            return self._again(held, note)
        locks = {device.uuid: held.locks[device.uuid] for device in devices}
        now = held._replace(devices=tuple(devices), locks=locks)
        now = now._replace(promise=now.promise._replace(size=request.promise.size, note=note))
        is_other = not now.is_another_part_of(held)
        self._become(now._replace(reservation=None) if is_other else now)
        return self.cap_notices

    def answer(self, notices: list[Notice]) -> tuple[Reservation, list[Notice]]:
        """Return the reservation of what is held, and what to tell of it. Raises RequestError."""
        if reservation := self.reservation:
            return reservation, notices
        raise RequestError(HAS_ENDED)  # other code of this process has closed its locks

    def hold(self, granted: Granted, request: Request) -> None:
        """Hold what was taken, and nothing else; if that fails, what was held before."""
        devices = tuple(locked.device for locked in granted.locked)
        locks = {locked.device.uuid: locked.lock for locked in granted.locked}
        held = Held(devices, locks, request.promise._replace(lease=granted.lease))
        before = self.held
        if before and held.is_another_part_of(before):  # for all who count on it
            before = before.answered(calls.caller())
            # A rule gives a lease to what is new; growing is not.
            new = granted.lease if request.promise.lease.has_end else NO_LEASE
            promise = before.promise.changed_by(held.promise._replace(lease=new))
            held = before._replace(locks=locks, promise=promise, overdue=None)
        previous = self._held
        try:
            self._become(held, renew_lease=True, how=End.CHANGED)
        except BaseException:  # what was taken is released then
            self._become(previous)
            raise

    def release(self, reservation: Reservation | None = None) -> tuple[Device, ...]:
        """Release the reservation if it is still this one, None for any; returns its devices."""
        own = self._held.reservation if self._held else None
        if reservation not in (None, own):
            return ()
        devices = self.devices
        self._become(None)
        return devices

    def go_without(self) -> None:
        """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
        if not self.held:
            self.let_go()

    def let_go(self, how: End = End.OVER) -> None:
        """Release what is held, so that this process sees no device any more."""
        self._become(None, environment.NO_DEVICES, how=how)

    def undo(self, reservation: Reservation | None) -> None:
        """Release a reservation that nobody got to know of.

        What CUDA uses stays reserved: nothing frees it as long as this process lives.
        """
        if reservation and not environment.cuda_started():
            self.release(reservation)

    def hide(self) -> None:
        """Let what starts from now on see no device; what is held stays held."""
        self._changes = self._changes.to(environment.NO_DEVICES)

    def mark_overdue(self, since: float) -> None:
        """Let everybody see that what is held should have ended at that moment, and show it here.

        It is in use, so that the variables name it, whatever was hidden before.
        """
        if self._held:
            self._become(self._held._replace(overdue=since))

    def forget_idleness(self) -> None:
        """End no reservation for idleness: the program that comes can't know it."""
        if self._held and self._held.lease.idle_s is not None:
            lease = self._held.lease._replace(idle_s=None)
            promise = self._held.promise._replace(lease=lease)
            self._become(self._held._replace(promise=promise), renew_lease=True)

    def enter(self, reservation: Reservation) -> None:
        """Begin a `with` block. Raises RequestError if the reservation has ended."""
        held = self.held
        if held is None or held.reservation is not reservation:
            raise RequestError(HAS_ENDED)
        self._become(held.entered(calls.caller()))

    def leave(self, reservation: Reservation) -> None:
        """End a `with` block, and the reservation if nobody else was answered with it."""
        held = self._held
        if held is None or held.reservation is not reservation or not held.inside:
            return
        held = held.left(calls.caller())
        self._become(None if held.is_over else held)

    def renew(self, limit_s: float = MUTEX_LIMIT_S) -> list[Notice]:
        """Lock again what others don't respect any more; returns what to say of it.

        Somebody deleted the lock file, and others look at a new one; or other code in this process
        has closed all descriptors.
        limit_s: for the mutex. Raises Failure if another process has the device now, LockError.
        """
        held = self._held
        if held is None or not (devices := held.unprotected()):
            return []
        notices: list[Notice] = []
        with LockDirectory() as directory, directory.mutex(limit_s):
            for device in devices:
                held, notice = held.relocked(device, directory)
                self._become(held)
                notices.append(notice)
        return notices

    def _is_left(self) -> bool:
        """Tell whether this is a guest, and the holder that it has joined has gone."""
        held = self.held
        if held is None or held.guest is None:
            return False
        with LockDirectory() as directory, directory.mutex(RENEW_LIMIT_S):
            return guests.is_left(held, directory)

    def end_cell(self) -> list[Notice]:
        """Let others see that a cell has ended; returns what the person has to know."""
        notices: list[Notice] = []
        if self._held and not self.is_busy:
            with suppress(NoThreadError):  # later is soon enough
                notices = self.run(self._end_cell)
        return notices

    def _end_cell(self) -> list[Notice]:
        notices: list[Notice] = []
        try:
            notices = self.renew(RENEW_LIMIT_S)
            if self._held and self._is_left():
                name = self._held.guest.name if self._held.guest else None
                notices.append(LeftAlone(self._held.devices, name))
        except (LockError, Failure) as error:
            notices = [error.reason if isinstance(error, Failure) else str(error)]
        if self._held:
            notices += self._changed_in_cell(self._held)
            self._become(self._held)  # VS Code names the notebook only after the kernel has started
            for lock in self._held.locks.values():
                lock.stamp()
        return notices

    def tell_waiters(self, is_watched: Callable[[], bool]) -> SomebodyWaits | None:
        """Return what to tell at the end of a cell of those who wait for what lies idle here.

        Each of them is told of once, and not more often than every ten minutes.
        is_watched: tells whether a person reads it.
        """
        now, held = time.monotonic(), self.held
        if held is None or self.is_busy or now < self._told_until:
            return None
        first = waiters.first_of(held.devices, self._told)
        if (took_s := time.monotonic() - now) > waiters.SLOW_S:  # a full directory of a container
            self._told_until = now + waiters.PATIENCE * took_s
        if first is None or not is_watched():
            return None
        if lease_timer.is_used(held, cells().began):
            # A driver that hangs is not asked again after each cell.
            self._told_until = now + waiters.PATIENCE * (time.monotonic() - now)
            return None
        if self.held is not held:  # it has ended meanwhile
            return None
        self._told_until = now + waiters.EVERY_S
        self._told.add(waiters.key(first))
        waited_s, is_late = waiters.waited_s(first), environment.cuda_started()
        return SomebodyWaits(first, waited_s, held.devices, is_late)

    def _become(
        self,
        held: Held | None,
        values: Variables | None = None,
        *,
        renew_lease: bool = False,
        is_adopted: bool = False,
        how: End = End.RELEASED,
    ) -> None:
        """Hold that, and nothing else: the only place where what this process holds changes.

        values: of the variables where nothing is held, by default those from before.
        renew_lease: begin it anew. is_adopted: the variables are set already.
        how: what the history says of the end of what was held.
        First the variables change, then the locks that are not kept
        are released: what this process starts in between finds no GPU that is somebody else's.
        """
        before = self._held
        # What is needed from here on is imported before any change, as it may fail.
        if settings.may_keep_history():
            calls.load(journal)
        if held and held.part_mib is not None:
            calls.load(caps)
        timer = self.timer if self._timer or (held and held.lease.has_end) else None
        self._is_back = self._is_back and bool(
            held and before and held.devices == before.devices and held.part_mib == before.part_mib
        )
        with no_fork:
            is_hidden = self._changes.written == environment.NO_DEVICES
            is_same = before and held and held.has_same_shape(before)
            is_set = is_adopted or (is_same and not is_hidden)
            if not is_set:
                held = self._with_variables(held, values or {})
            self._held = held
        if held:
            self._sign(held)
        self._listen(is_wanted=bool(held and cells().shell))
        if timer:
            timer.follow(held, renew_lease=renew_lease)
        now, at = time.time(), time.monotonic()
        self._changes_to_log.append(Change(before, held, how, now, at))
        kept = list(held.locks.values()) if held else []
        for lock in before.locks.values() if before else ():
            if lock not in kept:
                lock.release()

    def _with_variables(self, held: Held | None, values: Variables) -> Held | None:
        """Set the variables; returns what is held with its reservation."""
        if held is None:
            self._changes = self._changes.to(values)
            self._over = frozenset()
            return None
        inherited = self.inherited()
        before = environment.inherited_caps(inherited)
        limits, self.cap_notices = _caps(held, inherited | before)
        values = environment.variables(held.devices, held.part_mib) | limits
        self._changes = self._changes.to(before | values)
        reservation = held.reservation or Reservation(held.devices, {})
        reservation.environ, reservation.memory_mib = _set_only(values), held.part_mib
        return held._replace(reservation=reservation)

    def _sign(self, held: Held) -> None:
        """Write into the locks who holds them."""
        visible = environment.variables(held.devices)[environment.VISIBLE]
        record = Record(
            myself(),
            held.promise,
            visible=visible,
            overdue=held.overdue,
            kept_until=held.kept_until,
        )
        joined = held.guest.of if held.guest else [None] * len(held.devices)
        for device, since in zip(held.devices, joined, strict=True):
            lock = held.locks[device.uuid]
            own = record._replace(label=device.label, index=device.index, guest_of=since)
            lock.write(own)

    # -- the same again ----------------------------------------------------------------------------

    def _prolong(self, held: Held, lease: Lease) -> Held:
        """Hold what is held by this lease too, if it says anything."""
        if lease.has_end:
            lease = held.lease.changed_by(lease.begun(time.time()))
            promise = held.promise._replace(lease=lease)
            held = held._replace(promise=promise, overdue=None)
            self._become(held, renew_lease=True)
        return held

    def _again(self, held: Held, note: str | None) -> list[Notice]:
        """Answer one more call with what is held; returns what was wrong and is mended."""
        self._become(held._replace(promise=held.promise._replace(note=note)))
        if reservation := held.reservation:
            return [*self._mend_variables(reservation), *self._mend_caps(held, reservation)]
        return []

    def _mend_variables(self, reservation: Answered) -> list[Notice]:
        """Set the variables again if other code has changed them."""
        if changed := self._changed(reservation, environment.CUDA):
            environment.write({name: reservation.environ.get(name) for name in environment.CUDA})
            return [changed._replace(is_mended=True)]
        return []

    def _changed(self, reservation: Answered, variables: Sequence[str]) -> Changed | None:
        """Return what other code has made of these variables, None if they are as they were set."""
        now = environment.read(variables)
        values = {n: value for n, value in now.items() if value != reservation.environ.get(n)}
        if not values:
            return None
        seen = {*environment.cuda_uuids()}
        is_held = seen == {names.bare_uuid(device.uuid) for device in reservation.devices}
        is_late = environment.cuda_started() and not is_held
        return Changed(values, reservation.devices, is_late, is_mended=False)

    def _changed_in_cell(self, held: Held) -> list[Notice]:
        """Return what a cell has made of the variables that decide what CUDA sees, once."""
        if held.reservation is None or self._changes.written == environment.NO_DEVICES:
            return []
        change = self._changed(held.reservation, (environment.VISIBLE, environment.ORDER))
        is_news, self._told_change = change != self._told_change, change
        return [change] if change and is_news else []

    def _mend_caps(self, held: Held, reservation: Answered) -> list[Notice]:
        """Set the caps again that are gone; one that somebody has changed is theirs from now on.

        What is said to be set is what frameworks find.
        """
        if held.part_mib is None:
            return []
        inherited = self.inherited()
        limits, notices = _caps(held, inherited | environment.inherited_caps(inherited))
        said = {name: v for name, v in reservation.environ.items() if name in environment.CAPS}
        if _set_only(limits) == said and environment.read(limits) == limits:
            return []
        values = {name: reservation.environ.get(name) for name in environment.CUDA} | limits
        self._changes = self._changes.to(values)
        reservation.environ = _set_only(values)
        return notices

    @property
    def is_look_due(self) -> bool:
        """Tell whether to look, at the end of a cell, at what is on the devices."""
        is_new = self.reservation is not self._seen
        is_due = is_new or self.part_mib is not None or time.monotonic() >= self._look_at
        return bool(self.devices) and is_due

    def see(self, listed: Mapping[Device, list[Process]], took_s: float) -> list[Notice]:
        """Take in what is on the devices; returns which part is exceeded now, and who has come.

        took_s: for so long the look has taken, so that a slow driver is not asked after each cell.
        """
        self._look_at = time.monotonic() + (took_s * waiters.PATIENCE if took_s > QUICK_S else 0.0)
        held = self._held or NOTHING  # another thread may release it
        is_new, self._seen = self._seen is not held.reservation, held.reservation
        if held.part_mib is None:
            strangers = waiters.strangers(listed, self._told)
            return [] if is_new else strangers  # of those who were there it was told
        pid = os.getpid()
        uses = {device: proc.uses(those, {pid})[pid] for device, those in listed.items()}
        self._over, notices = caps.exceeded(held, self._changes.written, uses, self._over)
        return notices

    # -- the lease ---------------------------------------------------------------------------------

    @property
    def timer(self) -> lease_timer.LeaseTimer:
        """Return what follows the lease of what is held."""
        if self._timer:
            return self._timer
        calls.load(lease_timer)
        display = self.make_display()
        with no_fork:  # and no other thread makes one, too
            self._timer = self._timer or lease_timer.LeaseTimer(self, display)
        return self._timer

    def notices(self) -> list[Notice]:
        """Return what a cell that begins has to tell of the lease, mostly nothing."""
        own, self._notices = self._notices, []
        return [*own, *(self._timer.take_notices() if self._timer else [])]

    def show_lease(self) -> None:
        """Show a cell until when it has what it has reserved, if that ends."""
        if self.lease.has_end:
            self.timer.display.show_in_cell()

    # -- the history -------------------------------------------------------------------------------

    def log(self) -> float | None:
        """Write what has changed, or is used, into the history; returns the seconds until the next.

        Between two calls: the home of a user may hang, and nobody may have the mutex then.
        """
        changes, self._changes_to_log = self._changes_to_log, []
        if changes and self._journal is None and settings.may_keep_history():
            self._journal = journal.Journal()
            journal.at_exit(partial(self.run_within, journal.EXIT_LIMIT_S, self._end_journal))
        if self._journal is None:
            return None
        for change in changes:
            self._journal.follow(change)
        pause_s, is_used = self._journal.step()
        if self._timer and is_used is not None:
            self._timer.add_use(is_used=is_used)
        return pause_s

    def _end_journal(self) -> None:
        self.log()
        if self._journal:
            self._journal.end(End.EXIT)

    # -- a guest -----------------------------------------------------------------------------------

    def join(self, reserved: Reserved) -> None:
        """Hold, as a guest, what another process of this user has reserved.

        Raises RequestError where that has released it by now, and LockError.
        """
        with LockDirectory() as directory, directory.mutex():
            self._become(guests.joined(reserved, directory), renew_lease=True)

    def _follow_holder(self) -> None:
        """Hold what a guest has joined for longer, where its holder has prolonged it."""
        held = self.held
        if held and held.guest and held.lease.until is not None and held.overdue is None:
            with suppress(LockError), LockDirectory() as locks, locks.mutex(RENEW_LIMIT_S):
                if longer := guests.prolonged(held, locks):
                    self._become(longer, renew_lease=True)

    # -- asked from elsewhere ----------------------------------------------------------------------

    def _listen(self, *, is_wanted: bool) -> None:
        """Hear what is asked from elsewhere, as long as anything is held here in IPython."""
        if self._listener and not is_wanted:
            self._listener.stop()
            self._listener = None
        elif is_wanted and not self._listener:
            calls.load(lease_timer)  # which an answer needs, when no thread may import
            self._listener = elsewhere.Listener(self._answer)
            self._listener.start()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what this user, or root, asks for from elsewhere; returns the answer."""
        return {"answer": self.run(self._obey, request).name}

    def _obey(self, request: dict[str, Any]) -> Answer:
        held = self.held
        if time.time() > request["until"] or request["do"] not in ("release", "end"):
            return Answer.SILENT  # it was told so by now; or a newer version asks for something
        if held is None or not {d.uuid for d in held.devices} & {*request["devices"]}:
            return Answer.GONE
        if request.get("notebook") not in (None, this_process.notebook()):
            return Answer.ANOTHER  # somebody has written another name into the lock file
        if request["do"] == "end":
            self.timer.process_end.begin(lambda: True, self._notices.append, lambda: None)
            return Answer.ENDED
        if environment.cuda_started():
            return Answer.CUDA
        with cells().quiet:
            self.hide()
        has_cuda, has_child = lease_timer.use_of_hidden(held)
        if has_cuda or has_child:
            self._become(held)
            return Answer.CUDA if has_cuda else Answer.CHILD
        self.let_go(End.ASKED)
        self._notices.append(ReleasedBy(held.devices, request["by"], time.time()))
        return Answer.RELEASED

    # -- over a restart of the kernel --------------------------------------------------------------

    def leave_to_restart(self, connection_file: str, seconds: float) -> None:
        """Leave what is held to the next kernel with that connection file, for so long.

        What is overdue is not left. Raises OSError, LockError.
        """
        held = self.held
        if held is None or held.overdue is not None or self._is_left():
            return
        until = min(time.time() + seconds, held.lease.until or inf)
        restart.leave(held, connection_file, until)
        self._become(held._replace(kept_until=until))

    def take_over(self, connection_file: str) -> restart.Left | None:
        """Hold what the kernel before this one has left; returns it, None if there is nothing.

        Raises LockError.
        """
        if self._held or self._has_taken_over:
            return None
        for left in restart.all_left(connection_file):
            with LockDirectory() as directory:
                if left.directory != directory.path or environment.cuda_started():
                    continue
                with directory.mutex():
                    if held := restart.take_over(left, directory):
                        self._become(held, renew_lease=True)
                        self._is_back = True
                        return left
        self._has_taken_over = True
        return None

    # -- over exec ---------------------------------------------------------------------------------

    def leave_to_next_program(self, reason: str | None, *, is_kernel: bool) -> None:
        """Leave all of it to the program that this process becomes with its next exec.

        is_kernel: that program loads this package, and logs by itself what it uses.
        """
        held = self._held or NOTHING
        self.log()
        is_logged = bool(self._journal and self._journal.leave(is_kernel=is_kernel))
        handover.offer(handover.Handover(self._changes, held, reason, is_logged))

    def adopt(self) -> None:
        """Take over, once, what this process held before exec made it this program."""
        if not self._has_adopted and proc.held_by() == os.getpid():
            self.run(self._adopt)
        self._has_adopted = True

    def _adopt(self) -> None:
        if self._has_adopted:
            return
        self._has_adopted = True
        given = handover.received()
        if given is None:
            return
        self.reason, self._changes = given.reason, given.changes
        if (held := given.held).devices:
            environ = _set_only(given.changes.written)
            reservation = Reservation(held.devices, environ, held.part_mib)
            held = held._replace(reservation=reservation, is_logged_elsewhere=given.is_logged)
            self._become(held, is_adopted=True)


# By process id; an entry of another process is its parent's.
_sessions: dict[int, Session] = calls.survive_reload("sessions", dict)


def session(make_display: Callable[[], LeaseDisplay] | None = None) -> Session:
    """Return the session of this very process; make_display: as it has it from now on."""
    pid = os.getpid()
    own = _sessions.get(pid) or _sessions.setdefault(pid, Session())  # one for all threads
    own.make_display = make_display or own.make_display
    own.adopt()
    return own


def _is_met(held: Held, request: Request) -> bool:
    """Tell whether what is held is just what is asked for."""
    kept = policy.kept(held.devices, request)
    part_mib = request.on(held.devices).part_mib
    return tuple(kept or ()) == held.devices and held.part_mib == part_mib


def _caps(held: Held, inherited: Variables) -> tuple[dict[str, str], list[Notice]]:
    """Return the caps to set for what is held, and what to tell of them."""
    if held.part_mib is None:
        return {}, []
    values = caps.marked(held.devices, held.part_mib, inherited)
    is_late = environment.cuda_started()
    return values, caps.notices(held.devices, held.part_mib, inherited, values, is_late=is_late)


def _set_only(values: Variables) -> dict[str, str]:
    """Return those that are set, for people; not what only processes below read."""
    return {n: v for n, v in values.items() if v is not None and n != environment.OWN_CAPS}
