"""A process's session: its reservation and its changes to the environment variables.

Each process has one session. All changes run on the session's own thread (see system/executor.py),
so a signal handler can neither see an incomplete change nor leave one behind. A forked child starts
with an empty session, because its copies of the parent's lock descriptors are closed. After an
exec, the new program takes over the reservation that the old program handed over.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation import policy
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks.directory import BRIEF_LIMIT_S, MUTEX_LIMIT_S, LockDirectory
from reserve_gpu.locks.lock import describe_this_process
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

# At the end of a cell, the lock files' records are rewritten if they are older than this many
# seconds, because other users might be able to write to the lock files.
SIGN_S = 5.0


class Reservation:
    """The devices that this process holds, as a context manager that releases them on exit.

    Attributes:
        devices: The devices, in the order in which CUDA numbers them in this process.
        environ: The environment variables that are set for the devices.
        memory_mib: The memory reserved on each device, in MiB; None if whole devices are reserved.
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
        # The number of reserve() calls outside `with` blocks, and the thread id of each active
        # `with` block. Only the session's thread changes these two attributes.
        self._calls = 0
        self._threads: list[int] = []

    @property
    def is_inside(self) -> bool:
        """Return whether a `with` block of this reservation is active."""
        return bool(self._threads)

    @property
    def is_over(self) -> bool:
        """Return whether no `with` block is active and no other caller is using the reservation."""
        return not (self._threads or self._calls)

    def count_call(self, thread: int) -> None:
        """Count a call to reserve(), unless the calling thread is inside a `with` block."""
        if thread not in self._threads:
            self._calls += 1

    def enter(self, thread: int) -> None:
        """Count a `with` block in place of the reserve() call that started it."""
        self._threads.append(thread)
        self._calls = max(0, self._calls - 1)

    def leave(self, thread: int) -> None:
        """Stop counting a `with` block, even if a different thread entered it."""
        self._threads.remove(thread if thread in self._threads else self._threads[-1])

    def replace(self, other: Reservation) -> None:
        """Take over the callers of another reservation that this reservation replaces."""
        self._calls += other._calls
        self._threads += other._threads

    @property
    def note(self) -> str | None:
        """Return the note that other users see next to the devices."""
        return session().terms_of(self).note

    @property
    def lease(self) -> Lease:
        """Return this reservation's lease, which has no end if the devices are no longer held."""
        return session().terms_of(self).lease.at(procfs.now())

    def release(self) -> None:
        """Release the devices and restore the previous values of the environment variables."""
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
    """The state before a request, which `Session.roll_back` uses to undo the request.

    Attributes:
        reservation: The reservation before the request, or None.
        waits: Whether the request is allowed to wait in the queue.
    """

    def __init__(self, reservation: Reservation | None, *, waits: bool) -> None:
        self.reservation, self.waits = reservation, waits


class Session(Executor):
    """This process's reservation, and the methods that can change it.

    Properties may be read on any thread. Methods that change anything must be called through `run`.

    Attributes:
        variables: The environment variables that this process has changed.
        reason: Why the program before the last exec did not hand over any devices, or None.
        is_waiting: Whether a call is waiting in the queue for a device.
        has_place: Whether the latest request left the queue and can return to its position.
        features: The active features by name, in the order of FEATURES.
        last_look: The latest check, by any feature, of whether the held devices are in use.
        unsigned: The devices whose lock files could not be written, each with the lock directory
            and the reason.
        has_adopted: Whether the session has checked for a reservation from before an exec.
    """

    def __init__(self) -> None:
        super().__init__(self._step)
        self.variables = OurVariables()
        self.reason: str | None = None
        self.is_waiting = self.has_place = False
        self.last_look: UseLook | None = None
        self._held: Holding | None = None
        self._reservation: Reservation | None = None  # the `Reservation` object for `_held`
        self.features: Mapping[str, Feature] = {}  # replaced, never changed in place
        # The classes of the features that every reservation of this process needs, by name.
        self._required_features: dict[str, type[Feature]] = {}
        # The notebook's name in the lock files' records, and the time, by time.monotonic(), after
        # which the records are rewritten when a cell ends.
        self._signed: tuple[str | None, float] = (None, 0.0)
        self.unsigned: list[tuple[Device, str, str]] = []
        self._addresses: tuple[str, ...] | None = None  # the GPUs' PCI addresses at the last check
        self.has_adopted = False
        cuda_environment.remember_over_fork()

    @property
    def is_nested(self) -> bool:
        """Return whether the caller is a signal handler that interrupted a call or a cell start."""
        return super().is_nested or executor.is_lock_held(cells().quiet)

    def load(self, terms: ReservationTerms | None = None) -> None:
        """Import the modules that a reservation needs, on the caller's thread.

        Args:
            terms: The terms of the request; None if they are not known yet.
        """
        self._required_features = feature.load_for_reserving(terms)

    def features_for(self, terms: ReservationTerms) -> Collection[Feature]:
        """Activate the features that these terms need, and return all active features."""
        features: dict[str, Feature] = {}
        for row in FEATURES:
            if row.name in self.features:
                features[row.name] = self.features[row.name]
            elif required := self._required_features.get(row.name):
                features[row.name] = required(self)
            elif row.is_wanted_for(terms):
                features[row.name] = row.load()(self)
        self.features = features
        return features.values()

    def _step(self) -> float | None:
        pauses = [each.step() for each in self.features.values()]
        return min((pause_s for pause_s in pauses if pause_s is not None), default=None)

    # -- the current reservation -------------------------------------------------------------------

    @property
    def held(self) -> Holding | None:
        """Return the current reservation, or None if nothing is held or a lock was lost."""
        held = self._held
        return held if held and held.is_intact else None

    @property
    def holding(self) -> Holding:
        """Return the current reservation, or an empty reservation if nothing is held."""
        return self.held or NOTHING

    @property
    def reservation(self) -> Reservation | None:
        """Return the current `Reservation` object, or None if nothing is held."""
        return self._reservation if self.held else None

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the environment variables that are set for the held devices."""
        return self.variables.environ

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the held devices."""
        return self.holding.devices

    def terms_of(self, reservation: Reservation) -> ReservationTerms:
        """Return a reservation's terms, or default terms if the reservation is no longer held."""
        held = self._held
        return held.terms if held and self._reservation is reservation else ReservationTerms()

    # -- changes to the reservation ----------------------------------------------------------------

    def satisfy_from_current(self, request: Request) -> list[str] | None:
        """Satisfy a request with the devices that are already held.

        If the request is for fewer devices than are held, the rest are released, unless CUDA has
        started or a `with` block is active.

        Args:
            request: The request.

        Returns:
            Notices for the user, or None if the held devices don't satisfy the request.

        Raises:
            RequestError: This process has joined a reservation that the request doesn't match.
            LockError: The lock directory can't be used.
        """
        held = self.held
        if held and held.joined and joining.has_lost_holder(held):
            held = None  # without the holder, this process makes its own reservation
        is_longer = request.terms.lease.has_end  # a joined process can't extend its holder's lease
        if held and held.joined and (is_longer or not _matches(held, request)):
            raise notice.has_joined(held.devices, held.joined.name)
        devices = held and policy.matching_held(held.devices, request)
        if not (held and devices):
            return None
        request = request.on(devices)
        if not policy.is_enough(held.terms.memory_limit_mib, request.terms.memory_limit_mib):
            return None
        rest = [device for device in held.devices if device not in devices]
        is_same = tuple(devices) == held.devices
        is_late = not is_same and cuda_environment.cuda_started()
        if is_late and not rest:  # CUDA can no longer reorder its devices
            return None
        held = self._prolong(held, request.terms.lease)
        is_inside = self._reservation is not None and self._reservation.is_inside
        note = held.terms.note if request.terms.note is None else request.terms.note
        if is_inside and request.terms.memory_limit_mib != held.terms.memory_limit_mib:
            return [*self._repeat_answer(held, note), notice.PART_STAYS]
        if rest and (is_late or is_inside):
            return [*self._repeat_answer(held, note), notice.devices_stay(rest, is_late=is_late)]
        if is_same and held.terms.memory_limit_mib == request.terms.memory_limit_mib:
            return self._repeat_answer(held, note)
        locks = {device.uuid: held.locks[device.uuid] for device in devices}
        changed = held._replace(devices=tuple(devices), locks=locks, is_back=False)
        changed = changed._replace(terms=changed.terms._replace(size=request.terms.size, note=note))
        previous = self._reservation
        self.set_holding(changed if changed.is_another_part_of(held) else changed.with_new_number())
        if previous and self._reservation and self._reservation is not previous:
            self._reservation.replace(previous)
        return self.variables.notices

    def hold(self, granted: Granted, request: Request) -> None:
        """Replace the current reservation with the granted devices, or keep it if that fails."""
        devices = tuple(locked.device for locked in granted.locked)
        locks = {locked.device.uuid: locked.lock for locked in granted.locked}
        were_idle = all(locked.row.use_state is State.IDLE for locked in granted.locked)
        terms = request.terms._replace(lease=granted.lease)
        held = Holding(devices, locks, terms, were_idle=were_idle).with_new_number()
        before = self.held
        if before and held.is_another_part_of(before):  # callers hold this object, so update it
            # A rule limits a new reservation's lease, but not the lease of a part that is resized.
            lease = granted.lease if request.terms.lease.has_end else NO_LEASE
            terms = before.terms.changed_by(held.terms._replace(lease=lease))
            held = before._replace(locks=locks, terms=terms, overdue=None, is_back=False)
        previous, reservation = self._held, self._reservation
        try:
            self.set_holding(held, renew_lease=True, how=End.CHANGED)
        except BaseException:  # the caller releases the granted locks
            self.set_holding(previous)
            self._reservation = reservation
            self._update_reservation()
            raise

    def release(self, reservation: Reservation | None = None) -> tuple[Device, ...]:
        """Release a reservation, if it is the current one, and return its devices.

        Args:
            reservation: The reservation to release; None for whichever reservation is current.
        """
        if reservation not in (None, self._reservation):
            return ()
        devices = self.devices
        self.set_holding(None)
        return devices

    def roll_back(self, savepoint: Savepoint | None) -> None:
        """Release a reservation that was made after the savepoint but never reached the caller."""
        if savepoint is None:
            return
        if self.reservation is not savepoint.reservation:
            self.forget(self.reservation)
        if savepoint.reservation or savepoint.waits:
            self.hide_if_unreserved()

    def forget(self, reservation: Reservation | None) -> None:
        """Release a reservation that never reached a caller.

        If CUDA has started, the devices stay reserved, because their memory is freed only when the
        process exits.
        """
        if reservation and not cuda_environment.cuda_started():
            self.release(reservation)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the session as waiting, so that calls on other threads don't wait as well."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def hide_if_unreserved(self) -> None:
        """Hide all GPUs from this process if it holds none, so that it can't use one by mistake."""
        if not self.held:
            self.release_and_hide()

    def release_and_hide(self, how: End = End.OVER) -> None:
        """Release the held devices, and hide all devices from this process."""
        self.set_holding(None, is_hidden=True, how=how)

    def hide(self) -> None:
        """Hide all devices from this process, but keep them reserved."""
        self.variables.hide()

    def enter(self, reservation: Reservation) -> None:
        """Enter a `with` block.

        Raises:
            RequestError: The reservation has ended.
        """
        if self.reservation is not reservation:
            raise RequestError(notice.ALREADY_RELEASED)
        reservation.enter(executor.caller())

    def leave(self, reservation: Reservation) -> None:
        """Leave a `with` block, and end the reservation if no other caller is using it."""
        if self._reservation is not reservation or not reservation.is_inside:
            return
        reservation.leave(executor.caller())
        if reservation.is_over:
            self.set_holding(None)

    def renew(self, limit_s: float = MUTEX_LIMIT_S) -> list[str]:
        """Relock devices whose locks no longer keep other processes out.

        A lock no longer does so if other code in this process has closed the lock's descriptor, or
        if the lock file has been deleted. In the latter case, other processes lock a new file.

        Args:
            limit_s: The timeout for the mutex in seconds.

        Returns:
            A notice for each device that was locked again.

        Raises:
            LockError: The lock directory can't be used, or another process has locked a device.
        """
        held = self._held
        if held is None or not (devices := held.unprotected()):
            return []
        notices: list[str] = []
        with LockDirectory() as directory, directory.mutex(limit_s):
            for device in devices:
                held, text = held.relocked(device, directory)
                self.set_holding(held)
                notices.append(text)
        return notices

    def begin_cell(self) -> list[str]:
        """Update the held devices' numbers before a cell that might start CUDA.

        Returns:
            Notices about devices that have a new number or were lost.

        Raises:
            NoThreadError: The process can't start a thread.
        """
        if self._held is None or self.is_busy or cuda_environment.cuda_started():
            return []
        addresses = refresh.pci_addresses()
        if addresses is not None and addresses == self._addresses:
            return []
        self._addresses = addresses
        return [*self.run(refresh.refresh, self).changes]  # %reserve_gpu reports the faults

    def end_cell(self) -> list[str]:
        """Record the end of a cell in the lock files, and return notices for the user."""
        held = self._held
        if held is None or self.is_busy:
            return []
        notebook, sign_at = self._signed
        is_signed = time.monotonic() < sign_at and notebook == process_identity.notebook()
        are_set = is_signed and self.variables.are_as_set()
        if are_set and not held.joined and not held.unprotected():
            for lock in held.locks.values():
                lock.stamp()
            return []
        with suppress(NoThreadError):  # retried at the end of the next cell
            return self.run(self._end_cell)
        return []

    def _end_cell(self) -> list[str]:
        notices: list[str] = []
        try:
            notices = self.renew(BRIEF_LIMIT_S)
            held = self.held
            if held and held.joined and joining.has_lost_holder(held):
                notices.append(notice.holder_released(held.devices, held.joined.name))
        except LockError as error:
            notices = [str(error)]
        if self._held:
            notices += self.variables.changed_in_cell(self._held.devices)
            # Write the records again: VS Code names the notebook only after the kernel has started.
            self.set_holding(self._held)
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
        """Replace the reservation. All changes to the reservation go through this method.

        The environment variables change before any lock is released. So a program that starts in
        between can't see a GPU that another process could already reserve.

        Args:
            held: The new reservation; None for no reservation.
            is_hidden: Whether to hide all devices if `held` is None, instead of restoring the
                variables' previous values.
            renew_lease: Whether the lease starts again, even if it is unchanged.
            is_adopted: Whether the variables were already set before an exec.
            how: How the previous reservation ended, for the history.
        """
        before = self._held
        features: Collection[Feature] = self.features.values()
        if held:
            lease = held.lease
            features = self.features_for(held.terms)
            for feature in features:
                lease = feature.limited(lease)
            if lease != held.lease:
                held = held._replace(terms=held.terms._replace(lease=lease))
                features = self.features_for(held.terms)
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
        current_locks = list(held.locks.values()) if held else []
        for lock in before.locks.values() if before else ():
            if lock not in current_locks:
                lock.release_device(was_held=True)

    def _is_set_for(self, held: Holding) -> bool:
        """Return whether the variables are already set for this reservation and its devices."""
        before = self._held
        if before is None or self.variables.are_hidden:
            return False
        return (before.number, before.devices, before.terms.memory_limit_mib) == (
            held.number,
            held.devices,
            held.terms.memory_limit_mib,
        )

    def _reservation_of(self, held: Holding | None) -> Reservation | None:
        """Return the `Reservation` object for these devices, creating one for a new reservation."""
        before = self._held
        if held is None or (before and before.number == held.number):
            return held and self._reservation
        reservation = Reservation((), {})
        if not held.number:  # `with` blocks must not end a joined or adopted reservation
            reservation.count_call(executor.caller())
        return reservation

    def _update_reservation(self) -> None:
        """Update the `Reservation` object with the current devices, variables and memory size."""
        if self._held and self._reservation:
            self._reservation.devices = self._held.devices
            self._reservation.environ = self.variables.environ
            self._reservation.memory_mib = self._held.terms.memory_limit_mib

    def _sign(self, held: Holding) -> None:
        """Write the lock files' records, which describe this process and the reservation."""
        visible = cuda_environment.variables(held.devices)[cuda_environment.VISIBLE]
        process = describe_this_process()
        self._signed = process.notebook, time.monotonic() + SIGN_S
        record = Record(
            process,
            held.terms,
            visible=visible,
            overdue=held.overdue,
            kept_until=held.kept_until,
        )
        joined = held.joined.of if held.joined else [None] * len(held.devices)
        self.unsigned = []
        for device, since in zip(held.devices, joined, strict=True):
            lock = held.locks[device.uuid]
            device_record = record._replace(label=device.label, index=device.index, guest_of=since)
            if reason := lock.write(device_record):
                self.unsigned.append((device, os.path.dirname(lock.path), reason))

    # -- repeated requests -------------------------------------------------------------------------

    def _prolong(self, held: Holding, lease: Lease) -> Holding:
        """Apply a requested lease to the current reservation, if the lease has an end."""
        if lease.has_end:
            lease = held.lease.changed_by(lease.begun(procfs.now()))
            terms = held.terms._replace(lease=lease)
            held = held._replace(terms=terms, overdue=None)
            self.set_holding(held, renew_lease=True)
        return held

    def _repeat_answer(self, held: Holding, note: str | None) -> list[str]:
        """Satisfy a repeated request with the current reservation, and restore its variables.

        Args:
            held: The current reservation.
            note: The note for other users.

        Returns:
            Notices about the restored variables.
        """
        self.set_holding(held._replace(terms=held.terms._replace(note=note)))
        notices = self.variables.restore(held)
        self._update_reservation()
        return notices

    # -- joining -----------------------------------------------------------------------------------

    def join(self, reserved: Reserved) -> None:
        """Join the reservation of another process of this user.

        Args:
            reserved: The other process's reservation.

        Raises:
            RequestError: The other process has released the devices, or its lease has expired.
            LockError: The lock directory can't be used.
        """
        with LockDirectory() as directory, directory.mutex():
            self.set_holding(joining.joined(reserved, directory), renew_lease=True)

    # -- handover across exec ----------------------------------------------------------------------

    def leave_as(self, how: Leaving) -> dict[str, Fact]:
        """Let each feature hand over the reservation, and return data for the next program."""
        return {name: f for each in self.features.values() for name, f in each.leaves(how).items()}

    def adopt(self) -> None:
        """Take over the reservation that this process held before its exec, if there is one."""
        if procfs.reservation_pid() == os.getpid():
            with no_fork:
                from reserve_gpu.reservation import exec_handover

            self.load()
            self.run(self._adopt, exec_handover.received)
        self.has_adopted = True

    def _adopt(self, received: Callable[[], Handover | None]) -> None:
        if self.has_adopted:
            return
        self.has_adopted = True
        handover = received()
        if handover is None:
            return
        self.reason = handover.reason
        self.variables.adopt(handover.changes)
        if handover.held.devices:
            self.set_holding(handover.held._replace(facts=handover.facts), is_adopted=True)


# Sessions by pid. A forked child inherits its parent's session, but ignores it.
_sessions: dict[int, Session] = executor.survive_reload("sessions", dict)


def session() -> Session:
    """Return this process's session, creating it on the first call.

    A new session takes over any reservation that this process held before an exec.
    """
    pid = os.getpid()
    current = _sessions.get(pid) or _sessions.setdefault(pid, Session())  # atomic across threads
    if not current.has_adopted:
        current.adopt()
    return current


def _matches(held: Holding, request: Request) -> bool:
    """Return whether the request is for exactly the held devices and the held memory size."""
    devices = policy.matching_held(held.devices, request)
    memory_limit_mib = request.on(held.devices).terms.memory_limit_mib
    return tuple(devices or ()) == held.devices and held.terms.memory_limit_mib == memory_limit_mib
