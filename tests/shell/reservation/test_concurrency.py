"""A reservation that threads or asyncio tasks of one process share."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import reserve_gpu
from tests.support.locked import held

if TYPE_CHECKING:
    from reserve_gpu import Reservation
    from tests.support.here import Here

LONG_S = 30


def test_a_reservation_ends_with_the_last_of_two_threads(here: Here) -> None:
    """Both threads are in a `with` block for the same GPU."""
    entered, outs = threading.Barrier(3), [threading.Event(), threading.Event()]

    def work(out: threading.Event) -> None:
        with reserve_gpu.reserve():
            entered.wait(LONG_S)
            out.wait(LONG_S)

    with ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, out) for out in outs]
        entered.wait(LONG_S)
        outs[0].set()
        working[0].result()
        assert held(here) == [0]
        outs[1].set()
        working[1].result()
    assert held(here) == []
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_reservation_ends_with_the_last_of_two_tasks(here: Here) -> None:
    """Both asyncio tasks are in a `with` block for the same GPU."""

    async def work(ready: asyncio.Event, out: asyncio.Event) -> Reservation:
        with reserve_gpu.reserve() as reservation:
            ready.set()
            await out.wait()
            return reservation

    async def main() -> None:
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
        tasks = [asyncio.create_task(work(*pair)) for pair in events]
        for ready, _ in events:
            await ready.wait()
        events[0][1].set()
        first = await tasks[0]
        assert reserve_gpu.current() is first
        events[1][1].set()
        assert await tasks[1] is first

    asyncio.run(main())
    assert reserve_gpu.current() is None
    assert held(here) == []
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_the_event_loop_runs_while_a_thread_waits_for_a_gpu(here: Here) -> None:
    """The result of `asyncio.to_thread(reserve, wait=...)` can be used in a `with` statement."""

    async def main() -> None:
        is_waiting, loop = asyncio.Event(), asyncio.get_running_loop()

        def show(_: object) -> None:
            loop.call_soon_threadsafe(is_waiting.set)

        with ExitStack() as stack:
            stack.enter_context(here.rival("1"))
            asking = asyncio.create_task(
                asyncio.to_thread(reserve_gpu.reserve, "1", wait=LONG_S, progress=show)
            )
            await asyncio.wait_for(is_waiting.wait(), LONG_S)
            assert not asking.done()
            stack.close()
            with await asking as reservation:
                assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
                assert repr(reservation) == "<Reservation of GPU1>"
        assert reserve_gpu.current() is None

    asyncio.run(main())
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert held(here) == []
