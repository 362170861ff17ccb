"""Reservations that end: the one thread that waits for the end, and what it does then.

Two clocks count. A moment (`--for`, `--until`) is one of the clock on the wall, which others read,
so a machine that has slept past it finds the reservation over. Idleness is counted by the clock
that stands still while the machine sleeps: that night nobody has let a GPU lie idle.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reserve_gpu import host, interrupts
from reserve_gpu.cells import cells
from reserve_gpu.errors import DriverError, LockError
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.report import ends
from reserve_gpu.report.ends import End
from reserve_gpu.report.faces import MAGIC, PYTHON
from reserve_gpu.report.progress import Replaceable
from reserve_gpu.reservation import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from reserve_gpu.model import Device, Lease
    from reserve_gpu.reservation.held import Held

SLICE_S = 60.0  # at most so long after a machine has slept its clock is looked at
SECOND_S = 1.0  # the last minutes are counted down by
WANTED_S = 2.0  # between two looks at whether somebody waits
LOOKS = 12  # at what uses a device, in the time in which nothing may
LONGEST_LOOK_S = 300.0
DRIVER_LIMIT_S = 5.0  # for the driver to answer such a look
MUTEX_LIMIT_S = 0.5
# Before the end: so long, or that part of the whole time, whichever is less.
WARNINGS = ((600.0, 0.25), (60.0, 0.05))
STOP_S = 10.0  # until a process that is to end by itself gets the next signal


class BeforeEnd(NamedTuple):
    """What is called before the process ends. limit_s: for how long it is waited for."""

    function: Callable[[], object]
    limit_s: float


class Owner(Protocol):
    """Who holds the reservation: the session."""

    @property
    def held(self) -> Held | None:
        """What is held now."""

    def turn(self) -> AbstractContextManager[object]:
        """Nothing is changed by others in the block."""

    def let_go(self) -> None:
        """Let go of it, in a turn, so that this process sees no device any more."""

    def mark_overdue(self, since: float) -> None:
        """Let everybody see that it should have ended at that moment; in a turn."""


class Endings:
    """What there is of a session where anything ends: what to call, what to say, and the thread.

    before_end: what to call before the process ends.
    """

    def __init__(self, owner: Owner) -> None:
        self.before_end: list[BeforeEnd] = []
        self._line: Replaceable | None = None
        self._shown = ""
        self._owner = owner
        self._is_news = False  # what is shown, for the next cell
        self._followed: Held | None = None
        self._ending: Ending | None = None

    def call_before_end(self, function: Callable[[], object], limit_s: float) -> None:
        """Call it before the process ends, in place of an earlier one of that name.

        The cell that defines it may be run again. limit_s: for how long it is waited for.
        """
        name = _name_of(function)
        if "<" not in name:  # lambdas all have the same
            self.before_end[:] = [f for f in self.before_end if _name_of(f.function) != name]
        self.before_end.append(BeforeEnd(function, limit_s))

    def begin_to_show(self) -> None:
        """Show in this cell, if it is one, until when something is held, and what becomes of it."""
        if cells().shell:
            self._line = self._line or Replaceable()
            self._line.show(self._shown)

    def watch_cells(self) -> None:
        """Get to know of the cells of this shell, if there is one."""
        ipython = sys.modules.get("IPython")
        shell = ipython and ipython.get_ipython()
        if shell and not cells().shell:
            shell.extension_manager.load_extension("reserve_gpu")

    def follow(self, held: Held | None) -> None:
        """Wait for the end of that, and of nothing else; None where nothing is held."""
        if self._ending:
            self._ending.stop()
            self._ending = None
        before, self._followed = self._followed, held if held and held.lease.has_end else None
        self._is_news = False  # of what was held before
        goes_on = before and self._followed and set(before.devices) & set(self._followed.devices)
        if not goes_on:
            if before:
                self.show(ends.REPLACED if held else ends.RELEASED)
            self._line = None  # what a cell shows is its last word
        if self._followed:
            self.show(ends.lasts(self._followed.devices, self._followed.lease, time.time()))
            self._ending = Ending(self._owner, self)
            self._ending.start()

    def tell(self, text: str, *, is_news: bool, is_last: bool = False) -> None:
        """Show it in the output of the cell that has reserved; where it is news in the next, too.

        The next cell tells what is shown then. Where no cell comes any more it is for the log.
        """
        self._is_news = is_news
        self.show(text)
        if is_last or (is_news and not cells().shell):
            self._is_news = False
            logging.getLogger("reserve_gpu").warning(text)

    def tell_end(self, text: str) -> None:
        """Tell that it was let go of, in a turn."""
        self._followed = None
        self.tell(text, is_news=True)

    def show(self, text: str) -> None:
        """Show it in the output of the cells that have reserved."""
        if text != self._shown:
            self._shown = text
            self._update()

    def _update(self) -> None:
        if self._line:
            with suppress(Exception):  # the front end is gone
                self._line.replace(self._shown)

    def take_news(self) -> list[str]:
        """What the next cell has to tell."""
        held = self._owner.held
        if held and held.overdue is not None:
            end = End(held.devices, held.lease, held.overdue, MAGIC)
            self.tell(ends.overdue(end), is_news=True)
        if not self._is_news:
            return []
        self._is_news = False
        self._update()  # once more, as nbclient passes over what comes between two cells
        return [self._shown]


class Ending:
    """Waits for the end of what is held, on a thread of its own.

    It goes by the lease that held at its start; for others there is another one.
    """

    def __init__(self, owner: Owner, endings: Endings) -> None:
        self._owner = owner
        self._endings = endings
        self._began = time.time()
        self._used = self._next_look = time.monotonic()
        self._looked_at = self._began
        self._warned = 0
        self._may_go = False
        self._signs: dict[str, int] = {}  # of life, the first one seen of each who waits
        self._is_stopped = self._is_woken = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="reserve_gpu", daemon=True)

    def start(self) -> None:
        """Begin to wait."""
        cells().listeners.append(self.wake)
        self._thread.start()

    def wake(self) -> None:
        """Look again at how things stand."""
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def stop(self) -> None:
        """Wait no longer; the thread ends by itself."""
        self._is_stopped = True
        self.wake()

    def _tell(self, text: str, *, is_news: bool, is_last: bool = False) -> None:
        if not self._is_stopped:  # while it looked at something
            self._endings.tell(text, is_news=is_news, is_last=is_last)

    def _run(self) -> None:
        try:
            while (pause_s := self._step()) is not None:
                self._pause(pause_s)
        finally:
            cells().listeners.remove(self.wake)

    def _pause(self, seconds: float) -> None:
        with self._condition:
            if not self._is_woken:
                self._condition.wait(seconds)
            self._is_woken = False

    def _step(self) -> float | None:
        """Do what is due; returns for how long there is nothing to do, None for ever."""
        held = self._owner.held
        if self._is_stopped or held is None:
            return None
        if held.overdue is not None and not held.lease.end_kernel:
            return None
        left_s, end = self._end(held)
        if left_s > 0:
            self._may_go, self._signs = False, {}
            return min(self._count_down(end, left_s), self._look_s(held.lease))
        if cells().is_running and not held.lease.is_strict:
            self._tell(ends.put_off(end), is_news=False)
            return SLICE_S  # the end of the cell wakes this up
        if held.lease.if_wanted and not self._is_wanted(held.devices):
            if not self._may_go:
                self._tell(ends.may_go(end), is_news=True)
            self._may_go = True
            return WANTED_S
        return self._finish(held, end)

    def _is_wanted(self, devices: Sequence[Device]) -> bool:
        """Whether somebody waits who could use one: who is stopped gives no more signs of life."""
        signs = _waiting(devices)
        self._signs = {name: self._signs.get(name, sign) for name, sign in signs.items()}
        return self._signs != signs

    def _end(self, held: Held) -> tuple[float, End]:
        """The seconds that are left, and the end."""
        lease, now = held.lease, time.time()
        left_s = float("inf") if lease.until is None else lease.until - now
        if lease.idle_s is not None:
            left_s = min(left_s, lease.idle_s - self._idle_s(held.devices, lease.idle_s))
        face = MAGIC if cells().shell else PYTHON
        return left_s, End(held.devices, lease, now + left_s, face)

    def _idle_s(self, devices: Sequence[Device], limit_s: float) -> float:
        """For how long no cell has run, and no process of this one has used a device."""
        now = time.monotonic()
        is_used = cells().is_running
        if now >= self._next_look:
            self._next_look = now + min(LONGEST_LOOK_S, limit_s / LOOKS)
            since, self._looked_at = self._looked_at, time.time()
            is_used = is_used or _is_used(devices, since)
        if is_used:
            self._used = now
        if cells().shell:
            self._used = max(self._used, cells().last)
        return now - self._used

    def _look_s(self, lease: Lease) -> float:
        """The seconds until the next look at what uses the devices."""
        if lease.idle_s is None:
            return float("inf")
        return max(0.0, self._next_look - time.monotonic())

    def _count_down(self, end: End, left_s: float) -> float:
        """Show how much time is left; returns the seconds until that is done again."""
        whole_s = (end.lease.idle_s or 0.0) if end.is_by_idleness else end.at - self._began
        leads = [min(longest_s, whole_s * part) for longest_s, part in WARNINGS]
        due = sum(left_s <= lead_s for lead_s in leads)
        text = ends.near(end, left_s) if due else ends.lasts(end.devices, end.lease, time.time())
        if not due or (due > self._warned and not end.is_by_idleness):  # the next cell is use
            self._tell(text, is_news=bool(due))
        elif not self._is_stopped:
            self._endings.show(text)
        self._warned = 0 if end.is_by_idleness else due
        by_seconds_s = left_s - ends.BY_SECONDS_S
        pause_s = min(by_seconds_s, SLICE_S) if by_seconds_s > 0 else SECOND_S
        return min(pause_s, left_s, *(left_s - lead_s for lead_s in leads[due:]))

    def _finish(self, held: Held, end: End) -> float | None:
        """The end: let go, or say that it is overdue, or end this process."""
        with self._owner.turn(), cells().quiet:
            if not self._is_over(held):
                return 0.0
            if not environment.cuda_started():
                self._owner.let_go()
                self._endings.tell_end(ends.gone(end))
                return None
            self._owner.mark_overdue(end.at)
            if not held.lease.end_kernel:
                self._tell(ends.overdue(end), is_news=True)
                return None
        self._tell(ends.ending(end), is_news=True, is_last=True)
        began = time.monotonic()
        for function, limit_s in [*self._endings.before_end]:
            if problem := _called(function, limit_s):
                self._tell(problem, is_news=True, is_last=True)

        def is_due() -> bool:
            if self._owner.held is None:  # one of them has released it: the memory stays in use
                return not cells().is_running and cells().last < began
            return self._is_over(held)

        return self._end_process(is_due)

    def _end_process(self, is_due: Callable[[], bool]) -> float:
        """End it as long as that is due: as it ends by itself first, then by force.

        It is not where a cell runs, or has prolonged it.
        """
        steps: list[Callable[[], object]] = [
            lambda: cells().stop_shell(is_due),
            lambda: os.kill(os.getpid(), signal.SIGTERM),
            lambda: os.kill(os.getpid(), signal.SIGKILL),
        ]
        for step in steps if cells().shell else steps[1:]:
            if not is_due():
                break
            step()
            until = time.monotonic() + STOP_S
            while (left_s := until - time.monotonic()) > 0 and is_due():
                self._pause(left_s)
        return 0.0

    def _is_over(self, held: Held) -> bool:
        """Whether it still is, now that nobody else changes anything."""
        now = self._owner.held
        if self._is_stopped or now is None or now.lease != held.lease:  # prolonged
            return False
        if cells().is_running and not held.lease.is_strict:
            return False
        return self._end(now)[0] <= 0


def _called(function: Callable[[], object], limit_s: float) -> str | None:
    """Call a function of before_end(); returns what to say where it has not done its work."""
    name = _name_of(function)
    problems: list[str] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - a person's code may raise anything
            problems.append(ends.failed(name, f"raised {type(error).__name__}: {error}"))

    thread = threading.Thread(target=call, name=f"before_end {name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        return ends.failed(name, f"has not ended within {limit_s:g} s")
    return problems[0] if problems else None


def _name_of(function: Callable[[], object]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def _is_used(devices: Sequence[Device], since: float) -> bool:
    """Whether this process or one that it has started has used a device since that moment.

    What can't be read is never taken for idle.
    """
    try:
        with interrupts.deferred(), Nvml(DRIVER_LIMIT_S) as gpus:
            return any(_is_device_used(gpus, device, since) for device in devices)
    except (DriverError, DeviceError):
        return True


def _is_device_used(gpus: Nvml, device: Device, since: float) -> bool:
    """The same of one device, by what its own driver says of processes; else of the device.

    To be on a device is not to use it: a notebook that has started CUDA stays there to its end.
    """
    own = {os.getpid()}
    workers = gpus.workers(device, since) if gpus.sees_all else None  # else pids mean others
    if workers is not None:
        return any(host.is_below(pid, own) for pid in workers)
    usage, processes, gauges = gpus.look(device)
    is_all_seen = gpus.sees_all and usage.compute is not None
    if is_all_seen and not any(host.is_below(process.pid, own) for process in processes):
        return False
    return gauges.utilisation is None or gauges.utilisation > 0


def _waiting(devices: Sequence[Device]) -> dict[str, int]:
    """The last sign of life of each other process that waits and could use one of the devices."""
    try:
        with LockDirectory() as directory, directory.mutex(MUTEX_LIMIT_S):
            tickets = directory.tickets()
    except LockError:
        return {}
    return {
        ticket.name: ticket.heartbeat
        for ticket in tickets
        if not (ticket.holder.seen and ticket.holder.pid == os.getpid())
        and any(ticket.could_use(device.uuid) for device in devices)
    }
