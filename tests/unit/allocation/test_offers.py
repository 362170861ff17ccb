"""How long a free device is kept for the waiters at the front of the queue."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("needs", ["2", 0], ids=repr)
def test_a_ticket_with_an_invalid_count_needs_one_device(waiters: Waiters, needs: object) -> None:
    waiters.join(needs=needs)
    with waiters.directory.mutex():
        (ticket,) = waiters.directory.tickets()
    assert ticket.needs == 1
