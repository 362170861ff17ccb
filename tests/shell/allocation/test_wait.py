"""Waiting for a GPU in the test process: the order, the time of each check, and the end."""

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
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.allocation import policy, snapshot
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import parse
from reserve_gpu.allocation.wait import Explainer, LockChanges
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.queue import QueueEntry, wait_for_news
from reserve_gpu.model.devices import Fault, State
from reserve_gpu.model.errors import NoVisibleDeviceError
from reserve_gpu.model.holders import DeviceStatus, Record
from reserve_gpu.render.progress import Live
from tests.support.holders import a_holder
from tests.support.locked import locked
from tests.support.processes import own_name, wait_for
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


def test_a_free_gpu_goes_to_the_waiters_in_their_order(here: Here) -> None:
    """The order of their checks does not matter."""
    here.write(ONE)
    with (
        reserved(here, "0") as (free,),
        OtherWaiter(here) as a,
        OtherWaiter(here) as b,
        OtherWaiter(here) as c,
    ):
        free()
        for holder, later in ((a, [b, c]), (b, [c]), (c, [])):
            assert [other.check() for other in later] == [None] * len(later)
            assert holder.check() == "0"
            assert [other.check() for other in later] == [None] * len(later)
            holder.__exit__()


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
        (TWO.replace("15360", "81920"), {"min_memory": "64GiB"}, {}, "1"),
        (TWO, {"devices": "0"}, {"min_memory": "32GiB"}, "1"),
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


@pytest.mark.parametrize("wishes", [{}, {"devices": "0", "memory": "1GB"}])
def test_a_request_that_does_not_wait_does_not_pass_a_waiter(
    here: Here, wishes: dict[str, Any]
) -> None:
    """Its preview names the waiter and the waiter's note."""
    here.write(ONE)
    with reserved(here, "0") as (free,), OtherWaiter(here) as other:
        free()
        text = str(would_be_refused(**wishes))
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


def test_checks_of_other_processes_do_not_wake_a_waiter(here: Here) -> None:
    """The waiter sleeps while other files are locked and unlocked."""
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


def test_a_wait_that_ends_without_a_gpu_leaves_no_ticket(here: Here) -> None:
    """A wait can end at its limit or with an exception."""
    here.write(ONE)
    with reserved(here, "0"):
        with pytest.raises(ZeroDivisionError):
            reserve_gpu.reserve(wait=LONG_S, progress=Steps(lambda: 1 // 0))
        assert queued(here) == []
        refused(wait=0.01)
        assert queued(here) == []


@pytest.mark.parametrize("wait", [0, "0.1s"])
@pytest.mark.parametrize("is_thread", [False, True], ids=["main thread", "other thread"])
def test_a_wait_ends_at_its_limit(here: Here, wait: float | str, *, is_thread: bool) -> None:
    """The refusal names the holder, and suggests a wait unless there was one."""
    here.write(ONE)
    with reserved(here, "0"), ThreadPoolExecutor(1) as pool:
        text = pool.submit(refused, wait=wait).result() if is_thread else refused(wait=wait)
    assert ("Timed out after 0.1 s" in text) is bool(wait)
    assert f"pid {os.getpid()}" in of_gpu(text)
    assert ("wait='1h'" in text) is not bool(wait)


class MutexHolder:
    """Holds the mutex from `take` to `drop`, after deleting all tickets so that a check is due."""

    def __init__(self, here: Here) -> None:
        self._here, self._stack = here, ExitStack()

    def take(self) -> None:
        directory = self._stack.enter_context(LockDirectory(str(self._here.locks)))
        self._stack.enter_context(directory.mutex())
        for path in self._here.locks.glob("queue-*"):
            path.unlink()

    def drop(self) -> None:
        self._stack.close()


@pytest.mark.full
def test_a_wait_ends_at_its_limit_while_another_process_holds_the_mutex(here: Here) -> None:
    here.write(ONE)
    holder, start = MutexHolder(here), time.monotonic()
    with reserved(here, "0"):
        try:
            text = refused(wait=0.3, progress=Steps(holder.take))
        finally:
            holder.drop()
    assert f"pid {os.getpid()}" in of_gpu(text)
    assert time.monotonic() - start < 20  # a call without a limit waits for the mutex for 30 s


@pytest.mark.full
def test_a_wait_continues_while_another_process_holds_the_mutex(here: Here) -> None:
    """The progress is still reported."""
    here.write(ONE)
    holder = MutexHolder(here)
    with reserved(here, "0") as (free,):

        def come_free() -> None:
            holder.drop()
            free()

        steps = Steps(holder.take, come_free)
        assert got(wait=LONG_S, progress=steps) == "0"
        assert len(steps.shown) >= 2


def test_a_waiter_whose_ticket_is_deleted_keeps_its_place(here: Here) -> None:
    """The new ticket has the old number."""
    here.write(ONE)
    numbers: list[int] = []
    with reserved(here, "0") as (free,):

        def delete() -> None:
            numbers.extend(ticket.number for ticket in queued(here))
            for path in here.locks.glob("queue-*"):
                path.unlink()

        def check() -> None:
            numbers.extend(ticket.number for ticket in queued(here))
            free()

        assert got(wait=LONG_S, progress=Steps(delete, check)) == "0"
    assert len(numbers) == 2
    assert len(set(numbers)) == 1


def remove_the_directory(here: Here) -> None:
    """Remove the lock directory."""
    shutil.rmtree(here.locks)


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
def test_a_waiter_checks_often_after_a_release(here: Here) -> None:
    """The memory may be freed shortly after the release.

    Each check is reported, and so is each full second, so three reports are within a second only
    if there are several checks in a second.
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
def test_a_wait_survives_problems_of_the_lock_directory(
    here: Here, trouble: Callable[[Here], None]
) -> None:
    """The directory can be removed, or its mutex can be unusable for some time."""
    here.write(BUSY)

    def begin() -> None:
        trouble(here)
        for path in here.locks.glob("queue-*"):
            path.unlink()  # so that a check is due

    def end() -> None:
        unblock_the_mutex(here)
        here.write(ONE)

    steps = Steps(begin, lambda: None, end)
    assert got(wait=LONG_S, progress=steps) == "0"
    assert locked(here.locks) == {f"{UUIDS[0]}.lock"}


@pytest.mark.parametrize("record", [b"", b"rubbish", b'{"pid": 1, "wants": []}'])
def test_the_content_of_a_ticket_does_not_change_the_order(here: Here, record: bytes) -> None:
    """The only waiter gets the GPU even if its ticket is overwritten."""
    here.write(ONE)

    with reserved(here, "0") as (free,):

        def write() -> None:
            (path,) = here.locks.glob("queue-*")
            path.write_bytes(record)
            os.utime(path, ns=(2**60, 2**60))
            free()

        assert got(wait=UNDUE_S, progress=Steps(write)) == "0"


def test_a_request_is_refused_while_another_thread_waits(here: Here) -> None:
    """It fails at once, or at the end of its own limit."""
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
        ({"devices": "7"}, None, reserve_gpu.ImpossibleError),
        ({"count": 2}, "1", reserve_gpu.ImpossibleError),
        ({}, "", NoVisibleDeviceError),
    ],
)
def test_an_impossible_request_fails_without_waiting(
    here: Here, wishes: dict[str, Any], before: str | None, error: type[Exception]
) -> None:
    """It does not join the queue."""
    here.write(TWO)
    if before is not None:
        os.environ.update(CUDA_VISIBLE_DEVICES=before, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    with reserved(here, "0", "1"), pytest.raises(error) as caught:
        reserve_gpu.reserve(**wishes, wait=True)
    assert type(caught.value) is error
    assert list(here.locks.glob("queue-*")) == []


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


@pytest.mark.parametrize("trouble", ["compute 1 3500", "fail nvmlDeviceGetComputeMode 0 15"])
def test_a_waiter_releases_the_lock_of_a_gpu_that_is_not_idle(here: Here, trouble: str) -> None:
    """While it waits, another process can reserve the GPU."""
    here.write(f"{ONE}{trouble}")

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


def test_the_cached_processes_of_a_gpu_expire(here: Here) -> None:
    """A waiter learns that another process uses the GPU, although its state is the same."""
    here.write(BUSY)
    with OtherWaiter(here) as other:
        explain = Explainer(other.context, every_s=0.1)

        def pids() -> list[int]:
            outcome = attempt(other.context, entry=other.entry)
            assert isinstance(outcome, Denied)
            return [process.pid for row in explain(outcome.rows) for process in row.processes]

        assert pids() == [4321000]
        here.write(BUSY.replace("4321000", "4321001"))
        wait_for(lambda: pids() == [4321001])


def test_a_release_by_the_same_user_is_a_change_for_a_waiter_at_its_quota(here: Here) -> None:
    with reserved(here, "0", "1") as (free, _), OtherWaiter(here) as other:
        news, (row, _) = LockChanges(other.context), other.denied.rows
        news.forget(Denied((DeviceStatus(row.device, State.LIMITED, counted=row.holders),)))
        assert not news()
        free()
        assert news()


# A reserved GPU, a busy one, busy MIG instances, and a GPU that can't be read.
EACH_STATE = """
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
# Numbers of checks after which the process is measured; the minimum of several measurements counts.
# Python's caches are nearly full after the first of them. Growth in only one of the two intervals
# is not caused by the checks: pytest-xdist receives the names of tests meanwhile.
MEASURED, REPEATED = (300, 450, 600), 8


@pytest.mark.full
@pytest.mark.parametrize("is_deleted", [False, True], ids=["", "its ticket deleted"])
def test_hundreds_of_checks_leave_no_files_threads_or_objects(
    here: Here, *, is_deleted: bool
) -> None:
    here.write(EACH_STATE)
    sizes = [Measurement() for _ in MEASURED]
    with ExitStack() as stack:
        stack.enter_context(reserved(here, "0"))
        other = stack.enter_context(OtherWaiter(here))
        news = LockChanges(other.context)
        gc.disable()  # some programs disable the collector, so garbage that only it frees counts
        stack.callback(gc.enable)
        for check in range(MEASURED[-1] + REPEATED):
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
                if 0 <= check - first < REPEATED:
                    size.measure()
    early, middle, late = sizes
    files, threads, blocks, container_bytes = map(min, middle.minus(early), late.minus(middle))
    assert (files, threads) == (0, 0)
    assert min(middle.garbage, late.garbage) < 80  # one object for each check would be 150
    # Python 3.10 allocates one for each function at its 1024th call; one for each check is 150.
    assert blocks < 120
    assert container_bytes < 500  # a list that grows with each check grows by 1200


class Measurement:
    """The minimum number of files, threads, memory blocks and container bytes of this process.

    Attributes:
        garbage: The maximum number of objects that only the collector could free.
    """

    def __init__(self) -> None:
        self._least: list[int] = []
        self.garbage = 0

    def measure(self) -> None:
        found = gc.collect()  # this also empties Python's lists of free tuples
        self.garbage = max(self.garbage, found)
        descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        containers = sum(map(sys.getsizeof, gc.get_objects()))
        now = [descriptors, threads, sys.getallocatedblocks(), containers]
        self._least = list(map(min, now, self._least or now))

    def minus(self, other: Measurement) -> list[int]:
        return [late - early for early, late in zip(other._least, self._least, strict=True)]


@pytest.mark.parametrize(
    ("wishes", "is_shown"),
    [({"wait": 0.5}, True), ({"wait": 0.1, "progress": lambda _: None}, False), ({}, False)],
    ids=["wait", "wait with a callback", "no wait"],
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


def test_a_script_without_a_terminal_waits_silently(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    here.write(BUSY)
    refused(wait=0.1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.full
def test_a_log_contains_a_line_for_each_change(here: Here) -> None:
    """The first entry is a picture of all GPUs, without control characters."""
    here.write(BUSY)
    log, states = io.StringIO(), []
    with Live(log) as live:

        def show(waiting: Waiting) -> None:
            live.show(waiting)
            states.append(waiting.rows[0].state)
            if states == [State.BUSY] * 2:
                here.add("fail nvmlDeviceGetComputeRunningProcesses_v3 0 15")
            elif "GPU0 broken" in log.getvalue():  # at most one line is written in a second
                here.write(ONE)

        assert got(wait=LONG_S, progress=show) == "0"
    assert len(states) >= 3
    picture, second = log.getvalue().rstrip().rsplit("\n", 1)
    assert of_gpu(picture).startswith("busy")
    assert second.endswith("GPU0 broken")
    assert not re.search("[\r\x1b]", log.getvalue())


@pytest.mark.parametrize(("options", "error"), [("", "WaitTimeoutError"), (" --optional", None)])
def test_a_cell_continues_after_the_limit_only_if_the_gpu_is_optional(
    here: Here, options: str, error: str | None
) -> None:
    """The cell sees no GPU then."""
    here.write(BUSY)
    cell = here.shell().run(f"%reserve_gpu --wait 0.1s{options}\nprint('went on')")
    assert cell.error == error
    output = cell.all
    assert ("went on" in cell.stdout) == (error is None)
    assert "Timed out after 0.1 s" in output
    assert "busy" in of_gpu(cell.shown)
    assert "Traceback" not in output
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert queued(here) == []


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
