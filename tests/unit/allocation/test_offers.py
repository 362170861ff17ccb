"""How long a free device is kept for the waiters at the front of the queue."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks.queue import KEEP_FREE_S
from tests.support.offers import STOPPED_S, UUIDS, Waiters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def waiters(tmp_path: Path) -> Iterator[Waiters]:
    """Return an empty queue."""
    with ExitStack() as stack:
        yield Waiters(tmp_path / "locks", stack)


@pytest.mark.parametrize(
    ("is_enough", "limit_s"), [(True, STOPPED_S), (False, KEEP_FREE_S)], ids=["usable", "unusable"]
)
def test_waiters_keep_a_free_device_for_a_limited_time(
    waiters: Waiters, limit_s: float, *, is_enough: bool
) -> None:
    """All waiters of a user share this time, which is longer if they can't use the device yet."""
    _, _, third = (waiters.join() for _ in range(3))
    for passed_s, first in ((0, 0), (limit_s - 0.5, 0), (0.5, None)):
        waiters.pass_time(passed_s)
        assert waiters.check_all(third, UUIDS[:1], is_enough=is_enough) == [first]


def test_each_device_is_offered_for_its_own_time(waiters: Waiters) -> None:
    """The time of an unused offer of one device does not shorten the offer of another."""
    _, second = waiters.join(), waiters.join()
    waiters.check(second)
    waiters.pass_time(STOPPED_S)
    assert waiters.check_all(second, UUIDS) == [None, 0]
    waiters.pass_time(STOPPED_S - 0.5)
    assert waiters.check_all(second, UUIDS) == [None, 0]


def test_a_waiter_that_changes_its_request_keeps_no_device(waiters: Waiters) -> None:
    """A waiter that wants another device at each check keeps none for longer than an offer."""
    first, second = waiters.join(UUIDS[0]), waiters.join()
    for number in range(int(STOPPED_S) + 2):
        first.want([UUIDS[number % 2]])
        found = waiters.check_all(second, UUIDS)
        waiters.pass_time(1)
    assert found == [None, None]


def test_a_withdrawn_offer_has_no_known_end(waiters: Waiters) -> None:
    """While a free device is too small for a waiter, the end of its offer is unknown."""
    _, second = waiters.join(), waiters.join()
    for passed_s in (0, 1):  # the second heartbeat shows that the waiter is not stopped
        waiters.pass_time(passed_s)
        assert waiters.check(second) == 0
        assert second.passes_at == waiters.now_s + STOPPED_S - passed_s
    assert waiters.check_all(second, UUIDS[:1], is_enough=False) == [0]
    assert second.passes_at == math.inf


@pytest.mark.parametrize("uuids", [[], UUIDS[:1]], ids=["not checked", "checked"])
def test_an_offer_starts_again_after_the_device_was_in_use(
    waiters: Waiters, uuids: list[str]
) -> None:
    """The time in which a device is in use does not count, and ends an earlier offer."""
    _, second = waiters.join(), waiters.join()
    assert waiters.check(second) == 0
    for _ in range(2):
        waiters.pass_time(STOPPED_S)
        assert waiters.check_all(second, uuids, is_open=False) == [0] * len(uuids)
    for passed_s, first in ((0, 0), (STOPPED_S - 0.5, 0), (0.5, None)):
        waiters.pass_time(passed_s)
        assert waiters.check(second) == first


def test_a_device_is_not_kept_for_a_waiter_that_does_not_want_it(waiters: Waiters) -> None:
    waiters.join(UUIDS[1])
    assert waiters.check(waiters.join()) is None


def test_a_waiter_that_was_served_joins_again_at_the_end(waiters: Waiters) -> None:
    first, second = waiters.join(), waiters.join()
    assert waiters.check(second) == 0
    first.is_served = True
    first.__exit__()
    waiters.entries.remove(first)
    assert waiters.check(second) is None
    assert waiters.check(waiters.join()) == 0


@pytest.mark.parametrize("needs", ["2", True, 0, 1.5, [2]], ids=repr)
def test_a_ticket_with_an_invalid_count_needs_one_device(waiters: Waiters, needs: object) -> None:
    waiters.join(needs=needs)
    with waiters.directory.mutex():
        (ticket,) = waiters.directory.tickets()
    assert ticket.needs == 1


def test_coarse_file_times_do_not_change_the_order(
    waiters: Waiters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that rounds times, such as FAT, all waiters see the same order."""
    exact, unit = os.utime, 2 * 10**9

    def coarse(path: int, *, ns: tuple[int, int]) -> None:
        exact(path, ns=(ns[0] // unit * unit, ns[1] // unit * unit))

    monkeypatch.setattr(os, "utime", coarse)
    entries = [waiters.join() for _ in range(3)]
    with waiters.directory.mutex():
        ahead = [[ticket.name for ticket in entry.ahead()] for entry in entries]
        names = [ticket.name for ticket in waiters.directory.tickets()]
    assert sorted(ahead) == [names[:number] for number in range(3)]
