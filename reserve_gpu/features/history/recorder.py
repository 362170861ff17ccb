"""Log one reservation in a history: its use once a minute, and its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.locks.lock import describe_this_process
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.reservation import activity

if TYPE_CHECKING:
    from collections.abc import Collection

    from reserve_gpu.log.log_writer import Page
    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import End
    from reserve_gpu.reservation.holding import Holding

EVERY_S = 60.0  # seconds between two checks of use
# Longest time in seconds for which one check counts. A stopped process can't check for hours, and
# its use in that time is unknown.
LONGEST_KNOWN_S = 2 * EVERY_S
DRIVER_LIMIT_S = 2.0  # timeout for the driver in seconds
LEAST_S = 1.0  # shortest reservation that is logged, in seconds


class Recorder:
    """Logs one reservation in a file of its own, called a page, until the reservation ends.

    Attributes:
        page: The page, which this process has locked.
        held: The reservation.
        at: The time up to which the lines cover the reservation, by time.monotonic().
    """

    def __init__(
        self,
        page: Page,
        held: Holding,
        now: float,
        at: float | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        """Write the first lines to the page.

        Args:
            page: The page, which this process has locked.
            held: The reservation.
            now: The start of the reservation, in seconds since the epoch.
            at: The start of the reservation by time.monotonic(). Defaults to the current time.
            every_s: The seconds between two checks of use.
        """
        self.page, self.held, self._every_s = page, held, every_s
        self._entries = {device: _first(page.id, device, held, now) for device in held.devices}
        self._uses: dict[Device, activity.DeviceActivity] = {}  # results of the latest check
        self._looked_at = now
        self.at = time.monotonic() if at is None else at
        self._next_look = time.monotonic() + every_s
        self.page.write(self.entries)

    @property
    def entries(self) -> tuple[LogLine, ...]:
        """Return the current lines of the page, one for each device."""
        return tuple(self._entries.values())

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next check of use; 0 if it is due."""
        return max(0.0, self._next_look - time.monotonic())

    def step(self, pids: Collection[int] | None = None) -> tuple[float, bool | None]:
        """Check and log the use of the devices, if that is due.

        Args:
            pids: The processes of the reservation; None if they are unknown.

        Returns:
            The seconds until the next check, and whether the devices were used since the last one.
            The latter is None if no check was due.

        Raises:
            OSError: The page can't be written.
            ReserveGPUError: The history can't be written.
        """
        if pause_s := self.pause_s:
            return pause_s, None
        since, self._looked_at = self._looked_at, time.time()
        devices = self.held.devices
        self._uses = {} if pids is None else activity.read(devices, pids, since, DRIVER_LIMIT_S)
        self._next_look = time.monotonic() + self._every_s
        self._log_use()
        is_used = any(each.is_used is not False for each in self._uses.values())
        return self._every_s, is_used or not self._uses

    def end(self, how: End) -> None:
        """Log the end of the reservation, and remove the page.

        Args:
            how: How the reservation ended.

        Raises:
            OSError: The history can't be written.
            ReserveGPUError: The history can't be written.
        """
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
        """Add the time since the previous call to the line of each device."""
        before, self.at = self.at, time.monotonic()
        passed_s, now = self.at - before, time.time()
        for device, entry in self._entries.items():
            used = self._uses.get(device, activity.DeviceActivity())
            line = add_time(entry, passed_s, used, now, is_over=_is_over(self.held, used))
            self._entries[device] = _described(line, device, self.held, used)


# -- pure functions --------------------------------------------------------------------------------


def add_time(
    entry: LogLine,
    passed_s: float,
    used: activity.DeviceActivity,
    now: float,
    *,
    is_over: bool | None = None,
) -> LogLine:
    """Return a line with more time added to its counters.

    Args:
        entry: The line.
        passed_s: The time since the line was last updated, in seconds.
        used: The use of the device in this time.
        now: The current time, in seconds since the epoch.
        is_over: Whether more memory was used than reserved, or the reservation is overdue. None if
            neither is known.
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
    """Return whether a line ends in a later hour than it starts in."""
    return _hour(entry.end) != _hour(entry.start)


def _hour(at: float) -> tuple[int, ...]:
    """Return the local hour with the UTC offset, which differs when clocks repeat an hour."""
    local = time.localtime(at)
    return (*local[:4], local.tm_gmtoff)


def _next(entry: LogLine) -> LogLine:
    """Return the line for the next period, with empty counters."""
    entry = entry._replace(start=entry.end, seconds=0.0, used_s=None, idle_s=None, over_s=None)
    return entry._replace(mib=None, percent=None)


def _first(own_id: str, device: Device, held: Holding, now: float) -> LogLine:
    """Return the first line of a reservation for one device."""
    entry = LogLine(Kind.RESERVED, own_id, now, now, now, gpu=device.uuid, label=device.label)
    return _described(entry, device, held, activity.DeviceActivity())


def _described(
    entry: LogLine, device: Device, held: Holding, used: activity.DeviceActivity
) -> LogLine:
    """Return the line with the current process, terms and lease of the reservation.

    The line's share is the reserved share of a whole GPU's memory, or 1 if that is unknown.
    """
    process, lease = describe_this_process(), held.lease
    share = used.share or 1.0
    if held.terms.memory_limit_mib is not None and device.memory_mib:
        share *= min(1.0, held.terms.memory_limit_mib / device.memory_mib)
    return entry._replace(
        share=share,
        name=process.notebook or process.command,
        agent=process.agent,
        job=process.job,
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
