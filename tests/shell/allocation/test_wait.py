"""Waiting for a GPU in the test process: who goes first, when to look, and how it ends."""

from __future__ import annotations

import gc
import io
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import WaitTimeoutError
from reserve_gpu.allocation import policy, snapshot
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import parse
from reserve_gpu.allocation.wait import Explainer, LockChanges
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry, wait_for_news
from reserve_gpu.model.devices import Fault, State
from reserve_gpu.model.errors import NoVisibleDeviceError
from reserve_gpu.model.holders import DeviceStatus, Record
from reserve_gpu.render.progress import Live
from tests.support.holders import a_holder
from tests.support.locked import locked
from tests.support.processes import own_name, wait_for
from tests.support.reserving import got, of_gpu, refused, would_be_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from reserve_gpu.model.progress import Waiting
    from tests.support.here import Here

from tests.support.wait import Terminal, queued

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
NAMES = ["Tesla T4", "NVIDIA A100"]
ONE = f"gpu\n  uuid {UUIDS[0]}\n"
TWO = "".join(
    f"gpu\n  uuid {uuid}\n  name {name}\n  memory {memory}\n"
    for uuid, name, memory in zip(UUIDS, NAMES, (15360, 40960), strict=True)
)
# On a driver with which a process can use only one MIG instance.
SPLIT = f"driver 550.54.15\n{TWO}gpu\n  mig on\n  instance 0\n"
BUSY = f"{ONE}  compute 4321000 3500\n"
# A wait in which no look is due before its end, where all is reserved: somebody has to tell.
UNDUE_S = policy.QUIET_S - 0.5
LONG_S = 30


# -- who goes first --------------------------------------------------------------------------------


class Other:
    """Somebody else who waits, and looks when a test says so; a context manager."""

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
        assert self.look() is None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look(self) -> str | None:
        """Try once more; what was taken is released at the end."""
        outcome = attempt(self.context, entry=self.entry)
        if not isinstance(outcome, Granted):
            return None
        self.entry.__exit__()
        for taken in outcome.locked:
            self._stack.callback(taken.lock.release)
        return ",".join(taken.device.number for taken in outcome.locked)


class Steps:
    """What happens while reserve() waits: one step at each time that it shows how things stand."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = list(steps)
        self.shown: list[Waiting] = []

    def __call__(self, waiting: Waiting) -> None:
        self.shown.append(waiting)
        if self._steps:
            self._steps.pop(0)()

    @property
    def places(self) -> list[int]:
        """Return the place in the queue each time."""
        return [waiting.place for waiting in self.shown]


@contextmanager
def reserved(here: Here, *numbers: str) -> Iterator[list[Callable[[], None]]]:
    """Let somebody else have these devices; returns functions that release them, one by one."""
    with ExitStack() as stack:
        rivals = [here.rival(number) for number in numbers]
        stacks = [stack.enter_context(ExitStack()) for _ in rivals]
        for one, rival in zip(stacks, rivals, strict=True):
            one.enter_context(rival)
        yield [one.close for one in stacks]


def test_first_come_first_served(here: Here) -> None:
    """A GPU that comes free goes to those in the queue in their order, whoever looks first."""
    here.write(ONE)
    with reserved(here, "0") as (free,), Other(here) as a, Other(here) as b, Other(here) as c:
        free()
        for holder, later in ((a, [b, c]), (b, [c]), (c, [])):
            assert [other.look() for other in later] == [None] * len(later)
            assert holder.look() == "0"
            assert [other.look() for other in later] == [None] * len(later)
            holder.__exit__()


def test_the_first_gets_what_comes_free_first(here: Here) -> None:
    """Who is first in the queue gets the GPU that is free first, whichever it is."""
    here.write(TWO)
    with reserved(here, "0", "1") as (free_0, free_1), Other(here) as a, Other(here) as b:
        free_1()
        assert (b.look(), a.look()) == (None, "1")
        free_0()
        assert b.look() == "0"


def test_who_wants_two_is_not_starved(here: Here) -> None:
    """Who waits for two GPUs gets them though others, who came later, want only one."""
    here.write(TWO)
    rivals = reserved(here, "0", "1")
    with rivals as (free_0, free_1), Other(here, count=2) as two, Other(here) as single:
        free_0()
        assert (single.look(), two.look()) == (None, None)
        assert of_gpu(str(would_be_refused())).startswith("awaited: by ")
        free_1()
        assert (single.look(), two.look()) == (None, "0,1")
        two.__exit__()
        assert single.look() == "0"


@pytest.mark.parametrize(
    ("scenario", "ahead", "later", "number"),
    [
        (TWO, {"devices": "0"}, {}, "1"),
        (TWO, {"devices": "0"}, {"devices": "1"}, "1"),
        (TWO, {"name": "T4"}, {}, "1"),
        (TWO.replace("15360", "81920"), {"min_memory": "64GiB"}, {}, "1"),
        (TWO, {"devices": "0"}, {"min_memory": "32GiB"}, "1"),
        (SPLIT, {"count": 2}, {"devices": "2:0"}, "2:0"),
    ],
)
def test_nobody_waits_for_what_others_cannot_use(
    here: Here, scenario: str, ahead: dict[str, Any], later: dict[str, Any], number: str
) -> None:
    """Who comes later takes a device that nobody ahead could use, from within the queue or not."""
    here.write(scenario)
    with reserved(here, "0", number) as (_, free), Other(here, **ahead) as first:
        with Other(here, **later) as second:
            free()
            assert (first.look(), second.look()) == (None, number)
        assert [device.number for device in reserve_gpu.reserve(**later).devices] == [number]


@pytest.mark.parametrize(
    "wishes", [{}, {"devices": "0"}, {"memory": "1GB"}, {"devices": "0", "memory": "1GB"}]
)
def test_who_does_not_wait_does_not_overtake(here: Here, wishes: dict[str, Any]) -> None:
    """A free GPU is a waiter's first; a preview for another request names the waiter's note."""
    here.write(ONE)
    with reserved(here, "0") as (free,), Other(here) as other:
        free()
        text = str(would_be_refused(**wishes))
        assert of_gpu(text) == f'awaited: by your process {os.getpid()}: "the thesis"'
        assert "wait='1h'" in text
        assert other.look() == "0"


def test_who_is_behind_others_is_told_who_uses_a_gpu(here: Here) -> None:
    """A GPU that others wait for as well is shown with what runs on it, not with them alone."""
    here.write(BUSY)
    with Other(here) as other:
        for wishes in ({}, {"wait": 0.01}):
            text = of_gpu(refused(**wishes))
            assert text == "busy: no reservation: pid 4321000"
        here.write(ONE)
        assert other.look() == "0"


# -- a wait ----------------------------------------------------------------------------------------


def test_moving_up(here: Here) -> None:
    """Who waits is told of each change: the place in the queue, and then the GPU."""
    here.write(ONE)
    with reserved(here, "0") as (free,), Other(here) as other:
        steps = Steps(free, other.look, other.__exit__)
        assert got(wait=UNDUE_S, progress=steps) == "0"
        assert steps.places == [2, 2, 1]
        first, _, none = (waiting.first for waiting in steps.shown)
        assert first
        assert (first.holder.user, first.holder.note) == (own_name(), "the thesis")
        assert none is None
        assert [waiting.rows[0].state.value for waiting in steps.shown] == [
            "reserved", "awaited", "reserved",
        ]  # fmt: skip


def test_told_that_somebody_leaves(here: Here) -> None:
    """Who waits need not look in order to see that it is next in the queue."""
    here.write(ONE)
    with reserved(here, "0") as (free,), Other(here) as other:
        steps = Steps(other.__exit__, free)
        assert got(wait=UNDUE_S, progress=steps) == "0"
        assert steps.places == [2, 1]


def test_looks_of_others_are_no_news(here: Here) -> None:
    """However often others look, reserve something else and release it, a waiter sleeps."""
    here.write(TWO)
    stop = threading.Event()

    def work() -> None:
        with LockDirectory(str(here.locks)) as directory:
            while not stop.is_set():
                with directory.mutex():
                    lock = directory.acquire("another.lock")
                assert lock
                lock.release()

    with reserved(here, "0", "1"), ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        steps = Steps()
        try:
            refused("0", wait=0.7, progress=steps)
        finally:
            stop.set()
        working.result()
    assert len(steps.shown) == 1


def test_news(here: Here) -> None:
    """It is news when a device is released, and no news twice, as who has it may not be listed."""
    here.write(ONE)
    with reserved(here, "0") as (free,), Other(here) as other:
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


def test_what_runs_out_of_patience_leaves_the_queue(here: Here) -> None:
    """A wait that ends in vain, or by an error, leaves no ticket."""
    here.write(ONE)
    with reserved(here, "0"):
        with pytest.raises(ZeroDivisionError):
            reserve_gpu.reserve(wait=LONG_S, progress=Steps(lambda: 1 // 0))
        assert queued(here) == []
        refused(wait=0.01)
        assert queued(here) == []


@pytest.mark.parametrize(
    ("wait", "said"),
    [(0, ""), ("0.1s", "Timed out after 0.1 s. "), (0.1 + 0.2, "Timed out after 0.3 s. ")],
)
@pytest.mark.parametrize("is_thread", [False, True], ids=["here", "in a thread"])
def test_limit(here: Here, wait: float | str, said: str, *, is_thread: bool) -> None:
    """A wait that runs out fails closed, and says what can be done but to wait."""
    here.write(ONE)
    with reserved(here, "0"), ThreadPoolExecutor(1) as pool:
        text = pool.submit(refused, wait=wait).result() if is_thread else refused(wait=wait)
    assert text.startswith(f"{said}No free GPU: GPU0 is reserved by your ")
    assert f"pid {os.getpid()}" in of_gpu(text)
    assert ("wait='1h'" in text) == (not said)


def test_error_tells_of_the_wait(here: Here) -> None:
    """Who could wait no longer gets a WaitTimeoutError with a refusal for each device."""
    with reserved(here, "0", "1"), pytest.raises(WaitTimeoutError) as caught:
        reserve_gpu.reserve(wait=0.01)
    assert [row.state.value for row in caught.value.rows] == ["reserved"] * 2
    assert [row.label for row in caught.value.rows] == ["GPU0", "GPU1"]


class MutexHolder:
    """Somebody who has the mutex from `take` to `drop`, where nobody has a ticket any more."""

    def __init__(self, here: Here) -> None:
        self._here, self._stack = here, ExitStack()

    def take(self) -> None:
        directory = self._stack.enter_context(LockDirectory(str(self._here.locks)))
        self._stack.enter_context(directory.mutex())
        for path in self._here.locks.glob("queue-*"):
            path.unlink()  # which makes a look due

    def drop(self) -> None:
        self._stack.close()


@pytest.mark.full
def test_limit_while_another_process_reserves(here: Here) -> None:
    """A wait ends in time also where another process keeps everybody from looking."""
    here.write(ONE)
    holder, start = MutexHolder(here), time.monotonic()
    with reserved(here, "0"):
        try:
            text = refused(wait=0.3, progress=Steps(holder.take))
        finally:
            holder.drop()
    assert f"pid {os.getpid()}" in of_gpu(text)
    assert time.monotonic() - start < 20  # other calls wait for a mutex for 30 s


@pytest.mark.full
def test_a_wait_goes_on_while_another_process_reserves(here: Here) -> None:
    """Who waits is shown that it does also where another process keeps everybody from looking."""
    here.write(ONE)
    holder = MutexHolder(here)
    with reserved(here, "0") as (free,):

        def come_free() -> None:
            holder.drop()
            free()

        steps = Steps(holder.take, come_free)
        assert got(wait=LONG_S, progress=steps) == "0"
        assert len(steps.shown) >= 2


def test_deleted_ticket_of_a_waiter(here: Here) -> None:
    """A waiter whose ticket is deleted is in the queue again, in the old place."""
    here.write(ONE)
    numbers: list[int] = []
    with reserved(here, "0") as (free,):

        def delete() -> None:
            numbers.extend(ticket.number for ticket in queued(here))
            for path in here.locks.glob("queue-*"):
                path.unlink()

        def look() -> None:
            numbers.extend(ticket.number for ticket in queued(here))
            free()

        assert got(wait=LONG_S, progress=Steps(delete, look)) == "0"
    assert len(numbers) == 2
    assert len(set(numbers)) == 1


def remove_the_directory(here: Here) -> None:
    shutil.rmtree(here.locks)


def block_the_mutex(here: Here) -> None:
    """Put something in the mutex's place that nobody can lock."""
    (here.locks / "mutex.lock").unlink()
    (here.locks / "mutex.lock").mkdir()


def unblock_the_mutex(here: Here) -> None:
    if (here.locks / "mutex.lock").is_dir():
        (here.locks / "mutex.lock").rmdir()


def test_who_waits_takes_notice_in_a_new_directory(here: Here) -> None:
    """Where the lock directory was replaced a release is noticed in the new one, without a look."""
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


def test_a_gpu_that_could_not_be_read_is_taken_once_it_can(here: Here) -> None:
    """A waiter asks anew about a GPU that the driver could not name: it may answer again."""
    here.write(f"{TWO}fail nvmlDeviceGetUUID 0 999\n")
    with reserved(here, "1"):
        steps = Steps(lambda: here.write(TWO))
        assert got(wait=LONG_S, progress=steps) == "0"
    assert isinstance(steps.shown[0].rows[0].device, Fault)


@pytest.mark.full
def test_who_waits_looks_often_after_news(here: Here) -> None:
    """After a release a waiter looks more than once a second: the memory may be freed a bit later.

    Each look is shown, and so is each full second: without more looks two are never that near.
    """
    here.write(ONE)
    with reserved(here, "0") as (free,):

        def leave() -> None:
            here.write(BUSY)
            free()

        steps = Steps(leave, *[lambda: None] * 8, lambda: here.write(ONE))
        assert got(wait=LONG_S, progress=steps) == "0"
    moments = [waiting.waited_s for waiting in steps.shown[1:]]
    nearest = min(later - first for first, later in zip(moments, moments[2:], strict=False))
    assert nearest < 0.75 * policy.LOOK_S


@pytest.mark.full
@pytest.mark.parametrize("trouble", [remove_the_directory, block_the_mutex])
def test_a_wait_outlives_trouble(here: Here, trouble: Callable[[Here], None]) -> None:
    """A lock directory that is removed, or can't be used for a moment, does not end a wait."""
    here.write(BUSY)

    def begin() -> None:
        trouble(here)
        for path in here.locks.glob("queue-*"):
            path.unlink()  # which makes a look due

    def end() -> None:
        unblock_the_mutex(here)
        here.write(ONE)

    steps = Steps(begin, lambda: None, end)
    assert got(wait=LONG_S, progress=steps) == "0"
    assert locked(here.locks) == {f"{UUIDS[0]}.lock"}


@pytest.mark.parametrize("record", [b"", b"rubbish", b'{"pid": 1, "wants": []}'])
def test_what_is_written_into_a_ticket(here: Here, record: bytes) -> None:
    """Whatever stands in the ticket of the only one in the queue, that one gets the GPU."""
    here.write(ONE)

    with reserved(here, "0") as (free,):

        def write() -> None:
            (path,) = here.locks.glob("queue-*")
            path.write_bytes(record)
            os.utime(path, ns=(2**60, 2**60))
            free()

        assert got(wait=UNDUE_S, progress=Steps(write)) == "0"


def test_a_thread_beside_one_that_waits(here: Here) -> None:
    """While one thread waits in the queue another is refused, at once or when its limit ends."""
    here.write(ONE)
    is_waiting = threading.Event()
    with reserved(here, "0") as (free,), ThreadPoolExecutor(1) as pool:
        first = pool.submit(got, wait=LONG_S, progress=Steps(is_waiting.set))
        assert is_waiting.wait(LONG_S)
        for wait in (None, 0.2):
            start = time.monotonic()
            assert "Another thread" in refused(wait=wait)
            assert time.monotonic() - start >= (wait or 0)
        free()
        assert first.result() == "0"
        assert got(wait=LONG_S) == "0"


@pytest.mark.parametrize(
    ("wishes", "before", "error"),
    [
        ({"count": 9}, None, reserve_gpu.ImpossibleError),
        ({"name": "H100"}, None, reserve_gpu.ImpossibleError),
        ({"min_memory": "1TB"}, None, reserve_gpu.ImpossibleError),
        ({"devices": "7"}, None, reserve_gpu.ImpossibleError),
        ({"count": 2}, "1", reserve_gpu.ImpossibleError),
        ({}, "", NoVisibleDeviceError),
    ],
)
def test_impossible_is_not_waited_for(
    here: Here, wishes: dict[str, Any], before: str | None, error: type[Exception]
) -> None:
    """What no release could satisfy fails at once, without a place in the queue."""
    here.write(TWO)
    if before is not None:
        os.environ.update(CUDA_VISIBLE_DEVICES=before, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    with reserved(here, "0", "1"), pytest.raises(error) as caught:
        reserve_gpu.reserve(**wishes, wait=True)
    assert type(caught.value) is error
    assert list(here.locks.glob("queue-*")) == []


def test_a_gpu_that_becomes_idle_is_taken(here: Here) -> None:
    """A GPU that somebody uses without a reservation is taken when they are done."""
    here.write(BUSY)
    assert got(wait=LONG_S, progress=Steps(lambda: here.write(ONE))) == "0"


@pytest.mark.parametrize("trouble", ["compute 1 3500", "fail nvmlDeviceGetComputeMode 0 15"])
def test_what_a_waiter_does_not_get_it_does_not_keep(here: Here, trouble: str) -> None:
    """A waiter that finds a GPU in use, or can't see whether it is, has released its lock."""
    here.write(f"{ONE}{trouble}")

    def take() -> None:
        with here.rival("0"):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        reserve_gpu.reserve(wait=LONG_S, progress=Steps(take))


def test_users_and_processes_are_asked_for_now_and_then(here: Here) -> None:
    """Who waits for what is in use as before does not ask the driver twice who uses it."""
    here.write(f"{BUSY}gpu\n")
    with reserved(here, "1"), Other(here) as other:
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


def test_who_uses_a_gpu_is_asked_anew(here: Here) -> None:
    """A waiter learns in time who uses a GPU that was in use by somebody else before."""
    here.write(BUSY)
    with Other(here) as other:
        explain = Explainer(other.context, every_s=0.1)

        def pids() -> list[int]:
            outcome = attempt(other.context, entry=other.entry)
            assert isinstance(outcome, Denied)
            return [process.pid for row in explain(outcome.rows) for process in row.processes]

        assert pids() == [4321000]
        here.write(BUSY.replace("4321000", "4321001"))
        wait_for(lambda: pids() == [4321001])


def test_what_one_has_oneself_is_news(here: Here) -> None:
    """Who waits for what a rule keeps from them looks when they release something elsewhere."""
    with reserved(here, "0", "1") as (free, _), Other(here) as other:
        news, (row, _) = LockChanges(other.context), other.denied.rows
        news.forget(Denied((DeviceStatus(row.device, State.LIMITED, counted=row.holders),)))
        assert not news()
        free()
        assert news()


# What each look finds: GPUs that are reserved, busy, split and busy, and one that can't be read.
ONE_OF_EACH = """
gpu
gpu
  compute 1 3500
  compute 2 90
gpu
  mig on
  instance 0
    compute 1 3500
  instance 2
    used 900
gpu
fail nvmlDeviceGetComputeMode 3 999
"""
# Looks; by the first of them Python's own caches are all but full. Each time the least of eight.
# What grows only between two of the three is another's: pytest-xdist hears of more tests meanwhile.
MEASURED, FEW = (600, 800, 1000), 8


@pytest.mark.full
@pytest.mark.parametrize("is_deleted", [False, True], ids=["", "its ticket deleted"])
def test_looks_leave_nothing(here: Here, *, is_deleted: bool) -> None:
    """After hundreds of looks more there are no more files, threads and objects than before."""
    here.write(ONE_OF_EACH)
    sizes = [Size() for _ in MEASURED]
    with ExitStack() as stack:
        stack.enter_context(reserved(here, "0"))
        other = stack.enter_context(Other(here))
        news = LockChanges(other.context)
        gc.disable()  # garbage that only the collector would free counts: some switch that off
        stack.callback(gc.enable)
        for look in range(MEASURED[-1] + FEW):
            outcome = attempt(other.context, entry=other.entry)
            assert isinstance(outcome, Denied)
            news.forget(outcome)
            for row in outcome.rows:
                snapshot.add_processes(other.context.gpus, [row])
            other.entry.heartbeat()
            wait_for_news(time.monotonic() + 0.0001, news)
            if is_deleted:
                (path,) = here.locks.glob("queue-*")
                path.unlink()
            for first, size in zip(MEASURED, sizes, strict=True):
                if 0 <= look - first < FEW:
                    size.measure()
    early, middle, late = sizes
    files, threads, blocks, container_bytes = map(min, middle.minus(early), late.minus(middle))
    assert (files, threads) == (0, 0)
    assert min(middle.garbage, late.garbage) < 80  # one object at each look would be 200
    # Python 3.10 makes one for each function, at its 1024th call; one at each look would be 200.
    assert blocks < 120
    assert container_bytes < 500  # a list that each look adds to grows by steps of 600


class Size:
    """How much this process has: the least that was measured.

    garbage: how many objects only the collector could free, of all looks since it was asked last.
    """

    def __init__(self) -> None:
        self._least: list[int] = []
        self.garbage = 0

    def measure(self) -> None:
        found = gc.collect()  # which also empties Python's lists of free tuples
        self.garbage = max(self.garbage, found)
        descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        containers = sum(map(sys.getsizeof, gc.get_objects()))
        now = [descriptors, threads, sys.getallocatedblocks(), containers]
        self._least = list(map(min, now, self._least or now))

    def minus(self, other: Size) -> list[int]:
        return [late - early for early, late in zip(other._least, self._least, strict=True)]


@pytest.mark.parametrize(
    ("wishes", "is_shown"),
    [
        ({"wait": 0.5}, True),
        ({"wait": 0.1, "progress": None}, False),
        ({"wait": 0.1, "progress": lambda _: None}, False),
        ({}, False),
    ],
    ids=["by itself", "silent", "told what to call", "no wait"],
)
def test_a_script_at_a_terminal(
    here: Here, monkeypatch: pytest.MonkeyPatch, wishes: dict[str, Any], *, is_shown: bool
) -> None:
    """A script shows its wait on a terminal by itself, and nothing where it was told what to do."""
    here.write(BUSY)
    monkeypatch.setenv("TERM", "vt100")
    monkeypatch.setattr(sys, "stderr", Terminal())
    refused(**wishes)
    shown = getattr(sys.stderr, "getvalue")()  # noqa: B009 - mypy knows no other type of it
    assert ("Waiting for a GPU: next in the queue" in shown) == bool(shown) == is_shown
    assert not shown or shown.endswith("\x1b[J")


def test_a_script_in_a_pipe(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    """A script whose stderr is no terminal waits in silence."""
    here.write(BUSY)
    refused(wait=0.1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.full
def test_a_log_gets_a_line_only_on_news(here: Here) -> None:
    """What goes to no terminal is a line when the wait begins and one when things change."""
    here.write(BUSY)
    log, states = io.StringIO(), []
    with Live(log) as live:

        def show(waiting: Waiting) -> None:
            live.show(waiting)
            states.append(waiting.rows[0].state)
            if states == [State.BUSY] * 2:
                here.add("fail nvmlDeviceGetComputeRunningProcesses_v3 0 15")
            elif "GPU0 broken" in log.getvalue():  # a line a second at most
                here.write(ONE)

        assert got(wait=LONG_S, progress=show) == "0"
    assert len(states) >= 3
    picture, second = log.getvalue().rstrip().rsplit("\n", 1)
    assert of_gpu(picture) == "busy: no reservation: pid 4321000"
    assert re.match("Waiting for a GPU: next in the queue.* GPU0 broken$", second)
    assert not re.search("[\r\x1b]", log.getvalue())


@pytest.mark.parametrize(("options", "error"), [("", "WaitTimeoutError"), (" --optional", None)])
def test_where_the_limit_runs_out_only_optional_goes_on(
    here: Here, options: str, error: str | None
) -> None:
    """After the limit a cell stops with the reason, and with --optional goes on without a GPU."""
    here.write(BUSY)
    cell = here.shell().run(f"%reserve_gpu --wait 0.1s{options}\nprint('went on')")
    assert cell.error == error
    output = cell.all
    assert ("went on" in cell.stdout) == (error is None)
    assert "Timed out after 0.1 s. " in output
    assert "busy" in of_gpu(cell.shown)
    assert "Traceback" not in output
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert queued(here) == []


@pytest.mark.full
def test_what_is_in_the_way_of_a_look_may_be_mended(here: Here) -> None:
    """Who is in the queue goes on waiting while something stands in place of a lock file."""
    mutex = here.locks / "mutex.lock"
    with ExitStack() as stack:
        stack.enter_context(here.rival("0"))
        calls = count(1)

        def obstruct(_: Waiting) -> None:
            number = next(calls)
            if number == 1:
                (ticket,) = here.locks.glob("queue-*.lock")
                ticket.unlink()  # so the next look is due
                mutex.rename(here.locks / "kept")
                mutex.mkdir()
            elif number == 3:
                mutex.rmdir()
                (here.locks / "kept").rename(mutex)
                stack.close()

        assert got("0", wait=LONG_S, progress=obstruct) == "0"
