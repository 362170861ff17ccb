"""Logs one reservation in a history: once a minute what its processes use, and how it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.locks.lock import myself
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.reservation import activity

if TYPE_CHECKING:
    from collections.abc import Collection

    from reserve_gpu.log.log_writer import Page
    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import End
    from reserve_gpu.reservation.holding import Holding

EVERY_S = 60.0  # between two looks
# A look speaks for so long at most: a process that was stopped for hours has not been looked at.
LONGEST_KNOWN_S = 2 * EVERY_S
DRIVER_LIMIT_S = 2.0  # for the driver to answer
LEAST_S = 1.0  # what was held for less is not logged


class Recorder:
    """Logs one reservation on a page of the history, which this process has locked.

    page: that page. held: what is logged. now: when it begins, in seconds since the epoch.
    at: the same by time.monotonic(). every_s: between two looks.
    """

    def __init__(
        self,
        page: Page,
        held: Holding,
        now: float,
        at: float | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self.page, self.held, self._every_s = page, held, every_s
        self._entries = {device: _first(page.id, device, held, now) for device in held.devices}
        self._uses: dict[Device, activity.DeviceActivity] = {}  # by the last look
        self._looked_at = now
        self.at = time.monotonic() if at is None else at  # up to which the lines count
        self._next_look = time.monotonic() + every_s
        self.page.write(self.entries)

    @property
    def entries(self) -> tuple[LogLine, ...]:
        """Return the lines that stand on the page."""
        return tuple(self._entries.values())

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next look, 0 if it is due."""
        return max(0.0, self._next_look - time.monotonic())

    def step(self, own: Collection[int] | None = None) -> tuple[float, bool | None]:
        """Look at the use and log it, if that is due.

        own: the processes that hold the devices, None where nobody can tell any more.
        Returns the seconds until the next look, and whether the devices were used; None if this has
        not looked.
        """
        if pause_s := self.pause_s:
            return pause_s, None
        since, self._looked_at = self._looked_at, time.time()
        devices = self.held.devices
        self._uses = {} if own is None else activity.read(devices, own, since, DRIVER_LIMIT_S)
        self._next_look = time.monotonic() + self._every_s
        self._log_use()
        is_used = any(each.is_used is not False for each in self._uses.values())
        return self._every_s, is_used or not self._uses

    def end(self, how: End) -> None:
        """Log the end. Raises OSError, ReserveGPUError."""
        self._add()
        lines = [entry._replace(how=how) for entry in self.entries]
        is_short = all(line.end - line.since < LEAST_S for line in lines)
        try:
            if not is_short:
                self.page.turn(lines)
        finally:
            self.page.remove()

    def _log_use(self) -> None:
        self._add()
        if is_next_hour(self.entries[0]):
            self.page.turn(self.entries)
            self._entries = {d: _next(entry) for d, entry in self._entries.items()}
        self.page.write(self.entries)

    def _add(self) -> None:
        """Add the time since the last call to each line."""
        before, self.at = self.at, time.monotonic()
        passed_s, now = self.at - before, time.time()
        for device, entry in self._entries.items():
            used = self._uses.get(device, activity.DeviceActivity())
            line = added(entry, passed_s, used, now, is_over=_is_over(self.held, used))
            self._entries[device] = _described(line, device, self.held, used)


# -- pure functions of values ----------------------------------------------------------------------


def added(
    entry: LogLine,
    passed_s: float,
    used: activity.DeviceActivity,
    now: float,
    *,
    is_over: bool | None = None,
) -> LogLine:
    """Return the line with the time that has passed.

    is_over: more is used than was promised, or for longer. now: in seconds since the epoch.
    """
    known_s = min(passed_s, LONGEST_KNOWN_S)
    used_s, idle_s, over_s, percent = entry.used_s, entry.idle_s, entry.over_s, entry.percent
    if used.is_used is not None:
        before_s = (used_s or 0.0) + (idle_s or 0.0)
        used_s = (used_s or 0.0) + known_s * used.is_used
        idle_s = (idle_s or 0.0) + known_s * (not used.is_used)
        if used.percent is not None and before_s + known_s:
            percent = ((percent or 0.0) * before_s + used.percent * known_s) / (before_s + known_s)
    if is_over is not None:
        over_s = (over_s or 0.0) + known_s * is_over
    return entry._replace(
        end=now,
        seconds=entry.seconds + passed_s,
        used_s=used_s,
        idle_s=idle_s,
        over_s=over_s,
        percent=percent,
        mib=entry.mib if used.mib is None else max(entry.mib or 0.0, used.mib),
    )


def is_next_hour(entry: LogLine) -> bool:
    """Tell whether another hour has begun since the line did."""
    return _hour(entry.end) != _hour(entry.start)


def _hour(at: float) -> tuple[int, ...]:
    """Return the local hour, with the offset to UTC: when clocks go back, an hour comes twice."""
    local = time.localtime(at)
    return (*local[:4], local.tm_gmtoff)


def _next(entry: LogLine) -> LogLine:
    """Return the line after this one."""
    entry = entry._replace(start=entry.end, seconds=0.0, used_s=None, idle_s=None, over_s=None)
    return entry._replace(mib=None, percent=None)


def _first(own_id: str, device: Device, held: Holding, now: float) -> LogLine:
    """Return the first line of a reservation."""
    entry = LogLine(Kind.RESERVED, own_id, now, now, now, gpu=device.uuid, label=device.label)
    return _described(entry, device, held, activity.DeviceActivity())


def _described(
    entry: LogLine, device: Device, held: Holding, used: activity.DeviceActivity
) -> LogLine:
    """Return the line with what is said of the reservation now.

    Its share is of a whole GPU, by memory; 1 if that is not known.
    """
    who, lease = myself(), held.lease
    share = used.share or 1.0
    if held.terms.memory_limit_mib is not None and device.memory_mib:
        share *= min(1.0, held.terms.memory_limit_mib / device.memory_mib)
    return entry._replace(
        share=share,
        name=who.notebook or who.command,
        agent=who.agent,
        job=who.job,
        note=held.terms.note,
        part_mib=held.terms.memory_limit_mib,
        until=lease.until,
        idle_limit_s=lease.idle_s,
    )


def _is_over(held: Holding, used: activity.DeviceActivity) -> bool | None:
    if held.overdue is not None:
        return True
    if held.terms.memory_limit_mib is None or used.mib is None:
        return None
    return used.mib > held.terms.memory_limit_mib
