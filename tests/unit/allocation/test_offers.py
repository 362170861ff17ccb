"""What is free is offered to the first in the queue, then to the next; and who is seen at all."""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING

import pytest

from tests.support.offers import Waiters

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ
LOOKS = 300  # far more than an offer lasts, at TICK_S each


# -- offers ----------------------------------------------------------------------------------------


@pytest.fixture
def waiters(tmp_path: Path) -> Iterator[Waiters]:
    with ExitStack() as stack:
        yield Waiters(tmp_path / "locks", stack)


def test_offer_lapses(waiters: Waiters) -> None:
    """A free device that the waiters of a user leave alone goes to the waiter behind them."""
    _, _, third = (waiters.join() for _ in range(3))
    seen: list[int | None] = []
    while None not in seen and len(seen) < LOOKS:
        seen.append(waiters.look(third))
    assert [number for number, _ in groupby(seen)] == [0, None]


def test_offer_of_each_device(waiters: Waiters) -> None:
    """Another device that comes free later is the first one's for as long."""
    _, second = waiters.join(), waiters.join()
    assert any(waiters.look(second) is None for _ in range(LOOKS))
    assert waiters.look(second, UUIDS[1]) == 0


def test_a_waiter_that_changes_its_wish_keeps_no_device(waiters: Waiters) -> None:
    """A waiter that wants another device at each look keeps none for longer than an offer lasts."""
    first, second = waiters.join(UUIDS[0]), waiters.join()
    for number in range(LOOKS):
        first.want([UUIDS[number % 2]])
        if waiters.look_at_all(second, UUIDS) == [None, None]:
            return
    pytest.fail("the waiter still keeps a device")


def test_an_offer_that_is_withdrawn_ends_at_no_known_time(waiters: Waiters) -> None:
    """Once a free device is too little for a waiter, no moment is known at which it is passed."""
    _, second = waiters.join(), waiters.join()
    for _ in range(2):  # the second heartbeat shows that the waiter is not stopped
        assert waiters.look(second) == 0
    assert second.passes_at < math.inf
    assert waiters.look_at_all(second, UUIDS[:1], is_enough=False) == [0]
    assert second.passes_at == math.inf


def test_an_offer_starts_again_after_the_device_was_in_use(waiters: Waiters) -> None:
    """The time of an offer does not go on after a look that found the device reserved."""
    _, second = waiters.join(), waiters.join()
    assert waiters.look(second) == 0
    end = time.monotonic() + 2 * STOPPED_S
    while time.monotonic() < end:
        assert waiters.look_at_all(second, []) == []
    assert waiters.look(second) == 0


def test_offer_to_who_can_use_it(waiters: Waiters) -> None:
    """Who does not want a device is not waited for."""
    waiters.join(UUIDS[1])
    assert waiters.look(waiters.join()) is None


def test_no_offer(waiters: Waiters) -> None:
    """What is in use is no offer, however long it lasts."""
    _, second = waiters.join(), waiters.join()
    end = time.monotonic() + 3 * STOPPED_S
    while time.monotonic() < end:
        assert waiters.look(second, is_free=False) == 0


def test_offer_anew(waiters: Waiters) -> None:
    """A device that was in use meanwhile is offered to the first in the queue once more."""
    _, second = waiters.join(), waiters.join()
    assert any(waiters.look(second) is None for _ in range(LOOKS))
    assert waiters.look(second, is_free=False) == 0
    assert waiters.look(second) == 0


def test_offer_to_who_left_and_came(waiters: Waiters) -> None:
    """Who takes what is offered, and joins later, comes after all and holds nobody up."""
    first, second = waiters.join(), waiters.join()
    assert waiters.look(second) == 0
    first.is_served = True
    first.__exit__()
    waiters.places.remove(first)
    assert waiters.look(second) is None
    assert waiters.look(waiters.join()) == 0


@pytest.mark.parametrize("needs", ["2", True, 0, -1, 1.5, None, [2]], ids=repr)
def test_forged_needs(waiters: Waiters, needs: object) -> None:
    """A ticket that says no number of devices is one for a single device."""
    waiters.join(needs=needs)
    with waiters.directory.mutex():
        (ticket,) = waiters.directory.tickets()
    assert ticket.needs == 1


# -- who is seen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [10**9, 2 * 10**9], ids=["ext3", "FAT"])
def test_coarse_time_stamps(waiters: Waiters, monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    """Where the file system keeps less of a time than is set, there is one order for all."""
    exact = os.utime

    def coarse(path: int, *, ns: tuple[int, int]) -> None:
        exact(path, ns=(ns[0] // unit * unit, ns[1] // unit * unit))

    monkeypatch.setattr(os, "utime", coarse)
    places = [waiters.join() for _ in range(3)]
    with waiters.directory.mutex():
        ahead = [[ticket.name for ticket in entry.ahead()] for entry in places]
        names = [ticket.name for ticket in waiters.directory.tickets()]
    assert sorted(ahead) == [names[:number] for number in range(3)]
