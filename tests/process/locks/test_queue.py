"""Waiting processes: the order of service, killed and stopped processes, and the display."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.allocation import policy
from tests.support import users
from tests.support.platforms import CONTAINER, behind
from tests.support.processes import wait_for
from tests.support.waiters import Waiter, queued, stopped

if TYPE_CHECKING:
    from tests.support.machine import Machine

ONE_GPU = "gpu\n  uuid GPU-00000000-0000-4000-8000-000000000000\n"
# A timeout before which a waiter checks a reserved GPU only if /proc/locks shows a change.
NO_CHECK_S = policy.QUIET_S - 0.5
users_machine = users.machine  # the fixture of a machine for several users


@pytest.fixture
def one(machine: Machine) -> Machine:
    """Make a machine with one idle GPU."""
    machine.write(ONE_GPU)
    return machine


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize("is_several", [False, True], ids=["one user", "three users"])
def test_waiters_are_served_first_come_first_served(
    request: pytest.FixtureRequest, *, is_several: bool
) -> None:
    """A GPU that is released, or whose holder is killed, goes to the first waiter in the queue."""
    machine: Machine = request.getfixturevalue("users_machine" if is_several else "machine")
    machine.write(ONE_GPU)
    names = ["root", users.NOBODY, users.DAEMON, "root"]
    children = [users.child_of(machine, u) if is_several else machine.child() for u in names]
    with children[0] as holder, children[1] as a, children[2] as b, children[3] as c:
        assert holder.reserve().value == "0"
        waiters = [Waiter(machine, child) for child in (a, b, c)]
        for place, waiter in enumerate(waiters, 1):
            waiter.sees(place, "reserved")
        for end in (holder.kill, lambda: a.run("reserve_gpu.release()"), b.kill):
            assert queued(machine) == [waiter.pid for waiter in waiters]
            with stopped(machine, waiters[0].pid):
                end()
                for place, waiter in enumerate(waiters[1:], 2):
                    waiter.sees(place, "awaited")  # they don't overtake the slow first waiter
            assert waiters.pop(0).answer().value == "0"
        assert queued(machine) == []


@pytest.mark.promise
def test_a_killed_waiter_leaves_the_queue(one: Machine) -> None:
    """If a waiter is killed, the next waiter is first."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        killed, waiter = Waiter(one, a), Waiter(one, b)
        assert queued(one) == [killed.pid, waiter.pid]
        a.kill()
        assert queued(one) == [waiter.pid]
        waiter.sees(1, "reserved")
        holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


def test_waiters_keep_their_order_in_a_new_lock_directory(one: Machine) -> None:
    """If the lock directory is deleted, waiters rejoin the queue in a new one in the old order."""
    one.write(f"{ONE_GPU}  compute 4321000 3500\n")
    with one.child() as a, one.child() as b, one.child() as c:
        first, second = Waiter(one, a), Waiter(one, b)
        shutil.rmtree(one.locks)
        wait_for(lambda: sorted(queued(one)) == sorted([first.pid, second.pid]))
        assert queued(one) == [first.pid, second.pid]
        third = Waiter(one, c)
        one.write(ONE_GPU)
        for waiter in (first, second, third):
            assert waiter.answer().value == "0"
            waiter.child.run("reserve_gpu.release()")


# -- the end of a wait -----------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize("when", ["during the wait", "while the driver starts"])
def test_an_interrupt_ends_a_wait(one: Machine, when: str) -> None:
    """Ctrl-C ends a wait or its preparation, hides all GPUs and leaves the queue."""
    with one.child() as holder, one.child() as child:
        if when == "during the wait":
            assert holder.reserve().value == "0"
            Waiter(one, child)
        else:
            one.add("delay nvmlInitWithFlags * 60")
            child.send("reserve_gpu.reserve(wait=True)")
            wait_for(one.calls)
        os.kill(child.pid, signal.SIGINT)
        assert child.answer().error == "KeyboardInterrupt"
        assert queued(one) == []
        assert child.visible() == ""


@pytest.mark.promise
@pytest.mark.parametrize(
    ("end", "place"),
    [
        ("release", "here"),
        ("kill", "here"),
        ("kill", "in a container"),
        pytest.param("release", "in a container", marks=pytest.mark.full),
    ],
)
def test_a_waiter_notices_that_a_gpu_is_free(one: Machine, end: str, place: str) -> None:
    """A waiter notices at once that a GPU is released or its holder killed, even in a container."""
    waiting = one.child() if place == "here" else behind(one, *CONTAINER)
    with one.child() as holder, waiting as child:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child, limit_s=NO_CHECK_S)
        if end == "kill":
            holder.kill()
        else:
            holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"
