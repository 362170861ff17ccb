"""Until when somebody holds a GPU: what others read of it, and what it makes likeliest."""

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
from reserve_gpu.model.requests import Lease, Request, ReservationTerms
from reserve_gpu.render import columns, contacts, durations, html, phrases, pictures, terminal
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.phrases import MARK
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed
from tests.support.lease_words import until

HOUR_S, DAY_S = 3600.0, 86400.0
# A Friday, at noon where the tests run.
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 2 * HOUR_S, seen=True)
ALICE = changed(ALICE, terms=ReservationTerms(note="thesis"))
BOB = changed(ALICE, pid=4410, user="bob", notebook="fit.ipynb", terms=ReservationTerms())
GPUS = [Device(index, f"GPU-{index}", memory_mib=40960) for index in range(4)]
EMPTY = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)
COMPUTED_ON = EMPTY._replace(compute=1, used_mib=3500)


def with_lease(holder: Holder, lease: Lease, **changes: Any) -> Holder:
    return changed(holder, terms=holder.record.terms._replace(lease=lease), **changes)


def row(number: int, *holders: Holder, is_unused: bool = False) -> DeviceStatus:
    usage = EMPTY if is_unused else COMPUTED_ON
    return DeviceStatus(GPUS[number], State.RESERVED, usage, holders=holders, is_unused=is_unused)


# -- in words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        (6, "18:00"),
        (-11, "01:00"),
        (12, "Sat 00:00"),
        (-13, "Thu 23:00"),
        (5 * 24, "Wed 12:00"),
        (7 * 24, "2026-11-27 12:00"),
        (-7 * 24, "2026-11-13 12:00"),
        (24 * 365, "2027-11-20 12:00"),
    ],
)
def test_a_moment(hours: float, expected: str) -> None:
    """A moment is told as people here tell it, and never by a day of the week that may be two."""
    assert durations.moment(NOW + hours * HOUR_S, NOW) == expected


WANTED = {"if_wanted": True}


@pytest.mark.parametrize(
    ("terms", "others", "own"),
    [
        (Lease(), "", ""),
        (until(6), ", until 18:00", ", until 18:00 (6 h left)"),
        (until(None, HOUR_S), ", released after 1 h idle", ", released after 1 h idle"),
        (
            until(6, 1800),
            ", until 18:00 or after 30 min idle",
            ", until 18:00 (6 h left) or after 30 min idle",
        ),
        (
            until(6, **WANTED),
            ", until 18:00, longer if no other process waits",
            ", until 18:00 (6 h left), longer if no other process waits",
        ),
        (
            until(None, HOUR_S, **WANTED),
            ", released after 1 h idle if another process waits",
            ", released after 1 h idle if another process waits",
        ),
        (until(-1), ", overdue since 11:00", ", overdue since 11:00"),
        (
            until(-1, **WANTED),
            ", past 11:00: join the queue to get it",
            ", past 11:00: kept until another process waits",
        ),
    ],
)
def test_until_when(terms: Lease, others: str, own: str) -> None:
    """Until when stands behind for how long and before the note; the holder reads what is left."""
    holder = with_lease(ALICE, terms)
    line = phrases.holder_line(holder, NOW)
    assert phrases.plain(line) == f'alice, train.ipynb (pid 4321000) for 2 h{others}: "thesis"'
    line = phrases.holder_line(holder, NOW, this_process="this kernel")
    assert phrases.plain(line).endswith(f' for 2 h{own}: "thesis"')


def test_overdue_by_its_own_record() -> None:
    """What its process has marked as overdue is so, also where --idle or --if-wanted made it so."""
    for terms in (until(None, HOUR_S), until(-1, **WANTED), until(1)):
        line = phrases.holder_line(with_lease(ALICE, terms, overdue=NOW - 1800), NOW)
        assert (("overdue since 11:30", MARK)) in line


@pytest.mark.parametrize(
    ("since", "terms", "overdue"),
    [
        (NOW, until(-1), None),  # it ended before it began
        (NOW, until(), NOW - 1),
        (NOW, until(24 * 366 * 100), None),
        (None, until(6), NOW - 60),
        (NOW, until(None, 9e10), None),
        (NOW, until(), NOW + 9e10),
    ],
)
def test_what_makes_no_sense_is_not_shown(
    since: float | None, terms: Lease, overdue: float | None
) -> None:
    """An end before the beginning, or in a hundred years, is nobody's word: nothing is said."""
    holder = with_lease(ALICE, terms, since=since, overdue=overdue)
    assert phrases.lease_end(holder, NOW) == ()


def test_who_waits_has_no_end() -> None:
    """A place in the queue has no end, whatever its file says."""
    ticket = Ticket(0, "queue-1-0.lock", None, with_lease(ALICE, until(6)))
    line = phrases.waiter_line(ticket, NOW, "1. ", None)
    assert "18:00" not in phrases.plain(line)


@pytest.mark.parametrize("width", [24, 60, 80, 120, 200])
def test_it_has_room_everywhere(width: int) -> None:
    """In a terminal of any width all of it can be read, and no line is wider."""
    terms = until(6, HOUR_S, **WANTED)
    status = Status((row(0, with_lease(ALICE, terms)),), time=NOW, frontend=MAGIC)
    lines = terminal.lines(status.picture().layout, width, is_colored=False)
    assert all(columns.width_of(line) <= width for line in lines)
    text = re.sub(r"\s+", " ", " ".join(lines))
    assert "until 18:00 or after 1 h idle, longer if no other process waits" in text


def test_in_html_what_is_overdue_is_marked() -> None:
    """A notebook shows in the style of what people argue about that somebody is overdue."""
    status = Status((row(0, with_lease(ALICE, until(-1))),), time=NOW)
    mark = f'<span style="{html.STYLES[MARK]}">overdue since 11:00</span>'
    assert mark in html.html(status.picture().layout)


def metric(name: str, *rows: DeviceStatus) -> dict[str, float]:
    text = prometheus.text(Status(rows, time=NOW))
    found = re.findall(rf'^reserve_gpu_{name}{{.*username="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {user: float(value) for user, value in found}


def test_metrics() -> None:
    """The end is a metric of who has named one, and how long it is past is one of each holder."""
    late = with_lease(BOB, until(-1))
    rows = row(0, ALICE), row(1, late, with_lease(late, until(1)))
    assert metric("until_timestamp_seconds", *rows) == {"bob": NOW + HOUR_S}
    assert metric("overdue_seconds", *rows) == {"alice": 0, "bob": HOUR_S}


# -- what comes free -------------------------------------------------------------------------------


def likeliest(*rows: DeviceStatus) -> str:
    return phrases.plain(contacts.next_free(rows, NOW))


def test_the_earliest_end_is_likeliest() -> None:
    """Who has said when comes before who is idle, and the earliest before the others."""
    idle = row(0, ALICE, is_unused=True)
    late, early = row(1, with_lease(BOB, until(7))), row(2, with_lease(BOB, until(6)))
    assert likeliest(idle, late, early) == "GPU2, reserved until 18:00"
    assert likeliest(idle, late) == "GPU1, reserved until 19:00"
    assert likeliest(idle, row(1, BOB)) == "GPU0, idle for 2 h"
    assert likeliest(row(1, BOB)) == ""


def test_what_is_idle_ends_by_what_is_seen() -> None:
    """Who lets go when idle does so that long after the last sign of use, if that is earlier."""
    idle = with_lease(ALICE, until(6, HOUR_S), last_cell=NOW - 1800)
    rows = row(0, idle, is_unused=True), row(1, with_lease(BOB, until(1)))
    assert likeliest(*rows) == "GPU0, idle for 30 min, released after 1 h idle"
    assert likeliest(row(0, idle), rows[1]) == "GPU1, reserved until 13:00"


def test_what_is_past_its_end_is_likeliest() -> None:
    """Overdue ones, and those that are held only while nobody waits, come before all others."""
    early, late = row(0, with_lease(ALICE, until(1))), row(1, with_lease(BOB, until(-1)))
    assert likeliest(early, late) == "GPU1, overdue since 11:00"
    kind = row(2, with_lease(BOB, until(-1.5, **WANTED)), is_unused=True)
    assert (
        likeliest(early, late, kind) == "GPU2, idle for 2 h, past 10:30: join the queue to get it"
    )


def test_of_several_the_last_one_counts() -> None:
    """A shared GPU is free when the last sharer has gone, and nobody knows when if one is open."""
    early, late = with_lease(ALICE, until(1)), with_lease(BOB, until(3))
    other = row(1, with_lease(BOB, until(2)))
    assert likeliest(row(0, early, late), other) == "GPU1, reserved until 14:00"
    assert likeliest(row(0, early, late)) == "GPU0, reserved until 15:00"
    assert likeliest(row(0, early, BOB)) == ""


def test_ones_own_is_not_awaited() -> None:
    """What this process has itself is nothing to wait for."""
    own = row(0, with_lease(ALICE, until(1)))._replace(is_mine=True)
    assert likeliest(own) == ""


def test_whom_to_ask() -> None:
    """Idle ones are asked first, then who is overdue, of sharers that one alone."""
    late = with_lease(BOB, until(-1))
    rows = row(0, ALICE, late), row(1, ALICE._replace(last_cell=NOW - 3600), is_unused=True)
    assert phrases.plain(contacts.users_to_ask(rows, NOW)) == (
        "Ask alice (train.ipynb) for GPU1, idle for 1 h. "
        "Ask bob (fit.ipynb) for GPU0, overdue since 11:00."
    )
    assert ("overdue since 11:00", MARK) in contacts.users_to_ask(rows, NOW)


def test_a_wait_names_it() -> None:
    """The picture of a wait ends with the GPU that is likeliest to come free."""
    now = time.time()
    busy = DeviceStatus(GPUS[0], State.RESERVED, COMPUTED_ON, holders=(ALICE,))
    ending = with_lease(ALICE, Lease(until=now + 9 * DAY_S), since=now - 9)
    waiting = Waiting(Request(), 1, 5.0, (busy, busy._replace(device=GPUS[1], holders=(ending,))))
    (line,) = pictures.wait(waiting).layout.foot
    expected = durations.moment(now + 9 * DAY_S, now)
    assert phrases.plain(line) == f"Probably free next: GPU1, reserved until {expected}"
