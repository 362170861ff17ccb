"""Parts and the queue: nobody passes for one either, and an offer of too little is none."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import parse
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.devices import State
from reserve_gpu.model.holders import Record
from tests.processes import wait_for
from tests.reserving import of_gpu, would_be_refused
from tests.test_machines import on_a_host
from tests.test_parts import ONE, part, promised
from tests.waiters import Waiter, queued

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here
    from tests.machine import Machine

STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ


@contextmanager
def waiting(
    here: Here,
    memory_limit_mib: float | None,
    *numbers: str,
    needs: int = 1,
    stopped_s: float = 5.0,
) -> Iterator[QueueEntry]:
    """Let somebody wait for a part of one of the GPUs, or None for all of one."""
    wants = [here.uuid(number) for number in numbers or ("0",)]
    about = {"user": "carol", "part_mib": memory_limit_mib, "needs": needs}
    with (
        LockDirectory(str(here.locks)) as directory,
        QueueEntry(directory, wants, Record.from_dict(about), stopped_s) as entry,
    ):
        with directory.mutex():
            entry.join()
        yield entry


# -- whose turn it is ------------------------------------------------------------------------------


def test_a_small_one_does_not_pass_a_large_one(here: Here) -> None:
    """First come, first served, among parts too, whether there is room for the first or not."""
    here.write(ONE)
    wishes: list[dict[str, Any]] = [{}, {"memory": "1000MiB"}]
    for ahead in (5000, 9000, None):
        with promised(here, gpu0=[2000] if ahead == 9000 else []), waiting(here, ahead):
            for wish in wishes:
                states = [row.state for row in would_be_refused(**wish).rows]
                is_held = ahead == 9000 and not wish
                assert states == [State.RESERVED if is_held else State.AWAITED]


@on_a_host
@pytest.mark.process
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


def test_who_grows_passes_nobody(here: Here) -> None:
    """Who has a part and wants more stands behind who waits for it, and keeps the part."""
    here.write(ONE)
    assert part(1000) == "0"
    with promised(here, gpu0=[4000, 4000]), waiting(here, 5000):
        (row,) = would_be_refused(memory="2000MiB").rows
        assert row.state is State.AWAITED
        assert part(600) == "0"
    assert reserve_gpu.current()


def test_less_on_one_of_two(here: Here) -> None:
    """Who gives some back and takes another GPU besides is in nobody's way on the first."""
    here.write(ONE * 2)
    assert part(9000, "0") == "0"
    with waiting(here, 9500):
        assert part(2000, "0,1") == "0,1"


@pytest.mark.parametrize("size", [-1, float("nan"), "10", [1]], ids=repr)
def test_a_ticket_that_makes_no_sense(here: Here, size: object) -> None:
    """Who waits for a size that makes no sense waits for the whole GPU."""
    here.write(ONE)
    with promised(here, gpu0=[8000]), waiting(here, size):  # type: ignore[arg-type]
        (row,) = would_be_refused(memory="1000MiB").rows
        assert row.state is State.AWAITED


# -- offers ----------------------------------------------------------------------------------------


def outcomes(here: Here, mib: float, *ahead: QueueEntry) -> Iterator[Granted | Denied]:
    """Look again and again, for much longer than an offer lasts, behind some who are well.

    mib: of the part that is wanted.
    """
    inherited = dict.fromkeys(cuda_environment.VARIABLES)
    request = parse(None, memory=f"{mib}MiB")
    with (
        waiting(here, mib, stopped_s=STOPPED_S) as entry,
        Nvml() as gpus,
        LockDirectory(str(here.locks)) as directory,
    ):
        context = AttemptContext(request, gpus, directory, inherited, {})
        end = time.monotonic() + 5 * STOPPED_S
        while time.monotonic() < end:
            time.sleep(TICK_S)
            for other in ahead:
                other.heartbeat()
            outcome = attempt(context, entry=entry)
            yield outcome
            if isinstance(outcome, Granted):
                for locked in outcome.locked:
                    locked.lock.release()
                return


@pytest.mark.parametrize("ahead", [8000, None], ids=["large", "whole"])
def test_too_little_room_is_no_offer(here: Here, ahead: float | None) -> None:
    """Who waits for more than there is lets nothing lie: however long, nobody passes."""
    here.write(ONE)
    with promised(here, gpu0=[6000]), waiting(here, ahead) as entry:
        for outcome in outcomes(here, 3000, entry):
            assert isinstance(outcome, Denied)
            assert [row.state for row in outcome.rows] == [State.AWAITED]


def test_an_offer_lapses(here: Here) -> None:
    """Who could have what is waited for and does not take it is passed after a while."""
    here.write(ONE)
    with promised(here, gpu0=[1000]), waiting(here, 8000) as entry:
        seen = list(outcomes(here, 3000, entry))
        assert isinstance(seen[0], Denied)
        assert isinstance(seen[-1], Granted)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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
