"""A reservation that threads or asyncio tasks of one process share."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import reserve_gpu
from tests.support.locked import held

if TYPE_CHECKING:
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
