"""When a reservation ends, as other users see it, and which device will be free next."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from reserve_gpu.commands.export import prometheus
from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Lease, Request
from reserve_gpu.render import columns, contacts, durations, html, phrases, pictures, terminal
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.phrases import MARK
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed

HOUR_S, DAY_S = 3600.0, 86400.0
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))  # a Friday
ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 2 * HOUR_S, seen=True)
BOB = changed(ALICE, pid=4410, user="bob", notebook="fit.ipynb")
IDLE = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)


def lease(hours: float | None = None, idle_s: float | None = None, **options: bool) -> Lease:
    """Return a lease that ends this many hours after NOW."""
    until = None if hours is None else NOW + hours * HOUR_S
    return Lease(until=until, idle_s=idle_s, **options)


def with_lease(holder: Holder, lease: Lease, **changes: Any) -> Holder:
    """Return the holder with that lease."""
    return changed(holder, terms=holder.record.terms._replace(lease=lease), **changes)


def row(number: int, *holders: Holder, is_unused: bool = False) -> DeviceStatus:
    """Return a reserved device."""
    usage = IDLE if is_unused else IDLE._replace(compute=1, used_mib=3500)
    device = Device(number, f"GPU-{number}", memory_mib=40960)
    return DeviceStatus(device, State.RESERVED, usage, holders=holders, is_unused=is_unused)


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        (6, "18:00"),
        (12, "Sat 00:00"),
        (-13, "Thu 23:00"),
        (5 * 24, "Wed 12:00"),
        (6 * 24, "2026-11-26 12:00"),
        (-6 * 24, "2026-11-14 12:00"),
    ],
)
def test_moment_shows_no_ambiguous_weekday(hours: float, expected: str) -> None:
    assert durations.moment(NOW + hours * HOUR_S, NOW) == expected


@pytest.mark.parametrize("terms", [lease(None, HOUR_S), lease(-1, if_wanted=True), lease(1)])
def test_overdue_time_in_the_record_counts(terms: Lease) -> None:
    line = phrases.holder_line(with_lease(ALICE, terms, overdue=NOW - 1800), NOW)
    assert ("overdue since 11:30", MARK) in line


@pytest.mark.parametrize(
    ("since", "terms", "overdue"),
    [
        pytest.param(NOW, lease(-1), None, id="end before start"),
        pytest.param(NOW, lease(24 * 366 * 100), None, id="end in 100 years"),
        pytest.param(None, lease(6), NOW - 60, id="no start"),
        pytest.param(NOW, lease(None, 9e10), None, id="idle limit of 3000 years"),
        pytest.param(NOW, lease(), NOW - 1, id="overdue before start"),
        pytest.param(NOW, lease(), NOW + 9e10, id="overdue in 3000 years"),
    ],
)
def test_implausible_end_is_not_shown(
    since: float | None, terms: Lease, overdue: float | None
) -> None:
    holder = with_lease(ALICE, terms, since=since, overdue=overdue)
    assert phrases.lease_end(holder, NOW) == ()


def test_waiter_shows_no_end() -> None:
    ticket = Ticket(0, "queue-1-0.lock", None, with_lease(ALICE, lease(6)))
    assert "18:00" not in phrases.plain(phrases.waiter_line(ticket, NOW, "1. ", None))


@pytest.mark.parametrize("width", [24, 80])
def test_end_fits_into_any_width(width: int) -> None:
    """A terminal shows the whole end of a lease, and no line is wider than the terminal."""
    holder = with_lease(ALICE, lease(6, HOUR_S, if_wanted=True))
    status = Status((row(0, holder),), time=NOW, frontend=MAGIC)
    lines = terminal.lines(status.picture().layout, width, is_colored=False)
    assert max(map(columns.width_of, lines)) <= width
    end = phrases.plain(phrases.lease_end(holder, NOW)).removeprefix(", ")
    assert end in re.sub(r"\s+", " ", " ".join(lines))


def test_overdue_holder_is_marked_in_html() -> None:
    status = Status((row(0, with_lease(ALICE, lease(-1))),), time=NOW)
    mark = f'<span style="{html.STYLES[MARK]}">overdue since 11:00</span>'
    assert mark in html.html(status.picture().layout)


def metric(name: str, *rows: DeviceStatus) -> dict[str, float]:
    """Return the exported values of a metric by user."""
    text = prometheus.text(Status(rows, time=NOW))
    found = re.findall(rf'^reserve_gpu_{name}{{.*username="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {user: float(value) for user, value in found}


def test_end_and_overdue_time_are_exported() -> None:
    late = with_lease(BOB, lease(-1))
    rows = row(0, ALICE), row(1, late, with_lease(late, lease(1)))
    assert metric("until_timestamp_seconds", *rows) == {"bob": NOW + HOUR_S}
    assert metric("overdue_seconds", *rows) == {"alice": 0, "bob": HOUR_S}


# -- the next free device --------------------------------------------------------------------------

UNTIL = {hours: with_lease(BOB, lease(hours)) for hours in (-1, 1, 2, 3, 6, 7)}
KEPT = with_lease(BOB, lease(-1.5, if_wanted=True))
IDLE_LIMIT = with_lease(ALICE, lease(6, HOUR_S), last_cell=NOW - 1800)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [row(0, ALICE, is_unused=True), row(1, UNTIL[7]), row(2, UNTIL[6])],
            "GPU2, reserved until 18:00",
            id="earliest end",
        ),
        pytest.param(
            [row(0, ALICE, is_unused=True), row(1, BOB)], "GPU0, idle for 2 h", id="idle, no end"
        ),
        pytest.param([row(1, BOB)], "", id="in use, no end"),
        pytest.param(
            [row(0, IDLE_LIMIT, is_unused=True), row(1, UNTIL[1])],
            "GPU0, idle for 30 min, released after 1 h idle",
            id="idle limit before end",
        ),
        pytest.param([row(0, IDLE_LIMIT), row(1, UNTIL[1])], "GPU1, reserved", id="in use"),
        pytest.param([row(0, UNTIL[1]), row(1, UNTIL[-1])], "GPU1, overdue", id="overdue"),
        pytest.param(
            [row(0, UNTIL[1]), row(1, UNTIL[-1]), row(2, KEPT, is_unused=True)],
            "GPU2, idle for 2 h, past 10:30",
            id="kept until wanted",
        ),
        pytest.param(
            [row(0, UNTIL[1], UNTIL[3]), row(1, UNTIL[2])], "GPU1, reserved", id="last sharer ends"
        ),
        pytest.param([row(0, UNTIL[1], UNTIL[3])], "GPU0, reserved until 15:00", id="two sharers"),
        pytest.param([row(0, UNTIL[1], BOB)], "", id="a sharer without end"),
        pytest.param([row(0, UNTIL[1])._replace(is_mine=True)], "", id="own device"),
    ],
)
def test_next_free_device(rows: list[DeviceStatus], expected: str) -> None:
    """The device whose last reservation ends first is probably free next, then the idle one."""
    text = phrases.plain(contacts.next_free(rows, NOW))
    assert text.startswith(expected)
    assert bool(text) == bool(expected)


def test_users_of_idle_devices_are_asked_before_overdue_users() -> None:
    rows = (
        row(0, ALICE, UNTIL[-1]),
        row(1, ALICE._replace(last_cell=NOW - 3600), is_unused=True),
    )
    line = contacts.users_to_ask(rows, NOW)
    assert [part[0] for part in line if not isinstance(part, str) and part[1] != MARK] == [
        "alice (train.ipynb)",
        "bob (fit.ipynb)",
    ]
    assert ("overdue since 11:00", MARK) in line


def test_waiter_sees_the_next_free_device() -> None:
    now = time.time()
    busy = row(0, ALICE)
    ending = with_lease(ALICE, Lease(until=now + 9 * DAY_S), since=now - 9)
    (line,) = pictures.wait(Waiting(Request(), 1, 5.0, (busy, row(1, ending)))).layout.foot
    moment = durations.moment(now + 9 * DAY_S, now)
    assert phrases.plain(line).endswith(f"GPU1, reserved until {moment}")
