"""What people ask for: requests, sizes of memory, durations and the one setting, as tables."""

from __future__ import annotations

import calendar
import math
import threading
import time
from typing import Any

import pytest

from reserve_gpu.allocation import request
from reserve_gpu.allocation.request import Deadline
from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.system import settings


@pytest.mark.parametrize(
    ("arguments", "expected", "needed"),
    [
        ({"devices": None}, Request(), 1),
        ({"devices": 2}, Request(("2",)), 1),
        ({"devices": "1,3"}, Request(("1", "3")), 2),
        ({"devices": [1, "GPU-a"]}, Request(("1", "GPU-a")), 2),
        ({"devices": "1 3", "count": 2}, Request(("1", "3"), 2), 2),
        ({"devices": None, "count": 4}, Request(count=4), 4),
        ({"devices": None, "count": 1}, Request(count=1), 1),
        ({"devices": "0-2,5"}, Request(("0", "1", "2", "5")), 4),
        ({"devices": None, "min_memory": "16GiB"}, Request(min_memory_mib=16384), 1),
        ({"devices": None, "min_memory": "1 gb"}, Request((), None, 10**9 / 2**20, "GB"), 1),
        ({"devices": None, "min_memory": 16000}, Request((), None, 16000, "MiB"), 1),
        ({"devices": None, "min_memory": "1000"}, Request((), None, 1000, "MiB"), 1),
        ({"devices": None, "min_memory": "0.5mib"}, Request((), None, 0.5, "MiB"), 1),
        ({"devices": None, "min_memory": 0}, Request((), None, 0, "MiB"), 1),
        (
            {"devices": None, "memory": "50%"},
            Request(terms=ReservationTerms(Size(0, percent=50))),
            1,
        ),
        (
            {"devices": None, "memory": " 12.5 %"},
            Request(terms=ReservationTerms(Size(0, percent=12.5))),
            1,
        ),
        ({"devices": None, "name": "a100"}, Request(model="a100"), 1),
        (
            {"devices": None, "note": "x"},
            Request(terms=ReservationTerms(note="x")),
            1,
        ),
    ],
)
def test_request(arguments: dict[str, Any], expected: Request, needed: int) -> None:
    """The arguments of reserve() become a request, which knows how many devices it needs."""
    parsed = request.parse(**arguments)
    assert parsed == expected
    assert parsed.needed == needed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"devices": ""}, "No GPU was given"),
        ({"devices": " , "}, "No GPU was given"),
        ({"devices": []}, "No GPU was given"),
        ({"devices": "all"}, "'all'"),
        ({"devices": "-1"}, "'-1'"),
        ({"devices": -1}, "'-1'"),
        ({"devices": None, "count": 0}, "0"),
        ({"devices": None, "count": -2}, "-2"),
        ({"devices": None, "count": True}, "True"),
        ({"devices": None, "count": 1.5}, "1.5"),
        ({"devices": None, "count": float("nan")}, "nan"),
        ({"devices": None, "count": float("inf")}, "inf"),
        ({"devices": None, "count": "two"}, "two"),
        ({"devices": "0,1", "count": 1}, "named: 2; number requested: 1"),
        ({"devices": "0", "count": 2}, "named: 1; number requested: 2"),
        ({"devices": None, "min_memory": "lots"}, "'lots'"),
        ({"devices": None, "min_memory": -1}, "'-1'"),
        ({"devices": None, "min_memory": "50%"}, "'50%' is not a valid size."),
        *(
            (
                {"devices": None, "memory": text},
                "is not a valid part of a GPU. Give a percentage above 0%",
            )
            for text in ("0%", "101%", "-1%", "%", "x%", "1e1%", "nan%", "50%%")
        ),
        ({"devices": None, "min_memory": True}, "'True'"),
        ({"devices": None, "min_memory": "16"}, "16 MiB or 16 GB? Write 16GB or 16MiB."),
        ({"devices": None, "min_memory": 16}, 'Write min_memory="16GB" or min_memory="16MiB".'),
        ({"devices": None, "min_memory": 0.5}, 'Write min_memory="0.5GB"'),
        ({"devices": None, "min_memory": "999.9"}, "Write 999.9GB"),
        ({"devices": None, "name": 5}, "5"),
        ({"devices": None, "note": 5}, "5"),
        ({"devices": None, "for_": "0s"}, "Give a duration above 0, such as 30m, 4h or 2d."),
        ({"devices": None, "for_": "34723d"}, "'34723d' is too long. Give 34722d or less."),
        (
            {"devices": None, "for_": "tomorrow"},
            "is a time, not a duration. Use --until tomorrow (in Python: until='tomorrow').",
        ),
        (
            {"devices": None, "for_": "tomorrow 9am"},
            "Use --until 'tomorrow 9am' (in Python: until='tomorrow 9am').",
        ),
        ({"devices": None, "for_": "someday"}, "'someday' is not a valid duration. Examples: 90s"),
        ({"devices": None, "idle": "tomorrow"}, "'tomorrow' is not a valid duration. Examples: "),
        (
            {"devices": None, "until": "10m"},
            "is a duration, not a time. Use --for 10m (in Python: for_='10m').",
        ),
        ({"devices": None, "if_wanted": True}, "also say when: for_ (--for 4h), until (--until"),
    ],
)
def test_bad_request(arguments: dict[str, Any], said: str) -> None:
    """What makes no request is a RequestError in one line that names what is wrong."""
    with pytest.raises(RequestError) as caught:
        request.parse(**arguments)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        (16000, 16000),
        (0, 0),
        (1.5, 1.5),
        (1e6, 1e6),
        ("16000", 16000),
        ("16GiB", 16384),
        ("16gib", 16384),
        (" 16 GiB ", 16384),
        ("16GB", 15258.789),
        ("16G", 15258.789),
        ("1.5GiB", 1536),
        ("2TiB", 2097152),
        ("1TB", 953674.316),
        ("500MiB", 500),
        ("500MB", 476.837),
        ("1024KiB", 1),
        ("0GB", 0),
    ],
)
def test_size(text: str | float, mib: float) -> None:
    """GB are powers of ten, GiB powers of two, a bare number is MiB."""
    assert parsing.parse_size(text) == pytest.approx(mib)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GB", "-1", "-1GB", "+1", "1e3", "0x10", "1,5GB", "1.GB", ".5GB", "1 6GB"),
        *("16B", "16iB", "16GBs", "16PB", "16 G B", "nan", "inf", "1_000", "\u0661GB", "16GB\x00"),
    ],
)
def test_bad_size(text: str) -> None:
    """What is no size is refused, with examples of what is one."""
    with pytest.raises(RequestError, match="16GiB"):
        parsing.parse_size(text)


@pytest.mark.parametrize(
    ("value", "mib"), [(None, None), ("", None), ("512", 512), ("1GiB", 1024), ("0", 0)]
)
def test_idle_memory(monkeypatch: pytest.MonkeyPatch, value: str | None, mib: float | None) -> None:
    """The setting is a size; where it is not set, or empty, there is none."""
    monkeypatch.delenv(settings.IDLE_MEMORY, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.IDLE_MEMORY, value)
    assert request.idle_mib() == mib


def test_bad_idle_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that is no size is an error that names the variable."""
    monkeypatch.setenv(settings.IDLE_MEMORY, "plenty")
    with pytest.raises(RequestError, match="RESERVE_GPU_IDLE_MEMORY: 'plenty' is not a valid size"):
        request.idle_mib()


# -- durations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (0, 0),
        (1.5, 1.5),
        (0.1 + 0.2, 0.3),
        (1 / 3, 1 / 3),
        (1e-06, 1e-06),
        ("1h30m", 5400),
        ("1 h 30 min", 5400),
        ("1d 1h1m 1s", 90061),
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("1.5h", 5400),
        ("0s", 0),
        ("10M", 600),
        (" 10 m ", 600),
        ("10min", 600),
        ("10mins", 600),
        ("2 hours", 7200),
        ("1hr 1 minute", 3660),
        ("1Day30secs", 86430),
        (True, math.inf),
    ],
)
def test_duration(text: str | float, seconds: float) -> None:
    """A number is seconds, s, m, h and d are units, which add up, and True is for ever."""
    assert parsing.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("longest", [math.inf, 1e300, "999999999999d", "999999999999s"])
def test_longest_duration(longest: str | float) -> None:
    """However long a duration is, Python can sleep for it."""
    assert 1e9 < parsing.parse_duration(longest) <= threading.TIMEOUT_MAX


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "m", "-1", "-1m", "+1", "1e3", "0x10", "1,5h", "1.h", ".5h", "1 0m", "1h30"),
        *("10minx", "5ms", "1mo", "1w", "nan", "1_000", "\u0661m", "10m\x00", "forever", "True"),
        *(-1, -0.5, math.nan, False, None, [], b"90"),
    ],
)
def test_bad_duration(text: object) -> None:
    """What is no duration is refused, with examples of what is one."""
    with pytest.raises(RequestError, match="10m"):
        parsing.parse_duration(text)


@pytest.mark.parametrize("text", ["3", "0", "1.5", " 90 "])
def test_a_number_that_somebody_typed_is_asked_back(text: str) -> None:
    """Most who type 3 mean hours, so a number without a unit is no duration."""
    number = text.strip()
    with pytest.raises(RequestError, match=f"{number} has no unit. Use {number}s, {number}m, "):
        parsing.parse_duration(text)


@pytest.mark.parametrize("text", ["0,1", "GPU0,GPU1", "cuda:0", "gpu3", "GPU-8f2a", "1:0"])
def test_devices_in_place_of_a_duration(text: str) -> None:
    """Who gives devices after --wait is told where they belong."""
    with pytest.raises(RequestError, match=f"To wait for specific GPUs: {text} --wait"):
        Deadline.after(text)


@pytest.mark.parametrize("text", ["forever", "Inf", " unlimited "])
def test_a_wait_without_a_limit_has_no_duration(text: str) -> None:
    """A word for an unlimited wait is answered with the option alone."""
    with pytest.raises(RequestError, match=r"leave it out: --wait \(in Python: wait=True\)\."):
        Deadline.after(text)


@pytest.mark.parametrize(
    ("wait", "waits", "limit_s"),
    [(None, False, None), (0, True, 0), (True, True, math.inf), ("1h", True, 3600)],
)
def test_deadline(wait: object, *, waits: bool, limit_s: float | None) -> None:
    """Nothing said is no wait; a wait of 0 s is one, and is over at once."""
    before = time.monotonic()
    deadline = Deadline.after(wait)
    assert (deadline.waits, deadline.limit_s) == (waits, limit_s)
    assert deadline.at >= before + (limit_s or 0)
    assert bool(deadline.left_s) is bool(limit_s)


# -- moments ---------------------------------------------------------------------------------------

NOW = time.mktime((2026, 11, 23, 15, 0, 0, 0, 0, -1))  # a Monday, in local time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18:00", "Mon 23 18:00"),
        ("9:05", "Tue 24 09:05"),
        ("15:00", "Tue 24 15:00"),  # it is that just now
        ("6pm", "Mon 23 18:00"),
        ("6:30 PM", "Mon 23 18:30"),
        ("12am", "Tue 24 00:00"),
        ("12pm", "Tue 24 12:00"),
        ("Fri", "Fri 27 23:59"),
        ("fri 6pm", "Fri 27 18:00"),
        ("Monday", "Mon 23 23:59"),
        ("mon 9:00", "Mon 30 09:00"),
        ("tomorrow", "Tue 24 23:59"),
        ("Tomorrow 9:00", "Tue 24 09:00"),
        ("tomorrow 9am", "Tue 24 09:00"),
        ("2026-11-25", "Wed 25 23:59"),
        ("2026-11-25 9am", "Wed 25 09:00"),
        ("2026-11-25T18:00", "Wed 25 18:00"),
    ],
)
def test_moment(text: str, expected: str) -> None:
    """A time of day is the next one, and a day without a time lasts until its last minute."""
    moment = parsing.parse_moment(text, NOW)
    assert time.strftime("%a %d %H:%M", time.localtime(moment)) == expected


def utc(text: str) -> float:
    """Return a moment of 2026-10-25 or later, as `25 00:30` or `2027-03-28 01:30`, in seconds."""
    date, _, clock = text.rpartition(" ")
    full = f"2026-10-{date}" if len(date) == 2 else date
    return calendar.timegm(time.strptime(f"{full} {clock}", "%Y-%m-%d %H:%M"))


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("25 00:10", "02:30", "25 00:30"),
        ("25 00:45", "02:30", "25 01:30"),
        ("25 01:10", "02:30", "25 01:30"),
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
def test_a_moment_in_the_night_of_a_clock_change(now: str, text: str, expected: str) -> None:
    """A time that comes twice is the next of the two; one that is skipped comes an hour later."""
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
def test_since_the_night_of_a_clock_change(now: str, text: str, expected: str) -> None:
    """A past time that came twice is the last of the two, from the beginning of its hour."""
    assert parsing.parse_since(text, utc(now)) == (utc(expected), None)


@pytest.mark.parametrize("text", ["9998-12-31", "2127-01-01 18:00"])
def test_a_moment_too_far_away(text: str) -> None:
    """A moment in the far future is refused as such."""
    with pytest.raises(RequestError, match="is more than a century away"):
        parsing.parse_moment(text, NOW)


@pytest.mark.parametrize("text", ["", "soon", "T", "s", "13pm", "0am", "24:00", "9", "2026-13-01"])
def test_bad_moment(text: str) -> None:
    """What is no moment is refused, with examples of what is one."""
    with pytest.raises(RequestError, match=r"is not a valid time\. Examples: 18:00, 6pm, Fri, "):
        parsing.parse_moment(text, NOW)
