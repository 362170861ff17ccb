"""Calls on threads of our own: in turn, given up, in the midst of signals, and without threads."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from reserve_gpu.system import executor
from reserve_gpu.system.executor import Call, Executor, GivenUpError, report_progress, sleep
from tests.support.executor import raising
from tests.support.processes import wait_for

LONG_S = 30


def never() -> None:
    """Have nothing to do between calls."""


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
