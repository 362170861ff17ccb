"""Calls on threads of our own: in turn, given up, in the midst of signals, and without threads."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.reservation.session import session
from reserve_gpu.system import executor
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells
from tests.support.locked import locked
from tests.support.processes import queue, wait_for
from tests.support.reserving import got, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

from tests.support.executor import no_threads, raising

LONG_S = 30
HUGE = 1 << 62  # bytes of stack, which no thread can be given


def release() -> tuple[object, ...]:
    return reserve_gpu.release()


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
