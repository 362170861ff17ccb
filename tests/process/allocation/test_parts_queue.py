"""Parts and the queue: nobody passes for one either, and an offer of too little is none."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.parts import ONE
from tests.support.platforms import on_a_host
from tests.support.processes import wait_for
from tests.support.reserving import of_gpu, would_be_refused
from tests.support.waiters import Waiter, queued

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.parts_queue import waiting


@on_a_host
def test_what_sharers_run_is_theirs_where_others_wait(here: Here) -> None:
    """A GPU in parts that somebody waits for is awaited, and its sharers' processes are theirs."""
    here.write(ONE)
    with here.child() as sharer:
        assert sharer.reserve("memory='8000MiB'").value == "0"
        here.write(f"{ONE}  compute {sharer.pid} 3000\n")
        with waiting(here, 9000):
            text = of_gpu(str(would_be_refused(memory="2000MiB")))
    assert text.startswith("awaited: ")
    assert f"by your process {os.getpid()}" in text
    assert "reservation" not in text


# -- processes -------------------------------------------------------------------------------------


def test_a_large_one_gets_its_turn(machine: Machine) -> None:
    """Small ones that come later wait behind a large one; then all get it."""
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
        for other in others:
            other.sees(1 + others.index(other), "full")
        large.kill()
        assert [other.answer().value for other in others] == ["0", "0"]


def test_what_is_given_back_goes_to_who_waits(machine: Machine) -> None:
    """Who waits for a part gets it once another gives some back and a stranger's process ends."""
    machine.write(f"{ONE}  compute 4321000 3000\n")
    with machine.child() as holder, machine.child() as child:
        assert holder.reserve("memory='4000MiB'").value == "0"
        waiter = Waiter(machine, child, "memory='8000MiB'")
        waiter.sees(1, "full")
        assert holder.reserve("memory='2000MiB'").value == "0"
        machine.write(ONE)
        assert waiter.answer().value == "0"
        assert holder.reserve("memory='2001MiB'").error == "NoFreeDeviceError"


STREAM = """
import random, time
dice, files = random.Random({seed}), {files!r}
while not os.path.exists(files + 'end'):
    mib = dice.randrange(500, 5000)
    try:
        reserve_gpu.release()
        reserve_gpu.reserve(memory=f'{{mib}}MiB', wait=dice.choice([None, 0.05, 30]))
        open(files + '{seed}', 'a').close()
    except reserve_gpu.NoFreeDeviceError:
        pass
    time.sleep(dice.random() / 20)
reserve_gpu.release()
"""


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.full)])
def test_nobody_starves_under_a_stream(machine: Machine, times: int) -> None:
    """A large part is had, again and again, while others take and leave small ones all the time."""
    machine.write(ONE)
    files = str(machine.folder / "stream ")
    with ExitStack() as stack:
        large, *small = (stack.enter_context(machine.child()) for _ in range(5))
        for seed, child in enumerate(small):
            child.send(STREAM.format(seed=seed, files=files))
        for _ in range(times):
            wait_for(lambda: all(os.path.exists(f"{files}{seed}") for seed in range(len(small))))
            for seed in range(len(small)):
                os.unlink(f"{files}{seed}")
            assert large.reserve("memory='9500MiB', wait=60").value == "0"
            large.run("reserve_gpu.release()")
        Path(f"{files}end").touch()
        assert [child.answer().error for child in small] == [None] * len(small)
