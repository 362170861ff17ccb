"""Tests of reservations from signal handlers, finalizers and threads, and without any thread."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.errors import NoThreadError
from reserve_gpu.reservation.session import session
from reserve_gpu.system import executor
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells
from tests.support.executor import no_threads
from tests.support.locked import locked
from tests.support.processes import queue, wait_for
from tests.support.reserving import got, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

LONG_S = 30


def release() -> tuple[object, ...]:
    """Release, without the type of what is released."""
    return reserve_gpu.release()


# -- signal handlers and finalizers ----------------------------------------------------------------


@pytest.mark.parametrize(
    "lock", [no_fork, None], ids=["during an import", "at the start of a cell"]
)
def test_a_signal_handler_while_a_lock_is_held(here: Here, lock: Any) -> None:
    """A handler does not wait for a lock of the main thread: it releases later, or is refused."""
    results: list[object] = []

    def handler(_number: int, _frame: Any) -> None:
        results.append(release())
        try:
            reserve_gpu.reserve(1)
        except reserve_gpu.RequestError as error:
            results.append(type(error))

    reserve_gpu.reserve(memory="1GB")  # has steps that need the lock of cells
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with lock or cells().quiet:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert results == [(), reserve_gpu.RequestError]
    wait_for(lambda: not locked(here.locks))
    assert reserve_gpu.current() is None


@pytest.mark.parametrize("is_sessions", [True, False], ids=["session", "separate thread"])
def test_release_by_a_finalizer(here: Here, *, is_sessions: bool) -> None:
    """A release by a finalizer on one of our threads takes effect after the call there."""
    reserve_gpu.reserve()

    def work() -> tuple[object, bool]:
        return release(), reserve_gpu.current() is not None

    answer = session().run(work) if is_sessions else executor.run_on_new_thread(work)
    assert answer == ((), True) if is_sessions else answer[0] == ()
    wait_for(lambda: not locked(here.locks))
    assert variables() == {}


# -- another thread that waits ---------------------------------------------------------------------


@contextmanager
def another_thread_waits(here: Here) -> Iterator[None]:
    """Let another thread wait in the queue for GPU0 during the block, and get it afterwards."""
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
    """A release, or the end of a `with` block, does not wait for a thread in the queue."""
    with ExitStack() as waiting:
        with reserve_gpu.reserve("1"):
            waiting.enter_context(another_thread_waits(here))
        assert not any(name.startswith(here.uuid("1")) for name in locked(here.locks))
    reserve_gpu.release()
    assert got("1") == "1"
    with another_thread_waits(here):
        reserve_gpu.release()
        assert not any(name.startswith(here.uuid("1")) for name in locked(here.locks))


# -- no thread -------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [None, "1"], ids=["nothing held", "GPU1 held"])
def test_no_thread(here: Here, held: str | None) -> None:
    """If no thread can be started, a reservation fails without changes, and a release works."""
    if held:
        got(held)
    wait_for(lambda: not session()._is_serving.locked())  # the thread might serve another call
    before = reserve_gpu.current(), locked(here.locks), variables()
    with no_threads():
        with pytest.raises(NoThreadError):
            reserve_gpu.reserve("0")
        assert (reserve_gpu.current(), locked(here.locks), variables()) == before
        reserve_gpu.release()
    assert (reserve_gpu.current(), locked(here.locks), variables()) == (None, set(), {})
    assert got("0") == "0"
