"""Processes that wait for parts of a GPU."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.parts import ONE, waiting
from tests.support.platforms import on_a_host
from tests.support.processes import wait_for
from tests.support.reserving import of_gpu, would_be_refused
from tests.support.waiters import Waiter, queued

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine


@on_a_host
def test_an_awaited_gpu_shows_no_unreserved_processes(here: Here) -> None:
    """The processes of the holders of parts are not shown as processes without a reservation."""
    here.write(ONE)
    with here.child() as holder:
        assert holder.reserve("memory='8000MiB'").value == "0"
        here.write(f"{ONE}  compute {holder.pid} 3000\n")
        with waiting(here, 9000):
            text = of_gpu(str(would_be_refused(memory="2000MiB")))
    assert text.startswith("awaited")
    assert f"process {os.getpid()}" in text
    assert "reservation" not in text


def test_small_requests_wait_behind_a_large_one(machine: Machine) -> None:
    machine.write(ONE)
    with ExitStack() as stack:
        first, large, second, third = (stack.enter_context(machine.child()) for _ in range(4))
        assert first.reserve("memory='3000MiB'").value == "0"
        waiter = Waiter(machine, large, "memory='8000MiB'")
        waiter.sees(1, "full")
        assert second.reserve("memory='3000MiB'").error == "NoFreeDeviceError"
        others = [Waiter(machine, child, "memory='3000MiB'") for child in (second, third)]
        for entry, other in enumerate(others, 2):
            other.sees(entry, "awaited")
        assert queued(machine) == [large.pid, second.pid, third.pid]
        first.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"
        for entry, other in enumerate(others, 1):
            other.sees(entry, "full")
        large.kill()
        assert [other.answer().value for other in others] == ["0", "0"]


def test_a_waiter_gets_memory_that_is_given_back(machine: Machine) -> None:
    """The memory comes from a reduced part and from a process without a reservation that ends."""
    machine.write(f"{ONE}  compute 4321000 3000\n")
    with machine.child() as holder, machine.child() as child:
        assert holder.reserve("memory='4000MiB'").value == "0"
        waiter = Waiter(machine, child, "memory='8000MiB'")
        waiter.sees(1, "full")
        assert holder.reserve("memory='2000MiB'").value == "0"
        machine.write(ONE)
        assert waiter.answer().value == "0"
        assert holder.reserve("memory='2001MiB'").error == "NoFreeDeviceError"


# Reserves and releases parts of random sizes until a file exists.
SMALL_REQUESTS = """
import random
dice, files = random.Random({seed}), {files!r}
while not os.path.exists(files + 'end'):
    mib = dice.randrange(500, 5000)
    try:
        reserve_gpu.release()
        reserve_gpu.reserve(memory=f'{{mib}}MiB', wait=dice.choice([None, True]))
        open(files + '{seed}', 'a').close()
    except reserve_gpu.NoFreeDeviceError:
        pass
reserve_gpu.release()
"""


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.full)])
def test_a_stream_of_small_requests_does_not_starve_a_large_one(
    machine: Machine, times: int
) -> None:
    """Each time, the large request waits without a limit, and is granted."""
    machine.write(ONE)
    files = str(machine.folder / "stream ")
    with ExitStack() as stack:
        large, *small = (stack.enter_context(machine.child()) for _ in range(4))
        for seed, child in enumerate(small):
            child.send(SMALL_REQUESTS.format(seed=seed, files=files))
        for _ in range(times):
            wait_for(lambda: all(os.path.exists(f"{files}{seed}") for seed in range(len(small))))
            for seed in range(len(small)):
                os.unlink(f"{files}{seed}")
            assert large.reserve("memory='9500MiB', wait=True").value == "0"
            large.run("reserve_gpu.release()")
        Path(f"{files}end").touch()
        assert [child.answer().error for child in small] == [None] * len(small)
