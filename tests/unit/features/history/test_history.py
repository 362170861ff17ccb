"""Counters of a line in the history."""

from __future__ import annotations

import calendar

import pytest

from reserve_gpu.features.history import recorder
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.reservation.activity import DeviceActivity

NOW = 1_795_000_000.0
LINE = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW)
USED = DeviceActivity(is_used=True, percent=80.0, mib=900.0)


@pytest.mark.parametrize(
    ("used", "is_over", "expected"),
    [
        (USED, None, (60.0, 0.0, None, 900.0, 80.0)),
        (DeviceActivity(is_used=False, percent=0.0, mib=0.0), None, (0.0, 60.0, None, 0.0, 0.0)),
        (DeviceActivity(), None, (None, None, None, None, None)),
        (USED, True, (60.0, 0.0, 60.0, 900.0, 80.0)),
        (USED, False, (60.0, 0.0, 0.0, 900.0, 80.0)),
    ],
    ids=["used", "idle", "unreadable", "over", "not over"],
)
def test_check_adds_the_observed_use(
    used: DeviceActivity, expected: tuple[float | None, ...], *, is_over: bool | None
) -> None:
    line = recorder.add_time(LINE, 60.0, used, NOW + 60, is_over=is_over)
    assert (line.used_s, line.idle_s, line.over_s, line.mib, line.percent) == expected
    assert (line.seconds, line.end) == (60.0, NOW + 60)


def test_check_accounts_for_at_most_two_minutes() -> None:
    """The use during the hours in which a process was stopped is unknown."""
    line = recorder.add_time(LINE, 9000.0, USED, NOW + 9000, is_over=True)
    assert (line.seconds, line.used_s, line.over_s) == (9000.0, 120.0, 120.0)


def test_checks_accumulate() -> None:
    """Times are added, the largest memory use is kept, and utilization is weighted by time."""
    line = LINE
    for passed_s, used in (
        (60, DeviceActivity(is_used=True, percent=90.0, mib=900.0)),
        (30, DeviceActivity(is_used=False, percent=0.0, mib=100.0)),
        (10, DeviceActivity()),
        (90, DeviceActivity(is_used=True, percent=20.0, mib=500.0)),
    ):
        line = recorder.add_time(line, passed_s, used, NOW, is_over=True)
    assert (line.seconds, line.used_s, line.idle_s, line.over_s) == (190.0, 150.0, 30.0, 190.0)
    assert (line.percent, line.mib) == (40.0, 900.0)


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("begin", "end", "is_next"), [(10, 50, False), (50, 70, True)])
def test_repeated_hour_has_its_own_line(begin: int, end: int, *, is_next: bool) -> None:
    """When the clocks go back, the second 02:00 is another hour."""
    midnight = calendar.timegm((2026, 10, 25, 0, 0, 0))  # in UTC; 02:00 local time
    line = LINE._replace(start=midnight + 60 * begin, end=midnight + 60 * end)
    assert recorder.is_next_hour(line) == is_next
