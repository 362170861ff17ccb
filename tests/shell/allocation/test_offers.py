"""Free GPUs are offered to the first waiter, then to the next, in complete attempts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import Denied, Granted, attempt
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import State
from tests.support.locked import held
from tests.support.offers import EnoughError, Waiters, attempts, request_context

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.mark.parametrize(("request_", "needs"), [({"count": 2}, 2), ({"devices": "0"}, 1)])
def test_a_ticket_says_how_many_devices_its_waiter_needs(
    here: Here, request_: dict[str, Any], needs: int
) -> None:
    seen: list[int] = []

    def read_tickets(_: object) -> None:
        with LockDirectory(str(here.locks)) as directory, directory.mutex():
            seen.extend(ticket.needs for ticket in directory.tickets())
        raise EnoughError

    with here.rival("0"), pytest.raises(EnoughError):
        reserve_gpu.reserve(**request_, wait=True, progress=read_tickets)
    assert seen == [needs]


def states(outcome: Granted | Denied) -> list[State]:
    """Return the state of each device in a refusal."""
    assert isinstance(outcome, Denied)
    return [row.state for row in outcome.rows]


def test_a_gpu_that_the_first_waiter_leaves_goes_to_the_next_waiter(here: Here) -> None:
    """A request without a place in the queue still does not get this GPU."""
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        for outcome in attempts(here, waiters):
            if isinstance(outcome, Granted):
                assert held(here) == [0]
            else:
                assert states(outcome) == [State.AWAITED]
        assert isinstance(outcome, Granted)
        with Nvml() as gpus:
            newcomer = attempt(request_context("0", gpus, waiters.directory))
            assert states(newcomer) == [State.AWAITED]


IN_USE = "gpu\n memory 16384\ngpu\n memory 16384\n compute 4321 9000\n"


@pytest.mark.parametrize(
    ("scenario", "has_rival", "part_mib"),
    [(None, True, None), (IN_USE, False, None), (IN_USE, False, 12000), (None, True, 1000)],
    ids=["whole and reserved", "whole and in use", "part and too small", "part and reserved"],
)
def test_a_waiter_for_two_gpus_keeps_the_free_one(
    here: Here, scenario: str | None, part_mib: float | None, *, has_rival: bool
) -> None:
    """While the other GPU is unavailable, the free one is not offered to the next waiter."""
    if scenario:
        here.write(scenario)
    with ExitStack() as stack:
        if has_rival:
            stack.enter_context(here.rival("1"))
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2, part_mib=part_mib)
        assert all(isinstance(outcome, Denied) for outcome in attempts(here, waiters))


@pytest.mark.parametrize("part_mib", [None, 1000])
def test_a_waiter_that_leaves_two_free_gpus_is_passed(here: Here, part_mib: float | None) -> None:
    """A waiter that could have both GPUs keeps one of them only as long as an offer lasts."""
    if part_mib:
        here.write(IN_USE)
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2, part_mib=part_mib)
        first, *_, last = attempts(here, waiters)
        assert isinstance(first, Denied)
        assert isinstance(last, Granted)
