"""What is free is offered to the first in the queue, then to the next; and who is seen at all."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import Denied, Granted, attempt
from reserve_gpu.allocation.request import idle_mib
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import State
from tests.support.locked import held

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.offers import EnoughError, Waiters, asking_for_gpu0, attempts

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ
LOOKS = 300  # far more than an offer lasts, at TICK_S each
LONG_S = 30


@pytest.mark.parametrize(("wishes", "needs"), [({"count": 2}, 2), ({"devices": "0"}, 1)])
def test_needs_are_told(here: Here, wishes: dict[str, Any], needs: int) -> None:
    """Who waits says in his ticket how many devices he needs at once."""
    seen: list[int] = []

    def look(_: object) -> None:
        with LockDirectory(str(here.locks)) as directory, directory.mutex():
            seen.extend(ticket.needs for ticket in directory.tickets())
        raise EnoughError

    with here.rival("0"), pytest.raises(EnoughError):
        reserve_gpu.reserve(**wishes, wait=LONG_S, progress=look)
    assert seen == [needs]


def states(outcome: Granted | Denied) -> list[State]:
    assert isinstance(outcome, Denied)
    return [row.state for row in outcome.rows]


def test_who_calls_it_busy_keeps_nobody_out(here: Here) -> None:
    """A free GPU that the first in the queue does not take is the next one's, not a newcomer's."""
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        for outcome in attempts(here, waiters):
            if isinstance(outcome, Granted):
                assert held(here) == [0]
                outcome.locked[0].lock.release()
            else:
                assert states(outcome) == [State.AWAITED]
        assert isinstance(outcome, Granted)
        with Nvml() as gpus:
            newcomer = attempt(asking_for_gpu0(gpus, waiters.directory))
            assert states(newcomer) == [State.AWAITED]


def test_awaited_by_the_limit_that_was_set(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is idle by the limit that was set is awaited where others come first."""
    here.write("gpu\n name A\n memory 16384\n used 2048\n")
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "3GiB")
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        context = asking_for_gpu0(stack.enter_context(Nvml()), waiters.directory)
        assert states(attempt(context._replace(idle_mib=idle_mib()))) == [State.AWAITED]


IN_USE = "gpu\n memory 16384\ngpu\n memory 16384\n compute 4321 9000\n"


@pytest.mark.parametrize(
    ("scenario", "has_rival", "memory_limit_mib"),
    [(None, True, None), (IN_USE, False, None), (IN_USE, False, 12000), (None, True, 1000)],
    ids=["reserved", "in use", "too little", "whole"],
)
def test_who_needs_several_keeps_one(
    here: Here, scenario: str | None, memory_limit_mib: float | None, *, has_rival: bool
) -> None:
    """A free GPU that the first in the queue needs together with another stays for him."""
    if scenario:
        here.write(scenario)
    with ExitStack() as stack:
        if has_rival:
            stack.enter_context(here.rival("1"))
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2, part_mib=memory_limit_mib)
        end = time.monotonic() + 3 * STOPPED_S
        for outcome in attempts(here, waiters):
            assert isinstance(outcome, Denied)
            if time.monotonic() > end:
                break


@pytest.mark.parametrize("memory_limit_mib", [None, 1000])
def test_who_leaves_several_alone_is_passed(here: Here, memory_limit_mib: float | None) -> None:
    """Who takes none of the GPUs that lie free for him together keeps nobody from one of them."""
    if memory_limit_mib:
        here.write(IN_USE)
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2, part_mib=memory_limit_mib)
        outcomes = list(attempts(here, waiters))
        assert isinstance(outcomes[0], Denied)
        assert isinstance(outcomes[-1], Granted)
