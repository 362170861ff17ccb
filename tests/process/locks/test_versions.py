"""An earlier version and today's version together on one machine.

Each test runs in both directions: `first` is one of the two versions, and `second` the other.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import CHILD
from tests.support.waiters import Waiter, queued, stopped

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.versions import Version

# -- holders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "request_text", "others"),
    [
        ("two", "'0'", ["'0'", "'0', memory='1GB'", "'0,1'"]),
        ("eight", "'0', memory='50GB'", ["'0'", "'0', memory='40GB'"]),
    ],
    ids=["whole", "part"],
)
def test_each_version_refuses_what_the_other_holds(
    here: Here, first: Version, second: Version, scenario: str, request_text: str, others: list[str]
) -> None:
    """A GPU, a part or an instance that one version holds is refused by the other."""
    here.use(scenario)
    with first.child() as holder, second.child() as other:
        visible = holder.reserve(request_text).value
        assert visible
        for refused in others:
            answer = other.reserve(refused)
            assert answer.error == "NoFreeDeviceError"
            assert f"{CHILD} (pid {holder.pid})" in answer.text
        assert holder.visible() == visible
        free = other.reserve().value
        assert free
        assert free != visible
        holder.run("reserve_gpu.release()")
        assert other.reserve(request_text).value == visible


# -- the queue -------------------------------------------------------------------------------------


def test_both_versions_wait_in_one_queue(here: Here, first: Version, second: Version) -> None:
    """Waiters of alternating versions get the GPU in the order in which they joined."""
    here.write("gpu")
    with ExitStack() as stack:
        versions = (first, second, first, second)
        holder, *children = (stack.enter_context(version.child()) for version in versions)
        holder.reserve()
        waiters = [Waiter(here, child) for child in children]
        pids = [child.pid for child in children]
        assert queued(here) == pids
        for version in (first, second):
            assert [each["pid"] for each in version.status()["waiting"]] == pids
        for place, waiter in enumerate(waiters, 1):
            waiter.sees(place, "reserved")
        with stopped(here, pids[0]):
            holder.run("reserve_gpu.release()")
            for place, waiter in enumerate(waiters[1:], 2):
                waiter.sees(place, "awaited")  # they don't overtake the slow first waiter
        for waiter in waiters:
            assert waiter.answer().value == "0"
            pids = pids[1:]
            assert queued(here) == pids
            waiter.child.run("reserve_gpu.release()")
