"""Requests for parts of a GPU, and waiters for parts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import Denied, Granted
from reserve_gpu.allocation.request import parse
from reserve_gpu.model.devices import State
from tests.support.offers import Waiters, attempts
from tests.support.parts import ONE, part, promised, waiting
from tests.support.reserving import would_be_refused

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.mark.parametrize(
    ("others", "ahead_mib", "whole"),
    [([], 5000, State.AWAITED), ([2000], 9000, State.RESERVED), ([], None, State.AWAITED)],
    ids=["enough room", "too little room", "whole GPU"],
)
def test_a_small_request_does_not_pass_a_large_one(
    here: Here, others: list[object], ahead_mib: float | None, whole: State
) -> None:
    """The order of waiters for parts does not depend on the available memory."""
    here.write(ONE)
    with promised(here, gpu0=others), waiting(here, ahead_mib):
        assert [row.state for row in would_be_refused(memory="1000MiB").rows] == [State.AWAITED]
        assert [row.state for row in would_be_refused().rows] == [whole]


def test_a_larger_part_does_not_pass_waiters(here: Here) -> None:
    """A holder of a part that requests a larger part keeps its part; a smaller one is granted."""
    here.write(ONE)
    assert part(1000) == "0"
    with promised(here, gpu0=[4000, 4000]), waiting(here, 5000):
        (row,) = would_be_refused(memory="2000MiB").rows
        assert row.state is State.AWAITED
        assert part(600) == "0"
    assert reserve_gpu.current()


def test_a_smaller_part_on_another_gpu_as_well_passes_waiters(here: Here) -> None:
    """A waiter for the first GPU is not delayed by a holder that gives back some of it."""
    here.write(ONE * 2)
    assert part(9000, "0") == "0"
    with waiting(here, 9500):
        assert part(2000, "0,1") == "0,1"


@pytest.mark.parametrize(
    ("others_mib", "ahead_mib", "last"),
    [(6000, 8000, Denied), (6000, None, Denied), (1000, 8000, Granted)],
    ids=["too little for a part", "too little for the whole GPU", "enough"],
)
def test_only_enough_memory_is_an_offer_to_a_waiter(
    here: Here, others_mib: int, ahead_mib: float | None, last: type[Denied | Granted]
) -> None:
    """A waiter is passed only if it leaves enough memory unused for some time."""
    here.write(ONE)
    with promised(here, gpu0=[others_mib]), ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), part_mib=ahead_mib)
        outcomes = list(attempts(here, waiters, parse(None, memory="3000MiB")))
        assert isinstance(outcomes[-1], last)
        for outcome in outcomes[:-1]:
            assert isinstance(outcome, Denied)
            assert [row.state for row in outcome.rows] == [State.AWAITED]
