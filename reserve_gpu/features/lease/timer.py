"""Watch this process's lease, warn the user before it ends, and end the reservation.

Leases use three clocks. A time (`--until 18:00`) refers to the wall clock. A duration (`--for 4h`)
is measured by the boot clock, which can't be set and keeps running while the machine is suspended
(see `Lease.at`). Idle time is measured by the monotonic clock, which stops during suspension.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from reserve_gpu.allocation import quota
from reserve_gpu.allocation.request import rules
from reserve_gpu.features.lease import lease_line, schedule
from reserve_gpu.features.lease.lease_notices import JOB_OVER, OVER, Action, LeaseNotice
from reserve_gpu.features.lease.schedule import Circumstances, Step
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks import queue
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.errors import LockError
from reserve_gpu.reservation import activity, joining
from reserve_gpu.reservation.feature import Feature, Owner
from reserve_gpu.system import procfs, shutdown
from reserve_gpu.system.ipython_shell import current_shell
from reserve_gpu.system.jupyter_kernel import cells
from reserve_gpu.system.warning_log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import Lease
    from reserve_gpu.reservation.holding import Change, Holding

LOOKS = 12  # number of GPU-use checks per idle limit
LONGEST_LOOK_S = 300.0  # maximum seconds between GPU-use checks
MUTEX_LIMIT_S = 0.5  # timeout for acquiring the mutex, in seconds
RETRY_S = 60.0  # seconds before retrying a failed check


class LeaseTimer(Feature):
    """Watches the current reservation's lease, if it has an end.

    Attributes:
        display: The line that shows the lease's state to the user.
    """

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self.display = lease_line.LeaseLine()
        self._held: Holding | None = None  # the reservation whose lease is watched
        # The last action, whether the idle limit caused it, and the lease's end time.
        self._done: tuple[Action, bool, float | None] | None = None
        self._began = self._looked_at = procfs.now()
        self._used = self._next_look = time.monotonic()
        self._heartbeats: dict[str, int] = {}  # the first heartbeat seen from each waiter

    @property
    def _action(self) -> Action | None:
        return self._done[0] if self._done else None

    # -- watching the lease ------------------------------------------------------------------------

    def changed(self, change: Change) -> None:
        """Watch the lease of the current reservation, if it has an end."""
        held = change.held
        has_end = held and held.lease.at(procfs.now()).has_end
        before, self._held = self._held, held if has_end else None
        if _is_same(before, self._held) and not change.renew_lease:
            return
        is_ending = self._action is Action.RELEASE and not held  # this action has its own message
        if not _share_devices(before, self._held) and not is_ending:
            text = JOB_OVER if _share_devices(before, held) else OVER[held is not None]
            self.display.close(text if before else "")
        self._done = None
        with suppress(ValueError):
            cells().listeners.remove(self.owner.wake)
        if self._held:
            _watch_cells()
            cells().listeners.append(self.owner.wake)
            self._began = self._looked_at = procfs.now()
            self._used = self._next_look = time.monotonic()
            self._show(self._held, Action.LASTS, self._began.wall)

    def step(self) -> float | None:
        """Check the lease and act on it.

        Returns:
            The seconds until the next check, or None if there is no further check.
        """
        try:
            self._follow_holder()
            return self._step()
        except Exception as error:  # noqa: BLE001 - the error is logged, and the step is retried
            warn("A reservation could not be ended.", error)
            self._done = None
            return RETRY_S

    def _follow_holder(self) -> None:
        """In a joined process, extend the lease if the holder has extended its own lease."""
        held = self.owner.held
        if held and held.joined and held.lease.until is not None and held.overdue is None:
            with suppress(LockError):
                if longer := joining.prolonged(held):
                    self.owner.set_holding(longer, renew_lease=True)

    def _step(self) -> float | None:
        held = self.owner.held
        if held is None or self._held is None or self._action in schedule.FINAL:
            return None
        lease = held.lease.at(procfs.now())
        if lease.is_jobs is not held.lease.is_jobs:  # the job has outlasted its announced end
            self.owner.set_holding(held._replace(terms=held.terms._replace(lease=lease)))
            return 0.0
        self._look_at_use(held)
        is_over = schedule.is_over(held.lease, self._see())
        is_wanted = is_over and held.lease.if_wanted and self._is_wanted(held.devices)
        has_child = is_over and activity.by_child(held)
        with cells().quiet:
            seen = self._see()
            if schedule.is_over(held.lease, seen) and not is_over:
                # The lease has just ended, so the checks above must be repeated.
                return 0.0
            if is_over:
                has_cuda = cuda_environment.cuda_started()
                seen = seen._replace(is_wanted=is_wanted, has_cuda=has_cuda, has_child=has_child)
            due = self._do_once(held, self._due(held, seen))
        if due.action is Action.RELEASE:
            due = self._release_hidden(held, due, seen)
        if due.pause_s is None or held.lease.idle_s is None:
            return due.pause_s
        return min(due.pause_s, max(0.0, self._next_look - time.monotonic()))

    def _release_hidden(self, held: Holding, due: Step, seen: Circumstances) -> Step:
        """Release the hidden devices, unless this process or a child process is using them.

        Returns:
            The step that was taken.
        """
        has_cuda, has_child = activity.of_hidden(held)
        seen = seen._replace(has_cuda=has_cuda, has_child=has_child)
        if seen.has_cuda or seen.has_child:
            seen = seen._replace(is_running=False, is_wanted=True)
            return self._do_once(held, self._due(held, seen))
        self.owner.release_and_hide()
        return due

    def _do_once(self, held: Holding, due: Step) -> Step:
        """Take a step unless it is the same as the previous one, and return the step."""
        action, at, _ = due
        lease = held.lease.at(procfs.now())
        current = action, lease.is_by_idleness(at), lease.until
        if current == self._done:
            return due
        self._done = current
        if action is Action.RELEASE:
            self.owner.hide()
        elif action in (Action.MARK_OVERDUE, Action.LEAVE_TO_CHILD, Action.END_PROCESS):
            # The devices are in use, so make them visible again if they were hidden.
            self.owner.set_holding(held._replace(overdue=at))
        self._show(held, action, at)
        if action is Action.END_PROCESS:
            cancelled = partial(self.owner.run, self._watch_again, held.lease)
            shutdown.process_end().begin(self.is_to_end(held), self.display.log, cancelled)
        return due

    def _show(self, held: Holding, action: Action, at: float) -> None:
        self.display.show(self.notice(held, action, at))

    @staticmethod
    def notice(held: Holding, action: Action, at: float) -> LeaseNotice:
        """Return the notice about a lease's state under the current rules.

        Args:
            held: The reservation.
            action: The action that follows from the lease's state.
            at: The time at which the lease ends, in seconds since the epoch.
        """
        now, active_rules = procfs.now(), rules()
        return LeaseNotice(
            action,
            held.devices,
            held.lease.at(now),
            at,
            procfs.children() if action is Action.RELEASE else (),
            held.joined is not None,
            held.terms.size,
            quota.left_s(active_rules, held.since, now) if active_rules else inf,
            active_rules.time if active_rules else None,
        )

    def show(self) -> None:
        """Show the lease's state in the current cell, if the lease has an end."""
        if self._held:
            self.display.show_in_cell()

    def cell_begins(self) -> list[str]:
        """Return the notices for the next cell. An overdue notice is repeated in every cell."""
        held = self.owner.held
        if held and held.overdue is not None:
            # Compute the end time again, because the wall clock might have been changed.
            end = (
                None
                if held.lease.is_by_idleness(held.overdue)
                else held.lease.at(procfs.now()).until
            )
            self._show(held, Action.MARK_OVERDUE, held.overdue if end is None else end)
        return self.display.take_notices()

    def _watch_again(self, lease: Lease) -> None:
        """Enforce an unchanged lease again if the end of this process was canceled."""
        if self._held and self._held.lease == lease:
            self._done = None

    # -- reading the current state -----------------------------------------------------------------

    def _see(self) -> Circumstances:
        wall, boot = procfs.now()
        return Circumstances(wall, self._idle_s(), cells().is_running, boot=boot)

    def _due(self, held: Holding, seen: Circumstances) -> Step:
        return schedule.step(held.lease, self._began.at(seen.instant).wall, seen)

    def _idle_s(self) -> float:
        """Return the seconds since the last cell run or device use, whichever is later."""
        if cells().is_running:
            self._used = time.monotonic()
        elif cells().shell:
            self._used = max(self._used, cells().last)
        return time.monotonic() - self._used

    def _look_at_use(self, held: Holding) -> None:
        """If a check is due, check whether the reservation's processes have used a device."""
        now, idle_s = time.monotonic(), held.lease.idle_s
        look = self.owner.last_look
        # Another feature might have checked more recently.
        if idle_s is not None and look and look.now.boot > self._looked_at.boot:
            self._looked_at, self._next_look = look.now, look.at + self._pause_s(idle_s)
            self._used = look.at if look.is_used else self._used
        if idle_s is None or now < self._next_look:
            return
        self._next_look = now + self._pause_s(idle_s)
        since, self._looked_at = self._looked_at, procfs.now()
        if activity.is_used(held, since):
            self._used = time.monotonic()  # not `now`, because the check might be slow

    @staticmethod
    def _pause_s(idle_s: float) -> float:
        return min(LONGEST_LOOK_S, idle_s / LOOKS)

    def _is_wanted(self, devices: Sequence[Device]) -> bool:
        """Return whether another process is waiting and could use one of the devices.

        A waiter whose heartbeat has not changed might be stopped, and is ignored.
        """
        heartbeats = waiters_for(devices)
        known = self._heartbeats
        self._heartbeats = {name: known.get(name, first) for name, first in heartbeats.items()}
        return self._heartbeats != heartbeats

    def is_to_end(self, held: Holding) -> Callable[[], bool]:
        """Return a function that checks whether this process still has to be terminated.

        Any thread can call the returned function.

        Args:
            held: The reservation whose lease has ended.
        """
        began = time.monotonic()

        def is_to_end() -> bool:
            current = self.owner.held
            if current is None:
                # A before_end() function released the devices, but their memory is still in use.
                return not cells().is_running and cells().last < began
            seen = self._see()
            is_put_off = seen.is_running and not held.lease.is_strict
            is_over = schedule.is_over(held.lease, seen)
            return current.lease == held.lease and is_over and not is_put_off

        return is_to_end


def _watch_cells() -> None:
    """Load this package's extension into the IPython shell, if there is one."""
    with suppress(Exception):  # the shell might not be IPython's own
        shell = current_shell()
        if shell and not cells().shell:
            shell.extension_manager.load_extension("reserve_gpu")


def _is_same(before: Holding | None, held: Holding | None) -> bool:
    """Return whether two reservations have the same lease and devices."""
    return bool(
        before and held and (*before.locks,) == (*held.locks,) and before.lease == held.lease
    )


def _share_devices(before: Holding | None, held: Holding | None) -> bool:
    """Return whether two reservations have at least one device in common."""
    return bool(before and held and {*before.locks} & {*held.locks})


def waiters_for(devices: Sequence[Device]) -> dict[str, int]:
    """Return the latest heartbeat of each other process that is waiting and could use a device.

    Args:
        devices: The held devices.

    Returns:
        The heartbeats, keyed by ticket name. Empty if the lock directory can't be used.
    """
    with suppress(LockError), LockDirectory() as directory, directory.mutex(MUTEX_LIMIT_S):
        tickets = queue.other_tickets(directory.tickets(), devices)
        return {ticket.name: ticket.heartbeat for ticket in tickets}
    return {}
