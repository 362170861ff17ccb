"""Waiting for a GPU in the test process: the order, the time of each check, and the end."""

from __future__ import annotations

import os
import re
import shutil
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation import policy
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import parse
from reserve_gpu.allocation.wait import Explainer, LockChanges
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.devices import Fault, State
from reserve_gpu.model.holders import DeviceStatus, Record
from tests.support.holders import a_holder
from tests.support.locked import locked
from tests.support.processes import own_name
from tests.support.reserving import got, of_gpu, refused, would_be_refused
from tests.support.wait import Terminal, queued

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from reserve_gpu.model.progress import Waiting
    from tests.support.here import Here

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
NAMES = ["Tesla T4", "NVIDIA A100"]
ONE = f"gpu\n  uuid {UUIDS[0]}\n"
TWO = "".join(
    f"gpu\n  uuid {uuid}\n  name {name}\n  memory {memory}\n"
    for uuid, name, memory in zip(UUIDS, NAMES, (15360, 40960), strict=True)
)
# A process can use only one MIG instance with this driver.
SPLIT = f"driver 550.54.15\n{TWO}gpu\n  mig on\n  instance 0\n"
BUSY = f"{ONE}  compute 4321000 3500\n"
# While all GPUs are reserved, no check is due within this time unless a lock changes.
UNDUE_S = policy.QUIET_S - 0.5
LONG_S = 30


# -- who goes first --------------------------------------------------------------------------------


class OtherWaiter:
    """Another waiter in the queue, which checks when the test says so; a context manager."""

    def __init__(self, here: Here, devices: str | None = None, **wishes: Any) -> None:
        self._here, self._request = here, parse(devices, **wishes)

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        gpus = self._stack.enter_context(Nvml())
        locks = self._stack.enter_context(LockDirectory(str(self._here.locks)))
        inherited, driver = dict.fromkeys(cuda_environment.VARIABLES), gpus.driver_version()
        self.context = AttemptContext(self._request, gpus, locks, inherited, {}, driver=driver)
        outcome = attempt(self.context)
        assert isinstance(outcome, Denied)
        self.denied = outcome
        self.entry = QueueEntry(
            locks,
            policy.wanted_uuids(outcome.rows),
            Record.from_dict({"user": "other", "note": "the thesis"}),
        )
        self._stack.enter_context(self.entry)
        assert self.check() is None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self) -> str | None:
        """Check once; return the numbers of the acquired devices, None if the waiter got none."""
        outcome = attempt(self.context, entry=self.entry)
        if not isinstance(outcome, Granted):
            return None
        self.entry.__exit__()
        for taken in outcome.locked:
            self._stack.callback(taken.lock.release)
        return ",".join(taken.device.number for taken in outcome.locked)


class Steps:
    """A progress callback of reserve() that runs one function at each call."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)
        self.shown: list[Waiting] = []

    def __call__(self, waiting: Waiting) -> None:
        self.shown.append(waiting)
        if self._steps:
            self._steps.pop(0)()

    @property
    def places(self) -> list[int]:
        """Return the place in the queue at each call."""
        return [waiting.place for waiting in self.shown]


@contextmanager
def reserved(here: Here, *numbers: str) -> Iterator[list[Callable[[], None]]]:
    """Let other processes hold these devices; yield a function for each that releases it."""
    with ExitStack() as stack:
        rivals = [here.rival(number) for number in numbers]
        stacks = [stack.enter_context(ExitStack()) for _ in rivals]
        for one, rival in zip(stacks, rivals, strict=True):
            one.enter_context(rival)
        yield [one.close for one in stacks]


def test_a_waiter_for_two_gpus_is_not_passed_by_later_requests(here: Here) -> None:
    """Later requests for one GPU wait until the first waiter has both."""
    here.write(TWO)
    rivals = reserved(here, "0", "1")
    with rivals as (free_0, free_1), OtherWaiter(here, count=2) as two, OtherWaiter(here) as single:
        free_0()
        assert (single.check(), two.check()) == (None, None)
        assert would_be_refused().rows[0].state is State.AWAITED
        free_1()
        assert (single.check(), two.check()) == (None, "0,1")
        two.__exit__()
        assert single.check() == "0"


@pytest.mark.parametrize(
    ("scenario", "ahead", "later", "number"),
    [
        (TWO, {"devices": "0"}, {"devices": "1"}, "1"),
        (TWO, {"name": "T4"}, {}, "1"),
        (SPLIT, {"count": 2}, {"devices": "2:0"}, "2:0"),
    ],
)
def test_a_request_takes_a_gpu_that_no_earlier_waiter_can_use(
    here: Here, scenario: str, ahead: dict[str, Any], later: dict[str, Any], number: str
) -> None:
    """This applies to later waiters and to requests that do not wait."""
    here.write(scenario)
    with reserved(here, "0", number) as (_, free), OtherWaiter(here, **ahead) as first:
        with OtherWaiter(here, **later) as second:
            free()
            assert (first.check(), second.check()) == (None, number)
        assert [device.number for device in reserve_gpu.reserve(**later).devices] == [number]


def test_a_request_that_does_not_wait_does_not_pass_a_waiter(here: Here) -> None:
    """Its preview names the waiter and the waiter's note."""
    here.write(ONE)
    with reserved(here, "0") as (free,), OtherWaiter(here) as other:
        free()
        text = str(would_be_refused())
        assert of_gpu(text).startswith("awaited")
        assert f'{os.getpid()}: "the thesis"' in of_gpu(text)
        assert "wait='1h'" in text
        assert other.check() == "0"


def test_a_busy_gpu_with_waiters_is_shown_with_its_processes(here: Here) -> None:
    here.write(BUSY)
    with OtherWaiter(here) as other:
        for wishes in ({}, {"wait": 0.01}):
            assert re.fullmatch("busy: .* pid 4321000", of_gpu(refused(**wishes)))
        here.write(ONE)
        assert other.check() == "0"


# -- a wait ----------------------------------------------------------------------------------------


def test_each_change_of_the_queue_is_reported(here: Here) -> None:
    """The progress contains the place in the queue, the first waiter and the GPU's state."""
    here.write(ONE)
    with reserved(here, "0") as (free,), OtherWaiter(here) as other:
        steps = Steps(free, other.check, other.__exit__)
        assert got(wait=UNDUE_S, progress=steps) == "0"
        assert steps.places == [2, 2, 1]
        first, _, none = (waiting.first for waiting in steps.shown)
        assert first
        assert (first.holder.user, first.holder.note) == (own_name(), "the thesis")
        assert none is None
        assert [waiting.rows[0].state.value for waiting in steps.shown] == [
            "reserved", "awaited", "reserved",
        ]  # fmt: skip


def test_a_waiter_notices_without_a_check_that_another_waiter_leaves(here: Here) -> None:
    here.write(ONE)
    with reserved(here, "0") as (free,), OtherWaiter(here) as other:
        steps = Steps(other.__exit__, free)
        assert got(wait=UNDUE_S, progress=steps) == "0"
        assert steps.places == [2, 1]


def test_a_release_is_a_change_once(here: Here) -> None:
    """A lock that is missing from the kernel's list counts only once, even if it is still held."""
    here.write(ONE)
    with reserved(here, "0") as (free,), OtherWaiter(here) as other:
        news = LockChanges(other.context)
        news.forget(other.denied)
        assert not news()
        free()
        assert [news(), news()] == [True, False]
        news.forget(other.denied)
        assert not news()
        with here.rival("0"):
            assert not news()
        assert [news(), news()] == [True, False]


@pytest.mark.parametrize("wait", [0, "0.1s"])
def test_a_wait_ends_at_its_limit(here: Here, wait: float | str) -> None:
    """The refusal names the holder, and suggests a wait unless there was one."""
    here.write(ONE)
    with reserved(here, "0"):
        text = refused(wait=wait)
    assert ("Timed out after 0.1 s" in text) is bool(wait)
    assert f"pid {os.getpid()}" in of_gpu(text)
    assert ("wait='1h'" in text) is not bool(wait)


def block_the_mutex(here: Here) -> None:
    """Replace the mutex file by a directory, which can't be locked."""
    (here.locks / "mutex.lock").unlink()
    (here.locks / "mutex.lock").mkdir()


def unblock_the_mutex(here: Here) -> None:
    """Remove what replaces the mutex file."""
    if (here.locks / "mutex.lock").is_dir():
        (here.locks / "mutex.lock").rmdir()


def test_a_release_in_a_new_lock_directory_is_noticed(here: Here) -> None:
    """After the directory was replaced, no check is needed to notice a release."""
    here.write(ONE)
    with ExitStack() as stack:
        old = stack.enter_context(ExitStack())
        old.enter_context(here.rival("0"))
        new = stack.enter_context(ExitStack())

        def replace() -> None:
            shutil.rmtree(here.locks)
            new.enter_context(here.rival("0"))

        steps = Steps(replace, lambda: None, new.close)
        assert got(wait=UNDUE_S, progress=steps) == "0"


def test_a_waiter_takes_a_gpu_that_can_be_read_again(here: Here) -> None:
    here.write(f"{TWO}fail nvmlDeviceGetUUID 0 999\n")
    with reserved(here, "1"):
        steps = Steps(lambda: here.write(TWO))
        assert got(wait=LONG_S, progress=steps) == "0"
    assert isinstance(steps.shown[0].rows[0].device, Fault)


@pytest.mark.full
def test_a_wait_survives_problems_of_the_lock_directory(here: Here) -> None:
    """Its mutex can be unusable for some time."""
    here.write(BUSY)

    def begin() -> None:
        block_the_mutex(here)
        for path in here.locks.glob("queue-*"):
            path.unlink()  # so that a check is due

    def end() -> None:
        unblock_the_mutex(here)
        here.write(ONE)

    steps = Steps(begin, lambda: None, end)
    assert got(wait=LONG_S, progress=steps) == "0"
    assert locked(here.locks) == {f"{UUIDS[0]}.lock"}


def test_a_request_that_can_not_join_the_queue_does_not_wait(here: Here) -> None:
    """The number of tickets of a user is limited."""
    here.write(ONE)
    with ExitStack() as stack:
        stack.enter_context(here.rival("0"))
        locks = stack.enter_context(LockDirectory(str(here.locks)))
        for _ in range(MOST_OF_ONE_USER):
            entry = stack.enter_context(QueueEntry(locks, [], Record()))
            with locks.mutex():
                entry.join()
        with pytest.raises(reserve_gpu.LockError, match=str(MOST_OF_ONE_USER)):
            reserve_gpu.reserve(wait=LONG_S)
    assert not queued(here)


def test_a_waiter_takes_a_busy_gpu_that_becomes_idle(here: Here) -> None:
    here.write(BUSY)
    assert got(wait=LONG_S, progress=Steps(lambda: here.write(ONE))) == "0"


def test_a_waiter_releases_the_lock_of_a_gpu_that_is_not_idle(here: Here) -> None:
    """While it waits, another process can reserve the GPU."""
    here.write(BUSY)

    def take() -> None:
        with here.rival("0"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        reserve_gpu.reserve(wait=LONG_S, progress=Steps(take))


def test_users_and_processes_are_cached_while_nothing_changes(here: Here) -> None:
    """A changed state or holder is read from the driver again."""
    here.write(f"{BUSY}gpu\n")
    with reserved(here, "1"), OtherWaiter(here) as other:
        (row, held) = other.denied.rows
        explain = Explainer(other.context)
        before = len(here.calls())
        (answer,) = explain([row])
        asked = len(here.calls())
        assert asked > before
        assert answer.processes
        assert explain([row]) == (answer,)
        assert len(here.calls()) == asked
        explain([row._replace(state=State.UNKNOWN)])
        for holder in (a_holder(4321000), a_holder(4321001)):
            asked = len(here.calls())
            explain([held._replace(holders=(holder,))])
            assert len(here.calls()) > asked


def test_a_release_by_the_same_user_is_a_change_for_a_waiter_at_its_quota(here: Here) -> None:
    with reserved(here, "0", "1") as (free, _), OtherWaiter(here) as other:
        news, (row, _) = LockChanges(other.context), other.denied.rows
        news.forget(Denied((DeviceStatus(row.device, State.LIMITED, counted=row.holders),)))
        assert not news()
        free()
        assert news()


@pytest.mark.parametrize(
    ("wishes", "is_shown"),
    [({"wait": 0.5}, True), ({"wait": 0.1, "progress": lambda _: None}, False)],
    ids=["wait", "wait with a callback"],
)
def test_a_script_shows_its_wait_on_a_terminal(
    here: Here, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, Any], *, is_shown: bool
) -> None:
    """Nothing is shown if the script passes its own progress callback."""
    here.write(BUSY)
    terminal = Terminal()
    monkeypatch.setenv("TERM", "vt100")
    monkeypatch.setattr(sys, "stderr", terminal)
    refused(**wishes)
    shown = terminal.getvalue()
    assert ("Waiting for a GPU" in shown) == bool(shown) == is_shown
    assert not shown or shown.endswith("\x1b[J")


@pytest.mark.ipython
def test_a_notebook_shows_a_wait_in_its_output(here: Here) -> None:
    """The magic and reserve(wait=...) show the same, and progress=None shows nothing."""
    here.write(BUSY)
    shell = here.shell(is_notebook=True)
    shell.run("import reserve_gpu")
    for line in ("%reserve_gpu --wait 1.1s", "reserve_gpu.reserve(wait=1.1)"):
        assert any("Waiting for a GPU" in each["text/plain"] for each in shell.run(line).values)
    silent = shell.run("reserve_gpu.reserve(wait=0.1, progress=None)")
    assert "Waiting" not in silent.all
