"""The queue knows amounts: who may pass whom for a part of a GPU, and whose turn it is."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.foreign import MOST_MIB
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import Place
from reserve_gpu.model import Device, Promise, Record, Size, State, Usage
from reserve_gpu.reservation import environment
from reserve_gpu.reservation.attempt import Asking, attempt
from reserve_gpu.reservation.outcome import Denied, Granted
from reserve_gpu.reservation.parts import Leaving, Own, delays, room
from reserve_gpu.reservation.request import parse
from tests.holders import a_holder
from tests.processes import own_name, wait_for
from tests.reserving import got, of_gpu, refused
from tests.test_machines import on_a_host
from tests.test_parts import ONE, TOTAL, part, promised, rows
from tests.waiters import Waiter, queued

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.here import Here
    from tests.machine import Machine

STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ


@contextmanager
def waiting(
    here: Here, part_mib: float | None, *numbers: str, needs: int = 1, stopped_s: float = 5.0
) -> Iterator[Place]:
    """Let somebody wait for a part of one of the GPUs, or None for all of one."""
    wants = [here.uuid(number) for number in numbers or ("0",)]
    about = {"user": "carol", "part_mib": part_mib, "needs": needs}
    with (
        LockDirectory(str(here.locks)) as directory,
        Place(directory, wants, Record.from_dict(about), stopped_s) as place,
    ):
        with directory.mutex():
            place.join()
        yield place


def passes(here: Here, parts: Sequence[float], ahead: float | None, mib: float) -> bool:
    """Tell whether a request of that size passes the waiter; the GPU has room for it."""
    with promised(here, gpu0=[*parts]), waiting(here, ahead):
        try:
            part(mib)
        except reserve_gpu.NoFreeDeviceError as error:
            (row,) = error.rows
            assert row.state is State.AWAITED
            return False
        reserve_gpu.release()
        return True


# -- who may pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "ahead", "mib", "expected"),
    [
        ([8000], 5000, 2000, True),  # once the one leaves there is room for both
        ([8000], 9000, 2000, False),
        ([4000, 4000], 5000, 2000, False),  # one of the two leaves: 6000, of which 4000 stay
        ([4000, 4000], 5000, 1000, True),
        ([3000, 6000], 4000, 1000, False),
        ([2500, 5600], 3700, 1000, False),
        ([2500, 5600], 3700, 600, True),
        ([8000], None, 1000, False),  # who waits for all of it waits for everybody
    ],
)
def test_a_small_one_passes(
    here: Here, parts: list[float], ahead: float | None, mib: float, *, expected: bool
) -> None:
    """A small part passes a large one that is not met a moment later for it, and no other one."""
    here.write(ONE)
    assert passes(here, parts, ahead, mib) is expected


def moments(
    parts: Sequence[float], taken: float, wanted: float, earlier: float = 0
) -> set[tuple[float, ...]]:
    """Return the moments at which a wish can be met: who has left, and what others got before."""
    numbers = range(len(parts))
    sets = [leave for count in range(len(parts) + 1) for leave in combinations(numbers, count)]
    stay = {leave: sum(parts[n] for n in numbers if n not in leave) for leave in sets}
    return {
        (got, *leave)
        for leave in sets
        for got in (0, earlier)
        if TOTAL - taken - stay[leave] - got >= wanted
    }


@pytest.mark.parametrize("seed", range(60))
def test_passing_takes_no_moment_from_those_who_wait(here: Here, seed: int) -> None:
    """Who passes leaves all moments to those who wait, and who would leave them all passes."""
    here.write(ONE)
    dice = random.Random(seed)  # noqa: S311 - nothing secret
    parts: list[int] = []
    while len(parts) < 6 and (left := TOTAL - sum(parts) - 900) > 500:
        parts.append(dice.randrange(500, left, 100))
    mib = dice.randrange(600, TOTAL - sum(parts) + 1, 100)
    # The first can't be met now; and both are apart from all sums, so that no rounding matters.
    first = dice.randrange(TOTAL - sum(parts) + 100, TOTAL + 1, 100) - 50
    second = dice.randrange(100, TOTAL + 1, 100) - 25
    is_first_as_before = moments(parts, 0, first) == moments(parts, mib, first)
    assert passes(here, parts, first, mib) is is_first_as_before
    with waiting(here, first):
        both = moments(parts, 0, second, first) == moments(parts, mib, second, first)
        assert passes(here, parts, second, mib) is (is_first_as_before and both)


def test_promises_beyond_the_gpu_cost_nothing() -> None:
    """Whatever others have written, to see who may pass takes no longer and no memory.

    It comes to that where who asks uses more than its part: the rest is promised many times over.
    """
    device = Device(0, "GPU-a", memory_mib=81920)
    sharers = [a_holder(promise=Promise(Size(MOST_MIB - 1)), used_mib=0.0)] * 64
    reading = Usage(used_mib=2000, total_mib=81920)
    found = room(device, reading, sharers, Own(1000.0, 2000.0))
    assert found
    assert found.most_mib == 2000
    assert set(found.leaving.promised_mib) == {81920}
    assert not found.is_delayed([5000.0], 1500.0)  # who leaves makes room for both


@on_a_host
@pytest.mark.process
def test_what_sharers_run_is_theirs_where_others_wait(here: Here) -> None:
    """A GPU in parts that somebody waits for is awaited, and its sharers' processes are theirs."""
    here.write(ONE)
    with here.child() as sharer:
        assert sharer.reserve("memory='8000MiB'").value == "0"
        here.write(f"{ONE}  compute {sharer.pid} 3000\n")
        with waiting(here, 9000):
            text = of_gpu(refused(memory="2000MiB"))
    assert text.startswith("awaited: ")
    assert f"by {own_name()}" in text
    assert "reservation" not in text


def test_who_is_second_is_not_delayed(here: Here) -> None:
    """Who passes delays nobody who would be met together with the first."""
    here.write(ONE)
    with promised(here, gpu0=[9000]), waiting(here, 5000), waiting(here, 4300):
        assert [r.state for r in rows(1000)] == [State.AWAITED]
        assert part(600) == "0"


def test_what_strangers_use_may_come_free_bit_by_bit(here: Here) -> None:
    """Where processes without a reservation use memory, any amount of it may come free."""
    here.write(f"{ONE}  compute 4321000 6000\n")
    with promised(here, gpu0=[1000]):
        with waiting(here, 5000):
            (row,) = rows(1000)
            assert row.state is State.AWAITED
        with waiting(here, 2000), pytest.warns(reserve_gpu.ReserveGPUWarning):
            assert part(1000) == "0"  # there is room for both


def test_another_gpu_is_nobodys_obstacle(here: Here) -> None:
    """A part is taken where it delays nobody, though another GPU would be the better fit."""
    here.write(ONE * 3)
    with (
        promised(here, gpu0=[4000, 4000], gpu1=[7900], gpu2=[1000]),
        waiting(here, 5000, "0", "1"),
    ):
        assert part(2000) == "1"
        reserve_gpu.release()
        assert part(5000) == "2"


def test_who_needs_several(here: Here) -> None:
    """Who waits for a part of each of two GPUs is delayed on neither."""
    here.write(ONE * 2)
    with (
        promised(here, gpu0=[4000, 4000], gpu1=[8000]),
        waiting(here, 5000, "0", "1", needs=2),
    ):
        assert [r.state for r in rows(1500, "0")] == [State.AWAITED]
        assert part(1000) in "01"
        reserve_gpu.release()
        assert part(2000, "1") == "1"


def test_who_grows_passes_nobody(here: Here) -> None:
    """Who has a part and wants more stands behind who waits for it, and keeps the part."""
    here.write(ONE)
    assert part(1000) == "0"
    with promised(here, gpu0=[4000, 4000]), waiting(here, 5000):
        (row,) = rows(2000)
        assert row.state is State.AWAITED
        assert part(600) == "0"
    assert reserve_gpu.current()


def test_less_on_one_of_two(here: Here) -> None:
    """Who gives some back and takes another GPU besides is in nobody's way on the first."""
    here.write(ONE * 2)
    assert part(9000, "0") == "0"
    with waiting(here, 9500):
        assert part(2000, "0,1") == "0,1"


def test_a_whole_one_does_not_pass_a_part(here: Here) -> None:
    """Who wants the whole GPU, or shares without a size, does not pass one who waits for a part."""
    here.write(ONE)
    with waiting(here, 5000):
        for share in (False, True):
            with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
                got(share=share)
            assert [r.state for r in caught.value.rows] == [State.AWAITED]


@pytest.mark.parametrize("size", [-1, float("nan"), "10", [1]], ids=repr)
def test_a_ticket_that_makes_no_sense(here: Here, size: object) -> None:
    """Who waits for a size that makes no sense waits for the whole GPU."""
    here.write(ONE)
    with promised(here, gpu0=[8000]), waiting(here, size):  # type: ignore[arg-type]
        (row,) = rows(1000)
        assert row.state is State.AWAITED


# -- offers ----------------------------------------------------------------------------------------


def outcomes(here: Here, mib: float | None, *ahead: Place) -> Iterator[Granted | Denied]:
    """Look again and again, for much longer than an offer lasts, behind some who are well.

    mib: of the part that is wanted, None to share without a size.
    """
    inherited = dict.fromkeys(environment.VARIABLES)
    request = parse(None, share=True, memory=mib and f"{mib}MiB")
    with (
        waiting(here, mib, stopped_s=STOPPED_S) as place,
        Nvml() as gpus,
        LockDirectory(str(here.locks)) as directory,
    ):
        claim = Asking(request, gpus, directory, inherited, {})
        end = time.monotonic() + 5 * STOPPED_S
        while time.monotonic() < end:
            time.sleep(TICK_S)
            for other in ahead:
                other.heartbeat()
            outcome = attempt(claim, place=place)
            yield outcome
            if isinstance(outcome, Granted):
                for locked in outcome.locked:
                    locked.lock.release()
                return


@pytest.mark.parametrize("ahead", [8000, None], ids=["large", "whole"])
@pytest.mark.parametrize("mib", [3000, None], ids=["part", "shared"])
def test_too_little_room_is_no_offer(here: Here, ahead: float | None, mib: float | None) -> None:
    """Who waits for more than there is lets nothing lie: however long, nobody passes."""
    here.write(ONE)
    with promised(here, gpu0=[6000]), waiting(here, ahead) as place:
        for outcome in outcomes(here, mib, place):
            assert isinstance(outcome, Denied)
            assert [row.state for row in outcome.rows] == [State.AWAITED]


def test_what_others_come_first_for_is_no_offer(here: Here) -> None:
    """Who could have a part but for one who comes first lets nothing lie either."""
    here.write(ONE)
    with promised(here, gpu0=[4000]), waiting(here, 7000) as first, waiting(here, 5000) as second:
        for outcome in outcomes(here, 1500, first, second):
            assert isinstance(outcome, Denied)


def test_an_offer_lapses(here: Here) -> None:
    """Who could have what is waited for and does not take it is passed after a while."""
    here.write(ONE)
    with promised(here, gpu0=[1000]), waiting(here, 8000) as place:
        seen = list(outcomes(here, 3000, place))
        assert isinstance(seen[0], Denied)
        assert isinstance(seen[-1], Granted)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_large_one_gets_its_turn(machine: Machine) -> None:
    """Small ones that come later wait behind a large one that they would delay; then all get it."""
    machine.write(ONE)
    with ExitStack() as stack:
        first, large, second, third, passer = (
            stack.enter_context(machine.child()) for _ in range(5)
        )
        assert first.reserve("memory='3000MiB'").value == "0"
        waiter = Waiter(machine, large, "memory='8000MiB'")
        waiter.sees(1, "full")
        assert second.reserve("memory='3000MiB'").error == "NoFreeDeviceError"
        assert passer.reserve("memory='2000MiB'").value == "0"
        others = [Waiter(machine, child, "memory='3000MiB'") for child in (second, third)]
        for place, other in enumerate(others, 2):
            other.sees(place, "awaited")
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


@pytest.mark.parametrize(
    ("part_mib", "leaving_mib", "earlier_mib"),
    [(0.5, [1.9, 1.9], []), (0.2, [5.0], [1.9])],
    ids=["what may leave", "what others get before"],
)
def test_fractions_of_sizes_delay_too(
    part_mib: float, leaving_mib: list[float], earlier_mib: list[float]
) -> None:
    """A part that takes a fraction of a MiB too much from one who waits is not passed before."""
    ahead_mib = sum(leaving_mib) - sum(earlier_mib) - part_mib / 2
    assert delays(part_mib, ahead_mib, 0.0, Leaving(leaving_mib), earlier_mib)
