"""Log one reservation's device use once a minute, and log how the reservation ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.locks.lock import describe_this_process
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.reservation import activity
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Collection

    from reserve_gpu.log.log_writer import Page
    from reserve_gpu.model.devices import Device
    from reserve_gpu.model.requests import End
    from reserve_gpu.reservation.holding import Holding

EVERY_S = 60.0  # seconds between device-use checks
# Maximum time that one check can account for, in seconds. A stopped process might not check for
# hours, and its device use during that time is unknown.
LONGEST_KNOWN_S = 2 * EVERY_S
DRIVER_LIMIT_S = 2.0  # timeout for each driver call, in seconds
LEAST_S = 1.0  # minimum duration of a logged reservation, in seconds


class Recorder:
    """Logs one reservation in its own file, called a page, until the reservation ends.

    Attributes:
        page: The page, which this process has locked.
        held: The reservation.
        at: The `time.monotonic()` value up to which the reservation has been logged.
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
            now: The reservation's start time, in seconds since the epoch.
            at: The `time.monotonic()` value at which logging starts. Defaults to now.
            every_s: The interval between device-use checks, in seconds.
        """
        self.page, self.held, self._every_s = page, held, every_s
        self._entries = {device: _first(page.id, device, held, now) for device in held.devices}
        self._uses: dict[Device, activity.DeviceActivity] = {}  # results of the latest check
        self._looked_at = procfs.now()
        self.at = time.monotonic() if at is None else at
        self._next_look = time.monotonic() + every_s
        self.page.write(self.entries)

    @property
    def entries(self) -> tuple[LogLine, ...]:
        """Return the page's current lines, one for each device."""
        return tuple(self._entries.values())

    @property
    def pause_s(self) -> float:
        """Return the seconds until the next device-use check, or 0 if it is due."""
        return max(0.0, self._next_look - time.monotonic())

    def step(self, pids: Collection[int] | None = None) -> tuple[float, bool | None]:
        """Check and log device use, if a check is due.

        Args:
            pids: The pids of the reservation's processes, or None if they are unknown.

        Returns:
            The seconds until the next check, and whether the devices were used since the last one.
            Unknown use counts as use. The second value is None if no check was due.

        Raises:
            OSError: The page can't be written.
            ReserveGPUError: The history can't be written.
        """
        if pause_s := self.pause_s:
            return pause_s, None
        since, self._looked_at = self._looked_at, procfs.now()
        devices = self.held.devices
        self._uses = {} if pids is None else activity.read(devices, pids, since, DRIVER_LIMIT_S)
        self._next_look = time.monotonic() + self._every_s
        self._log_use()
        is_used = any(each.is_used is not False for each in self._uses.values())
        return self._every_s, is_used or not self._uses

    def end(self, how: End) -> None:
        """Log how the reservation ended, and remove the page.

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
        """Add the time since the previous call to each device's line."""
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
        entry: The line to update.
        passed_s: The time since the line was last updated, in seconds.
        used: The device's use during that time.
        now: The current time, in seconds since the epoch.
        is_over: Whether the reservation is overdue, or more memory was used than reserved. None if
            this is unknown.
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
    """Return whether a line starts in one hour and ends in another."""
    return _hour(entry.end) != _hour(entry.start)


def _hour(at: float) -> tuple[int, ...]:
    """Return the local date, hour and UTC offset.

    When the clocks go back, the hour repeats, but the UTC offset changes.
    """
    local = time.localtime(at)
    return (*local[:4], local.tm_gmtoff)


def _next(entry: LogLine) -> LogLine:
    """Return a line for the next period, with its counters reset."""
    entry = entry._replace(start=entry.end, seconds=0.0, used_s=None, idle_s=None, over_s=None)
    return entry._replace(mib=None, percent=None)


def _first(own_id: str, device: Device, held: Holding, now: float) -> LogLine:
    """Return a reservation's first line for one device."""
    entry = LogLine(Kind.RESERVED, own_id, now, now, now, gpu=device.uuid, label=device.label)
    return _described(entry, device, held, activity.DeviceActivity())


def _described(
    entry: LogLine, device: Device, held: Holding, used: activity.DeviceActivity
) -> LogLine:
    """Return the line with the current details of the process, the reservation and its lease.

    The line's share is the fraction of the whole GPU's memory that is reserved. A device whose
    fraction of the GPU's memory is unknown counts as a whole GPU.
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
