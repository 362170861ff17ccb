"""Parts and the queue: nobody passes for one either, and an offer of too little is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import parse
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import State
from tests.support.parts import ONE, part, promised
from tests.support.reserving import would_be_refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reserve_gpu.locks.queue import QueueEntry
    from tests.support.here import Here

from tests.support.parts_queue import waiting

STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ


# -- whose turn it is ------------------------------------------------------------------------------


def test_a_small_one_does_not_pass_a_large_one(here: Here) -> None:
    """First come, first served, among parts too, whether there is room for the first or not."""
    here.write(ONE)
    wishes: list[dict[str, Any]] = [{}, {"memory": "1000MiB"}]
    for ahead in (5000, 9000, None):
        with promised(here, gpu0=[2000] if ahead == 9000 else []), waiting(here, ahead):
            for wish in wishes:
                states = [row.state for row in would_be_refused(**wish).rows]
                is_held = ahead == 9000 and not wish
                assert states == [State.RESERVED if is_held else State.AWAITED]


def test_who_grows_passes_nobody(here: Here) -> None:
    """Who has a part and wants more stands behind who waits for it, and keeps the part."""
    here.write(ONE)
    assert part(1000) == "0"
    with promised(here, gpu0=[4000, 4000]), waiting(here, 5000):
        (row,) = would_be_refused(memory="2000MiB").rows
        assert row.state is State.AWAITED
        assert part(600) == "0"
    assert reserve_gpu.current()


def test_less_on_one_of_two(here: Here) -> None:
    """Who gives some back and takes another GPU besides is in nobody's way on the first."""
    here.write(ONE * 2)
    assert part(9000, "0") == "0"
    with waiting(here, 9500):
        assert part(2000, "0,1") == "0,1"


@pytest.mark.parametrize("size", [-1, float("nan"), "10", [1]], ids=repr)
def test_a_ticket_that_makes_no_sense(here: Here, size: object) -> None:
    """Who waits for a size that makes no sense waits for the whole GPU."""
    here.write(ONE)
    with promised(here, gpu0=[8000]), waiting(here, size):  # type: ignore[arg-type]
        (row,) = would_be_refused(memory="1000MiB").rows
        assert row.state is State.AWAITED


# -- offers ----------------------------------------------------------------------------------------


def outcomes(here: Here, mib: float, *ahead: QueueEntry) -> Iterator[Granted | Denied]:
    """Look again and again, for much longer than an offer lasts, behind some who are well.

    mib: of the part that is wanted.
    """
    inherited = dict.fromkeys(cuda_environment.VARIABLES)
    request = parse(None, memory=f"{mib}MiB")
    with (
        waiting(here, mib, stopped_s=STOPPED_S) as entry,
        Nvml() as gpus,
        LockDirectory(str(here.locks)) as directory,
    ):
        context = AttemptContext(request, gpus, directory, inherited, {})
        end = time.monotonic() + 5 * STOPPED_S
        while time.monotonic() < end:
            time.sleep(TICK_S)
            for other in ahead:
                other.heartbeat()
            outcome = attempt(context, entry=entry)
            yield outcome
            if isinstance(outcome, Granted):
                for locked in outcome.locked:
                    locked.lock.release()
                return


@pytest.mark.parametrize("ahead", [8000, None], ids=["large", "whole"])
def test_too_little_room_is_no_offer(here: Here, ahead: float | None) -> None:
    """Who waits for more than there is lets nothing lie: however long, nobody passes."""
    here.write(ONE)
    with promised(here, gpu0=[6000]), waiting(here, ahead) as entry:
        for outcome in outcomes(here, 3000, entry):
            assert isinstance(outcome, Denied)
            assert [row.state for row in outcome.rows] == [State.AWAITED]


def test_an_offer_lapses(here: Here) -> None:
    """Who could have what is waited for and does not take it is passed after a while."""
    here.write(ONE)
    with promised(here, gpu0=[1000]), waiting(here, 8000) as entry:
        seen = list(outcomes(here, 3000, entry))
        assert isinstance(seen[0], Denied)
        assert isinstance(seen[-1], Granted)
