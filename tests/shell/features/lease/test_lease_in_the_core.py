"""Leases where the core is tested, too: hints, threads, descriptors, and the lock of imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import reserve_gpu
from tests.support.executor import no_threads
from tests.support.locked import locked
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here


def test_the_thread_that_lives_is_enough(here: Here) -> None:
    """Who follows an end has a thread, and needs no other one to change something."""
    reserve_gpu.reserve("0,1", for_="1h")
    with no_threads():
        assert got("1") == "1"
        assert [device.number for device in reserve_gpu.release()] == ["1"]
    assert not locked(here.locks)
