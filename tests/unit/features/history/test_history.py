"""What is logged in a user's history: by notebooks, scripts and commands, however they end."""

from __future__ import annotations

import calendar

import pytest

from reserve_gpu.features.history import recorder
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.reservation.activity import DeviceActivity

NOW = 1_795_000_000.0


# -- what a look adds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed_s", "used", "is_over", "expected"),
    [
        (
            60,
            DeviceActivity(is_used=True, percent=80.0, mib=9.0),
            None,
            (60.0, 60.0, 0.0, None, 9.0, 80.0),
        ),
        (
            60,
            DeviceActivity(is_used=False, percent=0.0, mib=0.0),
            None,
            (60.0, 0.0, 60.0, None, 0.0, 0.0),
        ),
        (60, DeviceActivity(), None, (60.0, None, None, None, None, None)),
        (60, DeviceActivity(is_used=True, mib=900.0), True, (60.0, 60.0, 0.0, 60.0, 900.0, None)),
        (60, DeviceActivity(is_used=True, mib=900.0), False, (60.0, 60.0, 0.0, 0.0, 900.0, None)),
        (
            9000,
            DeviceActivity(is_used=True, percent=80.0),
            None,
            (9000.0, 120.0, 0.0, None, None, 80.0),
        ),
    ],
    ids=["used", "idle", "unreadable", "over", "not over", "stopped for hours"],
)
def test_a_look_adds_what_it_has_seen(
    passed_s: float,
    used: DeviceActivity,
    expected: tuple[float | None, ...],
    *,
    is_over: bool | None,
) -> None:
    """A look speaks for the time since the last one, two minutes at most, and not of the unread."""
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW)
    line = recorder.add_time(line, passed_s, used, NOW + passed_s, is_over=is_over)
    assert (*line[5:9], line.mib, line.percent) == expected
    assert line.end == NOW + passed_s


def test_looks_add_up() -> None:
    """Several looks sum up the times, keep the most memory, and weigh the utilisation by time."""
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW)
    for passed_s, used in (
        (60, DeviceActivity(is_used=True, percent=90.0, mib=900.0)),
        (30, DeviceActivity(is_used=False, percent=0.0, mib=100.0)),
        (10, DeviceActivity()),
        (90, DeviceActivity(is_used=True, percent=20.0, mib=500.0)),
    ):
        line = recorder.add_time(line, passed_s, used, NOW)
    assert (line.seconds, line.used_s, line.idle_s) == (190.0, 150.0, 30.0)
    assert (line.percent, line.mib) == (40.0, 900.0)


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("begin", "end", "is_next"), [(10, 50, False), (50, 70, True)])
def test_an_hour_that_comes_twice_is_two_hours(begin: int, end: int, *, is_next: bool) -> None:
    """When clocks go back, the second 02:00 begins a line of its own."""
    midnight = calendar.timegm((2026, 10, 25, 0, 0, 0))  # in UTC; there it is 02:00
    start = midnight + 60 * begin
    line = LogLine(Kind.RESERVED, "a", start, start, midnight + 60 * end)
    assert recorder.is_next_hour(line) == is_next
