"""What is free is offered to the first in the queue, then to the next; and who is seen at all."""

from __future__ import annotations

import math
import os
import subprocess
import time
from contextlib import ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import idle_mib, parse
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.devices import State
from reserve_gpu.model.holders import Record
from tests.locked import have, held, needs_root
from tests.machine import Child, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.here import Here

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ
LOOKS = 300  # far more than an offer lasts, at TICK_S each
LONG_S = 30
STRANGERS, SHARER = 1001, 1002  # users that no user namespace here knows
APART = ("unshare", "--user", "--map-root-user")


class Waiters:
    """Those who wait in one lock directory, all of them well."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.directory = stack.enter_context(LockDirectory(str(path)))
        self.places: list[QueueEntry] = []

    def join(self, *wants: str, **about: Any) -> QueueEntry:
        """Let one more join the queue."""
        entry = QueueEntry(self.directory, wants or UUIDS, Record.from_dict(about), STOPPED_S)
        self.places.append(self._stack.enter_context(entry))
        with self.directory.mutex():
            entry.join()
        return entry

    def look(self, entry: QueueEntry, uuid: str = UUIDS[0], *, is_free: bool = True) -> int | None:
        """Look once at a device: the number of the one who comes first, None for nobody."""
        (number,) = self.look_at_all(entry, [uuid], is_free=is_free)
        return number

    def look_at_all(
        self,
        entry: QueueEntry,
        uuids: Sequence[str],
        *,
        is_free: bool = True,
        is_enough: bool = True,
    ) -> list[int | None]:
        """Look once at several devices. is_enough: Whether the device is enough for a waiter."""
        self.heartbeat()
        with self.directory.mutex():
            ahead = [ticket.name for ticket in entry.ahead()]
            assert len(ahead) == self.places.index(entry)  # nobody is passed over as stopped
            first = [
                entry.first_ahead(
                    uuid, is_open=is_free, is_free=lambda _: is_enough, is_possible=lambda _: True
                )
                for uuid in uuids
            ]
        return [ahead.index(ticket.name) if ticket else None for ticket in first]

    def heartbeat(self) -> None:
        """Let all give a sign of life."""
        time.sleep(TICK_S)
        for entry in self.places:
            entry.heartbeat()


@pytest.fixture
def waiters(tmp_path: Path) -> Iterator[Waiters]:
    with ExitStack() as stack:
        yield Waiters(tmp_path / "locks", stack)


# -- offers ----------------------------------------------------------------------------------------


def test_offer_lapses(waiters: Waiters) -> None:
    """A free device that the waiters of a user leave alone goes to the waiter behind them."""
    _, _, third = (waiters.join() for _ in range(3))
    seen: list[int | None] = []
    while None not in seen and len(seen) < LOOKS:
        seen.append(waiters.look(third))
    assert [number for number, _ in groupby(seen)] == [0, None]


def test_offer_of_each_device(waiters: Waiters) -> None:
    """Another device that comes free later is the first one's for as long."""
    _, second = waiters.join(), waiters.join()
    assert any(waiters.look(second) is None for _ in range(LOOKS))
    assert waiters.look(second, UUIDS[1]) == 0


def test_a_waiter_that_changes_its_wish_keeps_no_device(waiters: Waiters) -> None:
    """A waiter that wants another device at each look keeps none for longer than an offer lasts."""
    first, second = waiters.join(UUIDS[0]), waiters.join()
    for number in range(LOOKS):
        first.want([UUIDS[number % 2]])
        if waiters.look_at_all(second, UUIDS) == [None, None]:
            return
    pytest.fail("the waiter still keeps a device")


def test_an_offer_that_is_withdrawn_ends_at_no_known_time(waiters: Waiters) -> None:
    """Once a free device is too little for a waiter, no moment is known at which it is passed."""
    _, second = waiters.join(), waiters.join()
    for _ in range(2):  # the second heartbeat shows that the waiter is not stopped
        assert waiters.look(second) == 0
    assert second.passes_at < math.inf
    assert waiters.look_at_all(second, UUIDS[:1], is_enough=False) == [0]
    assert second.passes_at == math.inf


def test_an_offer_starts_again_after_the_device_was_in_use(waiters: Waiters) -> None:
    """The time of an offer does not go on after a look that found the device reserved."""
    _, second = waiters.join(), waiters.join()
    assert waiters.look(second) == 0
    end = time.monotonic() + 2 * STOPPED_S
    while time.monotonic() < end:
        assert waiters.look_at_all(second, []) == []
    assert waiters.look(second) == 0


def test_offer_to_who_can_use_it(waiters: Waiters) -> None:
    """Who does not want a device is not waited for."""
    waiters.join(UUIDS[1])
    assert waiters.look(waiters.join()) is None


def test_no_offer(waiters: Waiters) -> None:
    """What is in use is no offer, however long it lasts."""
    _, second = waiters.join(), waiters.join()
    end = time.monotonic() + 3 * STOPPED_S
    while time.monotonic() < end:
        assert waiters.look(second, is_free=False) == 0


def test_offer_anew(waiters: Waiters) -> None:
    """A device that was in use meanwhile is offered to the first in the queue once more."""
    _, second = waiters.join(), waiters.join()
    assert any(waiters.look(second) is None for _ in range(LOOKS))
    assert waiters.look(second, is_free=False) == 0
    assert waiters.look(second) == 0


def test_offer_to_who_left_and_came(waiters: Waiters) -> None:
    """Who takes what is offered, and joins later, comes after all and holds nobody up."""
    first, second = waiters.join(), waiters.join()
    assert waiters.look(second) == 0
    first.is_served = True
    first.__exit__()
    waiters.places.remove(first)
    assert waiters.look(second) is None
    assert waiters.look(waiters.join()) == 0


@pytest.mark.parametrize("needs", ["2", True, 0, -1, 1.5, None, [2]], ids=repr)
def test_forged_needs(waiters: Waiters, needs: object) -> None:
    """A ticket that says no number of devices is one for a single device."""
    waiters.join(needs=needs)
    with waiters.directory.mutex():
        (ticket,) = waiters.directory.tickets()
    assert ticket.needs == 1


class EnoughError(Exception):
    """Enough was waited."""


@pytest.mark.parametrize(("wishes", "needs"), [({"count": 2}, 2), ({"devices": "0"}, 1)])
def test_needs_are_told(here: Here, wishes: dict[str, Any], needs: int) -> None:
    """Who waits says in his ticket how many devices he needs at once."""
    seen: list[int] = []

    def look(_: object) -> None:
        with LockDirectory(str(here.locks)) as directory, directory.mutex():
            seen.extend(ticket.needs for ticket in directory.tickets())
        raise EnoughError

    with here.rival("0"), pytest.raises(EnoughError):
        reserve_gpu.reserve(**wishes, wait=LONG_S, progress=look)
    assert seen == [needs]


def asking_for_gpu0(gpus: Nvml, directory: LockDirectory) -> AttemptContext:
    return AttemptContext(
        parse("0"), gpus, directory, dict.fromkeys(cuda_environment.VARIABLES), {}
    )


def states(outcome: Granted | Denied) -> list[State]:
    assert isinstance(outcome, Denied)
    return [row.state for row in outcome.rows]


def attempts(here: Here, waiters: Waiters) -> Iterator[Granted | Denied]:
    """Look for GPU 0 again and again, as one who waits behind others that are well."""
    entry = waiters.join()
    with Nvml() as gpus:
        context = asking_for_gpu0(gpus, waiters.directory)
        for _ in range(LOOKS):
            waiters.heartbeat()
            outcome = attempt(context, entry=entry)
            yield outcome
            if isinstance(outcome, Granted):
                return


def test_who_calls_it_busy_keeps_nobody_out(here: Here) -> None:
    """A free GPU that the first in the queue does not take is the next one's, not a newcomer's."""
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        for outcome in attempts(here, waiters):
            if isinstance(outcome, Granted):
                assert held(here) == [0]
                outcome.locked[0].lock.release()
            else:
                assert states(outcome) == [State.AWAITED]
        assert isinstance(outcome, Granted)
        with Nvml() as gpus:
            newcomer = attempt(asking_for_gpu0(gpus, waiters.directory))
            assert states(newcomer) == [State.AWAITED]


def test_awaited_by_the_limit_that_was_set(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is idle by the limit that was set is awaited where others come first."""
    here.write("gpu\n name A\n memory 16384\n used 2048\n")
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "3GiB")
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        context = asking_for_gpu0(stack.enter_context(Nvml()), waiters.directory)
        assert states(attempt(context._replace(idle_mib=idle_mib()))) == [State.AWAITED]


IN_USE = "gpu\n memory 16384\ngpu\n memory 16384\n compute 4321 9000\n"


@pytest.mark.parametrize(
    ("scenario", "has_rival", "memory_limit_mib"),
    [(None, True, None), (IN_USE, False, None), (IN_USE, False, 12000), (None, True, 1000)],
    ids=["reserved", "in use", "too little", "whole"],
)
def test_who_needs_several_keeps_one(
    here: Here, scenario: str | None, memory_limit_mib: float | None, *, has_rival: bool
) -> None:
    """A free GPU that the first in the queue needs together with another stays for him."""
    if scenario:
        here.write(scenario)
    with ExitStack() as stack:
        if has_rival:
            stack.enter_context(here.rival("1"))
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2, part_mib=memory_limit_mib)
        end = time.monotonic() + 3 * STOPPED_S
        for outcome in attempts(here, waiters):
            assert isinstance(outcome, Denied)
            if time.monotonic() > end:
                break


@pytest.mark.parametrize("memory_limit_mib", [None, 1000])
def test_who_leaves_several_alone_is_passed(here: Here, memory_limit_mib: float | None) -> None:
    """Who takes none of the GPUs that lie free for him together keeps nobody from one of them."""
    if memory_limit_mib:
        here.write(IN_USE)
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2, part_mib=memory_limit_mib)
        outcomes = list(attempts(here, waiters))
        assert isinstance(outcomes[0], Denied)
        assert isinstance(outcomes[-1], Granted)


# -- who is seen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [10**9, 2 * 10**9], ids=["ext3", "FAT"])
def test_coarse_time_stamps(waiters: Waiters, monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    """Where the file system keeps less of a time than is set, there is one order for all."""
    exact = os.utime

    def coarse(path: int, *, ns: tuple[int, int]) -> None:
        exact(path, ns=(ns[0] // unit * unit, ns[1] // unit * unit))

    monkeypatch.setattr(os, "utime", coarse)
    places = [waiters.join() for _ in range(3)]
    with waiters.directory.mutex():
        ahead = [[ticket.name for ticket in entry.ahead()] for entry in places]
        names = [ticket.name for ticket in waiters.directory.tickets()]
    assert sorted(ahead) == [names[:number] for number in range(3)]


@pytest.mark.process
@needs_root
def test_strangers_in_a_user_namespace(here: Here) -> None:
    """Where all users of the host are one, many files of one of them hide no sharer."""
    if not program(APART[0]) or subprocess.run([*APART, "true"], check=False).returncode:
        pytest.skip("needs a user namespace")
    uuid = here.uuid("0")
    with LockDirectory(str(here.locks)):
        pass
    for number in range(MOST_OF_ONE_USER):
        path = here.locks / f"{uuid}.share-{number:03}-0.lock"
        path.touch()
        os.chown(path, STRANGERS, STRANGERS)
    path = here.locks / f"{uuid}.share-{SHARER}-0.lock"
    child = Child(here.environ(), here.folder, *APART)
    try:
        with have(path):
            os.chown(path, SHARER, SHARER)
            assert child.run("os.stat(os.environ['RESERVE_GPU_LOCK_DIR']).st_uid").value == 0
            assert child.reserve("0").error == "NoFreeDeviceError"
        assert child.reserve("0").value == "0"
    finally:
        child.kill()
