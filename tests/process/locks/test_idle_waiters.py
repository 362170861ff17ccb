"""Real waiters: holders that release or die, users, containers, kernels, a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from tests.support.machine import Machine


pytestmark = pytest.mark.process

ONE = "gpu\n  uuid GPU-00000000-0000-4000-8000-000000000000\n"


@pytest.fixture
def one(machine: Machine) -> Machine:
    """Make a machine with one idle GPU."""
    machine.write(ONE)
    return machine


@pytest.mark.full
def test_a_waiter_hardly_works(one: Machine) -> None:
    """Those who wait for what is reserved take 2 % of a core each at most."""
    children = one.child(), one.child(), one.child(), one.child()
    with children[0] as holder, children[1] as a, children[2] as b, children[3] as c:
        assert holder.reserve().value == "0"
        processes = [psutil.Process(Waiter(one, child).pid) for child in (a, b, c)]
        time.sleep(1)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(6)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        assert all(late - early <= 0.12 for early, late in zip(before, after, strict=True))
