"""Follows the lease of what this process holds: warns of its end, and ends it.

Two clocks count. A moment (`--for`, `--until`) is one of the clock on the wall, which others read,
so a machine that has slept past it finds the lease over. Idleness is counted by the clock that
stands still while the machine sleeps: that night nobody has let a GPU lie idle.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from reserve_gpu import proc
from reserve_gpu.cells import cells
from reserve_gpu.core import environment, guests, schedule, use, waiters
from reserve_gpu.core.process_end import ProcessEnd
from reserve_gpu.core.schedule import Circumstances, Step
from reserve_gpu.errors import DriverError, LockError
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.notices import Action, LeaseDisplay, LeaseNotice, LeaseOver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.core.held import Held
    from reserve_gpu.model import Device, Lease

    class Owner(Protocol):
        """The session, which holds the devices."""

        @property
        def held(self) -> Held | None:
            """Return what is held now."""

        def hide(self) -> None:
            """Let what starts from now on see no device; what is held stays held."""

        def let_go(self) -> None:
            """Release it, so that this process sees no device any more."""

        def mark_overdue(self, since: float) -> None:
            """Let everybody see that it should have ended at that moment."""

        def wake(self) -> None:
            """Have the lease looked at now."""

        def run(self, function: Callable[..., object], *arguments: object) -> object:
            """Call the function on the session's thread."""


LOOKS = 12  # readings of GPU use per idle period
LONGEST_LOOK_S = 300.0
DRIVER_LIMIT_S = 5.0  # for the driver to answer such a look
MUTEX_LIMIT_S = 0.5
RETRY_S = 60.0  # until the next look after one that failed
# cuInit reads the variables at its begin, and takes up to 3 s without persistence mode
# (https://docs.nvidia.com/deploy/driver-persistence/): what has begun shows itself within that.
HIDDEN_S = 5.0
HIDDEN_POLL_S = 0.05


class LeaseTimer:
    """Follows the lease of what is held now, if that ends.

    All but `take_notices` is called on the session's thread.

    display: shows people what becomes of it.
    process_end: what is done where the process has to end.
    """

    def __init__(self, owner: Owner, display: LeaseDisplay) -> None:
        self.display = display
        self.process_end = ProcessEnd()
        self._owner = owner
        self._held: Held | None = None  # whose lease is followed
        self._done: tuple[Action, bool] | None = None  # the last act, and whether by idleness
        self._began = self._looked_at = time.time()
        self._used = self._next_look = time.monotonic()
        self._heartbeats: dict[str, int] = {}  # the first one seen of each who waits

    @property
    def _action(self) -> Action | None:
        return self._done[0] if self._done else None

    # -- what is followed --------------------------------------------------------------------------

    def follow(self, held: Held | None, *, renew_lease: bool) -> None:
        """Follow the lease of what is held now; None where nothing is held.

        renew_lease: it begins anew.
        """
        before, self._held = self._held, held if held and held.lease.has_end else None
        if _is_same(before, self._held) and not renew_lease:
            return
        is_ending = self._action is Action.RELEASE and not held  # which tells its own word
        if not _goes_on(before, self._held) and not is_ending:
            self.display.close(LeaseOver(is_replaced=held is not None) if before else None)
        self._done = None
        with suppress(ValueError):
            cells().listeners.remove(self._owner.wake)
        if self._held:
            _watch_cells()
            cells().listeners.append(self._owner.wake)
            self._began = self._looked_at = time.time()
            self._used = self._next_look = time.monotonic()
            self._show(self._held, Action.LAST, self._began)

    def step(self) -> float | None:
        """Do what is due; returns the seconds until the next look, None where nothing follows."""
        try:
            return self._step()
        except Exception:
            with suppress(Exception):  # a handler of somebody's
                log = logging.getLogger("reserve_gpu")
                log.warning("The end of a reservation failed.", exc_info=True)
            self._done = None
            return RETRY_S

    def _step(self) -> float | None:
        held = self._owner.held
        if held is None or self._held is None or self._action in schedule.FINAL:
            return None
        self._look_at_use(held)
        is_over = schedule.is_over(held.lease, self._see())
        is_wanted = is_over and held.lease.if_wanted and self._is_wanted(held.devices)
        has_child = is_over and is_used_by_child(held)
        with cells().quiet:
            seen = self._see()
            if schedule.is_over(held.lease, seen) and not is_over:  # only now
                return 0.0
            if is_over:
                has_cuda = environment.cuda_started()
                seen = seen._replace(is_wanted=is_wanted, has_cuda=has_cuda, has_child=has_child)
            due = self._do_once(held, schedule.step(held.lease, self._began, seen))
        if due.action is Action.RELEASE:
            due = self._release_hidden(held, due, seen)
        if due.pause_s is None or held.lease.idle_s is None:
            return due.pause_s
        return min(due.pause_s, max(0.0, self._next_look - time.monotonic()))

    def _release_hidden(self, held: Held, due: Step, seen: Circumstances) -> Step:
        """Release what this process does not see any more, unless it has begun to use it before.

        Returns what was done in the end.
        """
        has_cuda, has_child = use_of_hidden(held)
        seen = seen._replace(has_cuda=has_cuda, has_child=has_child)
        if seen.has_cuda or seen.has_child:
            seen = seen._replace(is_running=False, is_wanted=True)
            return self._do_once(held, schedule.step(held.lease, self._began, seen))
        self._owner.let_go()
        return due

    def _do_once(self, held: Held, due: Step) -> Step:
        """Do what has become due, if that was not done before; returns it."""
        action, at, _ = due
        act = action, held.lease.is_by_idleness(at)
        if act == self._done:
            return due
        self._done = act
        if action is Action.RELEASE:
            self._owner.hide()
        elif action in (Action.MARK_OVERDUE, Action.LEAVE_TO_CHILD, Action.END_PROCESS):
            self._owner.mark_overdue(at)
        self._show(held, action, at)
        if action is Action.END_PROCESS:
            go_on = partial(self._owner.run, self._go_on, held.lease)
            self.process_end.begin(self.is_to_end(held), self.display.show, go_on)
        return due

    def _show(self, held: Held, action: Action, at: float) -> None:
        children = proc.children() if action is Action.RELEASE else ()
        is_guest = held.guest is not None
        self.display.show(LeaseNotice(action, held.devices, held.lease, at, children, is_guest))

    def take_notices(self) -> list[str]:
        """Return what the next cell has to tell; what is overdue, again and again."""
        held = self._owner.held
        if held and held.overdue is not None:
            self._show(held, Action.MARK_OVERDUE, held.overdue)
        return self.display.take_notices()

    def _go_on(self, lease: Lease) -> None:
        """Follow that lease again, as the process goes on; not one that has taken its place."""
        if self._held and self._held.lease == lease:
            self._done = None

    def add_use(self, *, is_used: bool) -> None:
        """Take over what a look at the use of the devices has come to that was made elsewhere."""
        if self._held and self._held.lease.idle_s is not None:
            self._looked_at = time.time()
            self._next_look = time.monotonic() + self._pause_s(self._held.lease.idle_s)
            if is_used:
                self._used = time.monotonic()

    # -- what is seen ------------------------------------------------------------------------------

    def _see(self) -> Circumstances:
        return Circumstances(time.time(), self._idle_s(), cells().is_running)

    def _idle_s(self) -> float:
        """Return for how long no cell has run, and no process of this one has used a device."""
        if cells().is_running:
            self._used = time.monotonic()
        elif cells().shell:
            self._used = max(self._used, cells().last)
        return time.monotonic() - self._used

    def _look_at_use(self, held: Held) -> None:
        """Look now and then whether this process, or one that it has started, uses a device."""
        now, idle_s = time.monotonic(), held.lease.idle_s
        if idle_s is None or now < self._next_look:
            return
        self._next_look = now + self._pause_s(idle_s)
        since, self._looked_at = self._looked_at, time.time()
        if is_used(held, since):
            self._used = time.monotonic()  # the look may have taken long

    @staticmethod
    def _pause_s(idle_s: float) -> float:
        return min(LONGEST_LOOK_S, idle_s / LOOKS)

    def _is_wanted(self, devices: Sequence[Device]) -> bool:
        """Tell whether somebody waits who could use one: who is stopped has no heartbeat."""
        heartbeats = waiters_for(devices)
        known = self._heartbeats
        self._heartbeats = {name: known.get(name, first) for name, first in heartbeats.items()}
        return self._heartbeats != heartbeats

    def is_to_end(self, held: Held) -> Callable[[], bool]:
        """Return what tells, on any thread, whether this process is still to end."""
        began = time.monotonic()

        def is_to_end() -> bool:
            now = self._owner.held
            if now is None:  # before_end() has released it: the memory stays in use
                return not cells().is_running and cells().last < began
            seen = self._see()
            is_put_off = seen.is_running and not held.lease.is_strict
            is_over = schedule.is_over(held.lease, seen)
            return now.lease == held.lease and is_over and not is_put_off

        return is_to_end


def _watch_cells() -> None:
    """Get to know of the cells of this shell, if there is one."""
    ipython = sys.modules.get("IPython")
    with suppress(Exception):  # a shell of another make
        shell = ipython and ipython.get_ipython()
        if shell and not cells().shell:
            shell.extension_manager.load_extension("reserve_gpu")


def _is_same(before: Held | None, held: Held | None) -> bool:
    """Tell whether the same devices are held by the same lease."""
    return bool(before and held and (before.devices, before.lease) == (held.devices, held.lease))


def _goes_on(before: Held | None, held: Held | None) -> bool:
    """Tell whether the same devices, or some of them, are held by another lease."""
    return bool(before and held and {*before.devices} & {*held.devices})


def is_used(held: Held, since: float) -> bool:
    """Tell whether this process, a guest, or what one has started, has used a device since then.

    What can't be read is never taken for idle.
    """
    uses = use.read(held.devices, guests.own_pids(held), since, DRIVER_LIMIT_S)
    return any(each.is_used is not False for each in uses.values())


def use_of_hidden(held: Held) -> tuple[bool, bool]:
    """Return whether CUDA has started here, and whether a child uses what is hidden by now.

    What has begun to start before it was hidden is waited for.
    """
    until = time.monotonic() + HIDDEN_S
    while environment.cuda_may_be_starting() and time.monotonic() < until:
        time.sleep(HIDDEN_POLL_S)
    return environment.cuda_started(), is_used_by_child(held)


def is_used_by_child(held: Held) -> bool:
    """Tell whether a process that this one has started is on one of the devices.

    What can't be read is never taken for idle. Where the driver does not tell whose a process is,
    any use is taken for that, unless others share the devices.
    """
    own = os.getpid()
    try:
        with Nvml(DRIVER_LIMIT_S) as gpus:
            if not gpus.sees_all:
                readings = [] if held.part_mib is not None else map(gpus.usage, held.devices)
                return any(reading.compute or reading.mps for reading in readings)
            pids = {process.pid for device in held.devices for process in gpus.processes(device)}
            return any(proc.is_below(pid, {own}) for pid in pids - {own})
    except (DriverError, DeviceError):
        return True


def waiters_for(devices: Sequence[Device]) -> dict[str, int]:
    """Return the last heartbeat of each other process that waits and could use a device."""
    try:
        with LockDirectory() as directory, directory.mutex(MUTEX_LIMIT_S):
            tickets = directory.tickets()
    except LockError:
        return {}
    return {ticket.name: ticket.heartbeat for ticket in waiters.others(tickets, devices)}
