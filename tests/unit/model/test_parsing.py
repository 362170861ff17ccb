"""The sizes, durations and times that users type."""

from __future__ import annotations

import calendar
import math
import threading
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError
from tests.support.properties import result_unless_refused

NUMBERS = st.integers(0, 10**6) | st.decimals(0, 10**6, places=3)
BLANKS = st.sampled_from(["", " ", "\t"])

# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        (16000, 16000),
        (1e6, 1e6),
        (" 16 gib ", 16384),
        ("16GB", 15258.789),
        ("1.5G", 1430.511),
        ("2TiB", 2097152),
        ("1TB", 953674.316),
        ("500MiB", 500),
        ("500mb", 476.837),
        ("1024KiB", 1),
        ("0GB", 0),
    ],
)
def test_a_size_is_in_mib(text: str | float, mib: float) -> None:
    """GB are powers of ten, GiB are powers of two, and a number without a unit is in MiB."""
    assert parsing.parse_size(text) == pytest.approx(mib)


INVALID_NUMBERS = ["", " ", "-1", "+1", "1e3", "0x10", "1_000", "nan", "\u0661"]


@pytest.mark.parametrize(
    "text",
    [*INVALID_NUMBERS, *("GB", "1,5GB", "1.GB", ".5GB", "1 6GB", "16B", "16GBs", "16GB\x00")],
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parsing.parse_size(text)


MIB = {"": 1, "kB": 1e3 / 2**20, "KiB": 2**-10, "MB": 1e6 / 2**20, "m": 1e6 / 2**20, "TiB": 2**20}


@pytest.mark.full
@given(NUMBERS, st.sampled_from(list(MIB)), BLANKS)
def test_a_size_is_its_number_times_its_unit(number: float, unit: str, blank: str) -> None:
    """Neither the case of the unit nor blanks change a size."""
    expected = pytest.approx(float(number) * MIB[unit])
    for text in (f"{number}{blank}{unit}", f" {number}{blank}{unit.upper()} "):
        assert parsing.parse_size(text) == expected


@pytest.mark.full
@given(
    st.text("0123456789.,kmgtibKMGTIB +-e_", max_size=12) | st.text() | st.floats() | st.integers()
)
@example("1" * 5000)
@example(math.nan)
@example("\u0663GB")
def test_no_size_is_negative(text: str | float) -> None:
    """Any text or number is a size of 0 or more, or is refused in one line."""
    size = result_unless_refused(parsing.parse_size, text)
    assert size is None or size >= 0


# -- durations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (0, 0),
        (1e-06, 1e-06),
        ("1d 1h1m 1s", 90061),
        ("0s", 0),
        ("1.5h", 5400),
        (" 10 M ", 600),
        ("10mins", 600),
        ("2 hours", 7200),
        ("1hr 1 minute", 3660),
        ("1Day30secs", 86430),
        (True, math.inf),
    ],
)
def test_a_duration_is_in_seconds(text: str | float, seconds: float) -> None:
    """A number is in seconds, the parts of a text are added, and True means no limit."""
    assert parsing.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("longest", [math.inf, 1e300, "999999999999d", "999999999999s"])
def test_python_can_sleep_for_the_longest_duration(longest: str | float) -> None:
    assert 1e9 < parsing.parse_duration(longest) <= threading.TIMEOUT_MAX


@pytest.mark.parametrize(
    "text",
    [
        *INVALID_NUMBERS,
        *("3", "0", " 1.5 "),  # without a unit
        *("m", "-1m", "1,5h", "1.h", ".5h", "1 0m", "1h30", "10minx", "5ms", "1w", "10m\x00"),
        *("True", -1, -0.5, math.nan, False, None, [], b"90"),
    ],
)
def test_an_invalid_duration_is_refused(text: object) -> None:
    """Text needs a unit, because users who type a number alone mean minutes or hours."""
    with pytest.raises(RequestError):
        parsing.parse_duration(text)


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@pytest.mark.full
@given(NUMBERS, st.sampled_from(list(SECONDS)), BLANKS)
def test_a_duration_is_its_number_times_its_unit(number: float, unit: str, blank: str) -> None:
    """Neither the case of the unit nor blanks change a duration, and a century is the longest."""
    expected = pytest.approx(min(float(number) * SECONDS[unit], 3e9))
    for text in (f"{number}{blank}{unit}", f" {number}{blank}{unit.upper()} "):
        assert parsing.parse_duration(text) == expected


@pytest.mark.full
@given(st.floats(0, 1e9) | st.integers(0, 10**9))
@example(0.1 + 0.2)
def test_any_number_of_seconds_is_a_duration(number: float) -> None:
    """A program can pass a number with any number of digits."""
    assert parsing.parse_duration(number) == number


@pytest.mark.full
@given(
    st.text("0123456789.,smhdSMHD +-e_:", max_size=12)
    | st.text()
    | st.floats()
    | st.integers()
    | st.none()
    | st.binary()
)
@example("1" * 5000)
@example(10**5000)
@example("\u0663m")
def test_no_duration_is_negative(value: object) -> None:
    """Any value is a duration of 0 or more, or is refused in one line."""
    duration = result_unless_refused(parsing.parse_duration, value)
    assert duration is None or duration >= 0


# -- times -----------------------------------------------------------------------------------------

NOW = time.mktime((2026, 11, 23, 15, 0, 0, 0, 0, -1))  # a Monday, in local time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18:00", "Mon 23 18:00"),
        ("9:05", "Tue 24 09:05"),
        ("15:00", "Tue 24 15:00"),  # the current time
        ("6:30 PM", "Mon 23 18:30"),
        ("12am", "Tue 24 00:00"),
        ("12pm", "Tue 24 12:00"),
        ("Fri", "Fri 27 23:59"),
        ("fri 6pm", "Fri 27 18:00"),
        ("Monday", "Mon 23 23:59"),
        ("mon 9:00", "Mon 30 09:00"),
        ("tomorrow", "Tue 24 23:59"),
        ("Tomorrow 9am", "Tue 24 09:00"),
        ("2026-11-25", "Wed 25 23:59"),
        ("2026-11-25T18:00", "Wed 25 18:00"),
    ],
)
def test_an_end_time_is_the_next_occurrence(text: str, expected: str) -> None:
    """A time of day is the next one, and a day without a time lasts until its last minute."""
    moment = parsing.parse_moment(text, NOW)
    assert time.strftime("%a %d %H:%M", time.localtime(moment)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "T", "s", "13pm", "0am", "24:00", "9", "2026-13-01", "2026-11-23 15:00"),
        *("9998-12-31", "2127-01-01 18:00"),
    ],
)
def test_an_invalid_end_time_is_refused(text: str) -> None:
    """A time in the past or more than a century away is also refused."""
    with pytest.raises(RequestError):
        parsing.parse_moment(text, NOW)


def utc(text: str) -> float:
    """Return a UTC time such as `25 00:30`, in October 2026, or `2027-03-28 01:30`, in seconds."""
    date, _, clock = text.rpartition(" ")
    full = f"2026-10-{date}" if len(date) == 2 else date
    return calendar.timegm(time.strptime(f"{full} {clock}", "%Y-%m-%d %H:%M"))


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("25 00:10", "02:30", "25 00:30"),
        ("25 00:45", "02:30", "25 01:30"),
        ("25 01:10", "2026-10-25 02:30", "25 01:30"),
        ("25 01:45", "02:30", "26 01:30"),
        ("25 00:45", "18:00", "25 17:00"),
        ("24 20:00", "tomorrow", "25 22:59"),
        ("24 20:00", "Sun 02:30", "25 00:30"),
        ("2027-03-28 00:55", "03:00", "2027-03-28 01:00"),
        ("2027-03-28 00:55", "02:30", "2027-03-28 01:30"),
        ("2027-03-28 00:55", "tomorrow 9am", "2027-03-29 07:00"),
    ],
)
def test_an_end_time_in_the_night_of_a_clock_change(now: str, text: str, expected: str) -> None:
    """A time that occurs twice means the next occurrence; a skipped one is an hour later."""
    assert parsing.parse_moment(text, utc(now)) == utc(expected)


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("25 00:45", "02:30", "25 00:00"),
        ("25 01:10", "02:30", "25 00:00"),
        ("25 01:45", "02:30", "25 01:00"),
        ("25 12:00", "today", "24 22:00"),
        ("25 12:00", "2026-10-25 02:30", "25 01:00"),
        ("2027-03-28 12:00", "02:30", "2027-03-28 01:00"),
    ],
)
def test_the_start_of_a_report_in_the_night_of_a_clock_change(
    now: str, text: str, expected: str
) -> None:
    """A past time that occurred twice means the last occurrence, from the start of its hour."""
    assert parsing.parse_since(text, utc(now)) == (utc(expected), None)
