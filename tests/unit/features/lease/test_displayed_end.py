"""When a reservation ends, as other users see it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from reserve_gpu.commands.export import prometheus
from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.requests import Lease
from reserve_gpu.render import durations, phrases
from reserve_gpu.render.phrases import MARK
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed

HOUR_S = 3600.0
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))  # a Friday
ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 2 * HOUR_S, seen=True)
BOB = changed(ALICE, pid=4410, user="bob", notebook="fit.ipynb")
USED = Usage(compute=1, mps=0, total_mib=40960, used_mib=3500)


def lease(hours: float | None = None, idle_s: float | None = None, **options: bool) -> Lease:
    """Return a lease that ends this many hours after NOW."""
    until = None if hours is None else NOW + hours * HOUR_S
    return Lease(until=until, idle_s=idle_s, **options)


def with_lease(holder: Holder, lease: Lease, **changes: Any) -> Holder:
    """Return the holder with that lease."""
    return changed(holder, terms=holder.record.terms._replace(lease=lease), **changes)


def row(number: int, *holders: Holder) -> DeviceStatus:
    """Return a reserved device."""
    device = Device(number, f"GPU-{number}", memory_mib=40960)
    return DeviceStatus(device, State.RESERVED, USED, holders=holders)


@pytest.mark.parametrize(
    ("hours", "expected"),
    [
        (6, "18:00"),
        (-13, "Thu 23:00"),
        (5 * 24, "Wed 12:00"),
        (6 * 24, "2026-11-26 12:00"),
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
        pytest.param(NOW, lease(), NOW - 1, id="overdue before start"),
        pytest.param(NOW, lease(), NOW + 9e10, id="overdue in 3000 years"),
    ],
)
def test_implausible_end_is_not_shown(
    since: float | None, terms: Lease, overdue: float | None
) -> None:
    holder = with_lease(ALICE, terms, since=since, overdue=overdue)
    assert phrases.lease_end(holder, NOW) == ()


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
