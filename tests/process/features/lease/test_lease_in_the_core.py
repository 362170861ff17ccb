"""Leases where the core is tested, too: hints, threads, descriptors, and the lock of imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.descriptors import BEFORE, assert_all_are_told
from tests.support.executor import LOCK_IMPORTS
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.machine import Machine


@pytest.mark.parametrize("before", BEFORE)
def test_no_descriptor_is_left(machine: Machine, before: str) -> None:
    """Who can open no more files reads that where a reservation is to end, too."""
    assert_all_are_told(machine, before, "for_='1h'")


def test_the_import_lock_that_a_signal_has_left(machine: Machine) -> None:
    """With the import lock left by a handler a reservation with an end goes on."""
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve("'1', for_='1h'").error is None
        assert child.run("reserve_gpu.release()\nstr(reserve_gpu.current())").value == "None"


def test_the_end_of_a_lease_needs_no_lock_of_imports(machine: Machine) -> None:
    """With that lock left to the main thread a lease ends: the GPU is free, the variables empty."""
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve("for_=0.5").error is None
        wait_for(lambda: child.run("str(reserve_gpu.current())").value == "None")
        assert child.run("os.environ['CUDA_VISIBLE_DEVICES']").value == ""
