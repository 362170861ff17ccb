"""Leases where the core is tested, too: hints, threads, descriptors, and the lock of imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.locked import locked
from tests.processes import wait_for
from tests.reserving import got
from tests.test_descriptors import BEFORE, assert_all_are_told
from tests.test_executor import LOCK_IMPORTS, no_threads
from tests.test_frontends import FACES, assert_asks_for

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend
    from tests.here import Here
    from tests.machine import Machine


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_a_hint_can_be_typed_as_it_stands(frontend: Frontend) -> None:
    """What is to be typed asks for the end that was asked for."""
    assert_asks_for(frontend, {"for_": 3660})


def test_the_thread_that_lives_is_enough(here: Here) -> None:
    """Who follows an end has a thread, and needs no other one to change something."""
    reserve_gpu.reserve("0,1", for_="1h")
    with no_threads():
        assert got("1") == "1"
        assert [device.number for device in reserve_gpu.release()] == ["1"]
    assert not locked(here.locks)


@pytest.mark.process
@pytest.mark.parametrize("before", BEFORE)
def test_no_descriptor_is_left(machine: Machine, before: str) -> None:
    """Who can open no more files reads that where a reservation is to end, too."""
    assert_all_are_told(machine, before, "for_='1h'")


@pytest.mark.process
def test_the_import_lock_that_a_signal_has_left(machine: Machine) -> None:
    """With the import lock left by a handler a reservation with an end goes on."""
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve("'1', for_='1h'").error is None
        assert child.run("reserve_gpu.release()\nstr(reserve_gpu.current())").value == "None"


@pytest.mark.process
def test_the_end_of_a_lease_needs_no_lock_of_imports(machine: Machine) -> None:
    """With that lock left to the main thread a lease ends: the GPU is free, the variables empty."""
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve("for_=0.5").error is None
        wait_for(lambda: child.run("str(reserve_gpu.current())").value == "None")
        assert child.run("os.environ['CUDA_VISIBLE_DEVICES']").value == ""
