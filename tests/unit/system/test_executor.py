"""Tests of the executor: order of calls, errors, steps between calls, and abandoned calls."""

from __future__ import annotations

import math
import signal
import threading
import time
from pathlib import Path

import pytest

from reserve_gpu.system.executor import Call, Executor, GivenUpError, report_progress, sleep
from tests.support.executor import alarms_raise
from tests.support.processes import wait_for

LONG_S = 30


def no_step() -> None:
    """Request no step after a call."""


def raise_signal(_: object = None) -> None:
    """Let the handler of SIGALRM interrupt this thread."""
    signal.raise_signal(signal.SIGALRM)


class Log:
    """The order of events, and the threads on which they happened."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.threads: set[int] = set()  # the kernel does not reuse these numbers soon

    def add(self, entry: str) -> None:
        """Log an event of the current thread."""
        self.entries.append(entry)
        self.threads.add(threading.get_native_id())

    def living(self) -> int:
        """Return the number of threads that have not ended."""
        return sum(Path(f"/proc/self/task/{thread}").exists() for thread in self.threads)


def test_no_call_is_lost() -> None:
    """Each of thousands of calls is made once, even if the executor's thread is about to end."""
    executor = Executor(no_step)
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


def test_an_error_reaches_the_caller() -> None:
    """An exception of a call is raised in its caller, and the next call is made."""
    executor = Executor(no_step)
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 / 0)
    assert executor.run(int) == 0


def test_steps() -> None:
    """A step follows each call, pause and wake-up, and the thread ends after the last step."""
    log = Log()
    pauses: list[float | None] = [LONG_S, 0.0, LONG_S, LONG_S, None]

    def step() -> float | None:
        log.add("step")
        return pauses.pop(0)

    executor = Executor(step)
    executor.run(log.add, "call")
    wait_for(lambda: len(pauses) == 4)
    executor.wake()
    wait_for(lambda: len(pauses) == 2)  # two steps, because the first asked for no pause
    executor.run(log.add, "call")
    wait_for(lambda: len(pauses) == 1)
    assert log.living() == len(log.threads) == 1
    executor.wake()
    wait_for(lambda: not log.living())
    assert log.entries == ["call", "step", "step", "step", "call", "step", "step"]
    assert len(log.threads) == 1


def test_steps_during_a_call() -> None:
    """A waiting call makes a step only if one is due, or if the executor was woken."""
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


def test_an_urgent_call_during_another() -> None:
    """A waiting call is interrupted by an urgent call, but not by a call that may wait."""
    executor, log = Executor(no_step), Log()
    urgent, patient = Call(log.add, "urgent"), Call(log.add, "patient", until=math.inf)

    def work() -> None:
        executor.post(patient)
        executor.post(urgent)
        executor.between()
        log.add("work")

    executor.run(work)
    assert patient.wait(limit_s=LONG_S)
    assert log.entries == ["urgent", "work", "patient"]
    assert len(log.threads) == 1


def test_an_interrupted_call_ends() -> None:
    """If the caller is interrupted by an exception, its call ends at the next checkpoint."""
    executor, log = Executor(no_step), Log()

    def work() -> None:
        try:
            report_progress("half done")
            sleep(LONG_S)
        except GivenUpError:
            log.add("given up")
            raise

    start = time.monotonic()
    with alarms_raise(), pytest.raises(TimeoutError):
        executor.run(work, show=raise_signal)
    assert log.entries == ["given up"]
    assert len(log.threads) == 1
    assert time.monotonic() - start < LONG_S


def test_a_call_that_was_abandoned_before_its_turn_is_never_made() -> None:
    executor, log, begin = Executor(no_step), Log(), threading.Event()
    first, second, third = Call(begin.wait, LONG_S), Call(log.add, "second"), Call(log.add, "third")
    for call in (first, second, third):
        executor.post(call)
    second.given_up = "its caller was interrupted"
    begin.set()
    assert third.wait(limit_s=LONG_S)
    assert log.entries == ["third"]
