"""Calls on threads of our own: in turn, given up, in the midst of signals, and without threads."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.reservation.session import session
from reserve_gpu.system import executor
from reserve_gpu.system.executor import Call, Executor, GivenUpError, report_progress, sleep
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells
from tests.locked import locked
from tests.processes import queue, wait_for
from tests.reserving import got, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here
    from tests.machine import Machine

LONG_S = 30
HUGE = 1 << 62  # bytes of stack, which no thread can be given


def never() -> None:
    """Have nothing to do between calls."""


def release() -> tuple[object, ...]:
    return reserve_gpu.release()


@contextmanager
def no_threads() -> Iterator[None]:
    """Let this process start no thread in the block, as at its limit (ulimit -u)."""
    before = threading.stack_size(HUGE)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def raising() -> Iterator[None]:
    """Let a handler of SIGALRM raise TimeoutError."""

    def handler(_number: int, _frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupt(_: object = None) -> None:
    signal.raise_signal(signal.SIGALRM)


class Log:
    """What happened, in turn, and on which threads."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.threads: set[int] = set()  # by the kernel's number, which is not soon another's

    def add(self, entry: str) -> None:
        self.entries.append(entry)
        self.threads.add(threading.get_native_id())

    def living(self) -> int:
        """Return how many of the threads have not ended."""
        return sum(Path(f"/proc/self/task/{thread}").exists() for thread in self.threads)


# -- one thread -----------------------------------------------------------------------------------


def test_calls_in_turn() -> None:
    """Calls of several threads are made one after the other, as they came, by one other thread."""
    executor, log, begin = Executor(never), Log(), threading.Event()

    def work(name: str) -> None:
        log.add(f"{name} begins")
        log.add(f"{name} ends")

    posted: list[Call[Any]] = [
        Call(begin.wait, LONG_S),
        *(Call(work, str(number)) for number in range(20)),
    ]
    executor.post(posted[0])
    for call in posted[1:]:
        thread = threading.Thread(target=executor.post, args=(call,))
        thread.start()
        thread.join()
    begin.set()
    assert all(call.wait() for call in posted)
    assert log.entries == [f"{n} {does}" for n in range(20) for does in ("begins", "ends")]
    assert len(log.threads) == 1
    assert threading.get_native_id() not in log.threads


def test_no_call_is_lost() -> None:
    """Each of thousands of calls is made once, whenever the thread before is about to end."""
    executor = Executor(never)
    made: list[tuple[int, int]] = []

    def call_often(name: int) -> None:
        for number in range(1000):
            executor.run(made.append, (name, number))

    threads = [threading.Thread(target=call_often, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [(name, number) for name in range(4) for number in range(1000)]


def test_an_error_is_the_callers() -> None:
    """What a call raises is raised where it was asked for, and the next call is made."""
    executor = Executor(never)
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 / 0)
    assert executor.run(int) == 0


def test_steps() -> None:
    """A step follows each call, pause and waking; when none is to come the thread ends."""
    log = Log()
    pauses: list[float | None] = [LONG_S, 0.0, LONG_S, LONG_S, None]

    def step() -> float | None:
        log.add("step")
        return pauses.pop(0)

    executor = Executor(step)
    executor.run(log.add, "call")
    wait_for(lambda: len(pauses) == 4)
    executor.wake()
    wait_for(lambda: len(pauses) == 2)  # two, as the pause of the first was none
    executor.run(log.add, "call")
    wait_for(lambda: len(pauses) == 1)
    assert log.living() == len(log.threads) == 1
    executor.wake()
    wait_for(lambda: not log.living())
    assert log.entries == ["call", "step", "step", "step", "call", "step", "step"]
    assert len(log.threads) == 1


def test_steps_in_the_midst_of_a_call() -> None:
    """A call that waits takes a step only when that is due, or somebody has woken it."""
    pauses: list[float | None] = [LONG_S, 0.0, LONG_S, None]
    executor = Executor(lambda: pauses.pop(0))

    def work() -> list[int]:
        left = []
        for number in range(5):
            if number == 2:
                executor.wake()
            executor.between()
            left.append(len(pauses))
        return left

    assert executor.run(work) == [3, 3, 2, 1, 1]


def test_a_call_in_the_midst_of_another() -> None:
    """A call that may not wait behind one that waits is made meanwhile; others come after it."""
    executor, log = Executor(never), Log()
    hasty, patient = Call(log.add, "hasty"), Call(log.add, "patient", until=math.inf)

    def work() -> None:
        executor.post(patient)
        executor.post(hasty)
        executor.between()
        log.add("work")

    executor.run(work)
    assert patient.wait(limit_s=LONG_S)
    assert log.entries == ["hasty", "work", "patient"]
    assert len(log.threads) == 1


# -- given up -------------------------------------------------------------------------------------


def test_given_up() -> None:
    """An exception of the caller's handler ends the call at its next checkpoint."""
    executor, log = Executor(never), Log()

    def work() -> None:
        try:
            report_progress("half done")
            sleep(LONG_S)
        except GivenUpError:
            log.add("given up")
            raise

    start = time.monotonic()
    with raising(), pytest.raises(TimeoutError):
        executor.run(work, show=interrupt)
    assert log.entries == ["given up"]
    assert len(log.threads) == 1
    assert time.monotonic() - start < LONG_S


def test_given_up_before_its_turn() -> None:
    """A call that was given up before its turn is never made."""
    executor, log, begin = Executor(never), Log(), threading.Event()
    first, second, third = Call(begin.wait, LONG_S), Call(log.add, "second"), Call(log.add, "third")
    for call in (first, second, third):
        executor.post(call)
    second.given_up = "its caller has gone"
    begin.set()
    assert third.wait(limit_s=LONG_S)
    assert log.entries == ["third"]


def test_apart_is_given_up() -> None:
    """Who is interrupted while it looks leaves no thread that goes on looking."""
    log = Log()

    def look() -> None:
        log.add("look")
        executor.report_progress(None)
        executor.sleep(LONG_S)

    with raising(), pytest.raises(TimeoutError):
        executor.run_on_new_thread(look, show=interrupt)
    assert log.entries == ["look"]
    wait_for(lambda: not log.living())


# -- signals, finalizers and forks ----------------------------------------------------------------


@pytest.mark.parametrize("lock", [no_fork, None], ids=["an import", "the begin of a cell"])
def test_a_handler_where_the_thread_may_wait(here: Here, lock: Any) -> None:
    """A handler that comes while the main thread has a lock doesn't wait for who waits for it.

    What it releases is released after that; to reserve it is refused.
    """
    said: list[object] = []

    def handler(_number: int, _frame: Any) -> None:
        said.append(release())
        try:
            reserve_gpu.reserve(1)
        except reserve_gpu.RequestError as error:
            said.append(type(error))

    reserve_gpu.reserve(memory="1GB")  # has steps that need the second lock
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with lock or cells().quiet:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said == [(), reserve_gpu.RequestError]
    wait_for(lambda: not locked(here.locks))
    assert reserve_gpu.current() is None


@pytest.mark.parametrize("is_own", [True, False], ids=["session's", "look's"])
def test_release_by_a_finalizer(here: Here, *, is_own: bool) -> None:
    """What Python frees on a thread of ours may release: that is done after the call there."""
    reserve_gpu.reserve()

    def work() -> tuple[object, bool]:
        return release(), reserve_gpu.current() is not None

    answer = session().run(work) if is_own else executor.run_on_new_thread(work)
    assert answer == ((), True) if is_own else answer[0] == ()
    wait_for(lambda: not locked(here.locks))
    assert variables() == {}


@contextmanager
def another_thread_waits(here: Here) -> Iterator[None]:
    """Have another thread wait in the queue for GPU0; it goes on to the end, and gets it then."""
    with ExitStack() as rival:
        rival.enter_context(here.rival("0"))
        waiting = threading.Thread(target=got, args=("0",), kwargs={"wait": LONG_S})
        waiting.start()
        wait_for(lambda: queue(here))
        yield
        assert queue(here)
        assert waiting.is_alive()
    waiting.join()
    current = reserve_gpu.current()
    assert current
    assert current.devices[0].number == "0"


def test_release_while_another_thread_waits(here: Here) -> None:
    """Who releases doesn't wait for a thread that waits in the queue, which goes on."""
    assert got("1") == "1"
    with another_thread_waits(here):
        reserve_gpu.release()
        assert not any(name.startswith(here.uuid("1")) for name in locked(here.locks))


def test_a_block_ends_while_another_thread_waits(here: Here) -> None:
    """The end of a `with` block doesn't wait for a thread that waits in the queue."""
    with ExitStack() as waiting:
        with reserve_gpu.reserve("1"):
            waiting.enter_context(another_thread_waits(here))
        assert not any(name.startswith(here.uuid("1")) for name in locked(here.locks))


def test_interrupted_behind_another_thread_that_waits(here: Here) -> None:
    """Ctrl-C ends a wait also behind another thread's, which goes on."""

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        reserve_gpu.reserve("1", wait=LONG_S, progress=None)

    with another_thread_waits(here), raising(), pytest.raises(TimeoutError):
        wait()


# -- no thread ------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [None, "1"], ids=["nothing", "something"])
def test_no_thread(here: Here, held: str | None) -> None:
    """Where no thread can be started that is said, and nothing changes; a release still works."""
    if held:
        got(held)
    wait_for(lambda: not session()._is_serving.locked())  # that thread would be enough
    before = reserve_gpu.current(), locked(here.locks), variables()
    with no_threads():
        with pytest.raises(
            reserve_gpu.ReserveGPUError, match="This process can't start a thread"
        ) as caught:
            reserve_gpu.reserve("0")
        assert type(caught.value).__name__ == "NoThreadError"
        assert (reserve_gpu.current(), locked(here.locks), variables()) == before
        reserve_gpu.release()
    assert (reserve_gpu.current(), locked(here.locks), variables()) == (None, set(), {})
    assert got("0") == "0"


def test_a_block_ends_without_a_thread(here: Here) -> None:
    """The end of a `with` block releases also where no thread can be started any more."""
    with reserve_gpu.reserve(), no_threads():
        pass
    assert not locked(here.locks)
    assert variables() == {}


def test_a_cell_ends_without_a_thread(here: Here) -> None:
    """Where no thread can be started a cell runs and ends as ever."""
    shell = here.shell()
    reserve_gpu.reserve()
    with no_threads():
        assert "Error" not in shell.run("1").all
    assert reserve_gpu.current()


@pytest.mark.promise
@pytest.mark.process
def test_released_at_exit(machine: Machine) -> None:
    """What is called at the end of Python can release, also where no thread can be started then."""
    done = machine.python(
        "import atexit, os, reserve_gpu\n"
        "@atexit.register\n"
        "def at_exit():\n"
        "    print(reserve_gpu.release(), os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
        "reserve_gpu.reserve(memory='1GB')\n"
    )
    assert done.stdout.startswith("(<GPU0: "), done
    assert done.stdout.endswith(",) None\n"), done
    assert done.stderr == ""


LOCK_IMPORTS = "import _imp\n_imp.acquire_lock()"  # as a handler that raises in an import does


@pytest.mark.process
@pytest.mark.parametrize(
    ("wishes", "rules"),
    [
        ("", ""),
        ("memory='1GB'", ""),
        ("wait=1", ""),
        ("", "[limits]\ngpus = 2\n"),
    ],
    ids=["plain", "part", "wait", "rules"],
)
def test_the_import_lock_that_a_signal_has_left(machine: Machine, wishes: str, rules: str) -> None:
    """A handler that has raised in an import leaves Python's lock: a reservation goes on."""
    machine.rules.write_text(rules)
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve(wishes).error is None
        assert child.run("reserve_gpu.release()\nstr(reserve_gpu.current())").value == "None"


@pytest.mark.process
def test_a_refusal_needs_no_lock_of_imports(machine: Machine) -> None:
    """With that lock left to the main thread a refusal answers, at once and after a wait."""
    with machine.child() as holder, machine.child() as child:
        holder.reserve("count=2")
        child.run(LOCK_IMPORTS)
        assert child.reserve("").error == "NoFreeDeviceError"
        assert child.reserve("wait=0.3").error == "WaitTimeoutError"
