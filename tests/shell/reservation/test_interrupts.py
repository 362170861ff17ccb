"""Ctrl-C, and handlers of signals, in the midst of a call."""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from tests.support.locked import watched
from tests.support.reserving import got, refused, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.here import Here
    from tests.support.machine import Child

    Children = tuple[Child, Child]
LONG_S = 30
SHORT_S = 0.5  # but long enough for a look
REFUSED_IN_A_LINE = r"This process is already reserving, releasing or querying GPUs.*\.$"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def calling(function: Callable[[], object]) -> Iterator[list[str]]:
    """Call the function in a handler of SIGUSR1; what comes of it each time, in words."""
    said: list[str] = []

    def handler(_number: int, _frame: Any) -> None:
        try:
            function()
            said.append("")
        except reserve_gpu.ReserveGPUError as error:
            said.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield said
    finally:
        signal.signal(signal.SIGUSR1, before)


def signal_once(_: object) -> None:
    signal.raise_signal(signal.SIGUSR1)


def is_free(here: Here, number: str) -> bool:
    with LockDirectory(str(here.locks)) as locks, locks.mutex():
        return not locks.holders_of(here.uuid(number))


@pytest.mark.parametrize("held", [None, "1"], ids=["nothing", "another"])
def test_interrupted_wait(here: Here, held: str | None) -> None:
    """Ctrl-C ends a wait, out of the queue, with what was held before, or with no GPU visible."""
    if held:
        got(held)
    with here.rival("0"):
        with pytest.raises(KeyboardInterrupt):
            reserve_gpu.reserve("0", wait=LONG_S, progress=lambda _: interrupt())
        with LockDirectory(str(here.locks)) as locks, locks.mutex():
            assert locks.tickets() == []
    assert os.environ["CUDA_VISIBLE_DEVICES"] == (held or "")
    assert (is_free(here, "0"), is_free(here, "1")) == (True, not held)
    assert got("0") == "0"


def test_release_in_a_handler(here: Here) -> None:
    """A handler that releases in the midst of a call: all is released at the end of that call."""
    assert got("1") == "1"
    with ExitStack() as stack, calling(reserve_gpu.release) as said:
        stack.enter_context(here.rival("0"))

        def come_free(_: object) -> None:
            signal.raise_signal(signal.SIGUSR1)
            assert reserve_gpu.current()
            assert not is_free(here, "1")
            stack.close()

        reserve_gpu.reserve("0", wait=LONG_S, progress=come_free)
    assert said == [""]
    assert reserve_gpu.current() is None
    assert variables() == {}
    assert is_free(here, "0")
    assert is_free(here, "1")
    assert got() == "0"


def test_release_in_a_handler_in_vain(here: Here) -> None:
    """A handler that releases in the midst of a call that fails is obeyed anyway."""
    assert got("1") == "1"
    rival, failing = here.rival("0"), pytest.raises(reserve_gpu.WaitTimeoutError)
    with rival, calling(reserve_gpu.release) as said, failing:
        reserve_gpu.reserve("0", wait=SHORT_S, progress=signal_once)
    assert said == [""]
    assert reserve_gpu.current() is None
    assert variables() == {}
    assert is_free(here, "1")


def test_reserve_in_a_handler(here: Here) -> None:
    """A handler that reserves in the midst of a wait is refused in a line; the wait goes on."""
    with ExitStack() as stack, calling(reserve_gpu.reserve) as said:
        stack.enter_context(here.rival("0"))
        numbers: list[int] = []

        def signal_twice(_: object) -> None:
            signal.raise_signal(signal.SIGUSR1)
            with LockDirectory(str(here.locks)) as locks, locks.mutex():
                numbers.extend(ticket.number for ticket in locks.tickets())
            if len(said) == 2:
                stack.close()

        assert got("0", wait=LONG_S, progress=signal_twice) == "0"
    assert len(said) == 2
    assert all(re.match(REFUSED_IN_A_LINE, text) for text in said)
    assert len(set(numbers)) == 1
    assert not is_free(here, "0")


def test_other_calls_in_a_handler(here: Here) -> None:
    """In the midst of a call a handler may ask what is held, and look."""
    held = reserve_gpu.reserve("1")

    def ask() -> None:
        assert reserve_gpu.current() is held
        assert len(reserve_gpu.status().rows) == 2

    with here.rival("0"), calling(ask) as said:
        refused("0", wait=SHORT_S, progress=signal_once)
    assert said == [""]
    assert reserve_gpu.current() is held


def test_reserve_in_a_handler_in_the_midst_of_a_look(here: Here) -> None:
    """A handler that reserves while its own thread looks at the locks gets its GPU."""
    handled, main = threading.Event(), threading.main_thread().ident or 0

    def signal_once_in_the_mutex(event: str, arguments: tuple[Any, ...]) -> None:
        is_lock = event == "open" and "GPU-" in str(arguments[0])
        if is_lock and threading.get_ident() != main and not handled.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            handled.wait(LONG_S)

    def reserve_once() -> None:
        handled.set()
        reserve_gpu.reserve("0")

    with calling(reserve_once) as said, watched(signal_once_in_the_mutex):
        assert len(reserve_gpu.status().rows) == 2
    assert said == [""]
    assert not is_free(here, "0")


@pytest.mark.parametrize("is_got", [True, False], ids=["got", "in vain"])
def test_release_of_one_reservation_in_a_handler(here: Here, *, is_got: bool) -> None:
    """A handler that releases one reservation leaves alone what the call itself reserves."""
    held = reserve_gpu.reserve("1")
    with ExitStack() as stack, calling(held.release):
        stack.enter_context(here.rival("0"))

        def signal_and_come_free(_: object) -> None:
            signal_once(None)
            if is_got:
                stack.close()

        with suppress(reserve_gpu.WaitTimeoutError):
            wait = LONG_S if is_got else SHORT_S
            reserve_gpu.reserve("0", wait=wait, progress=signal_and_come_free)
    current = reserve_gpu.current()
    assert (current and current.devices[0].number) == ("0" if is_got else None)
    assert is_free(here, "0") == (not is_got)
    assert is_free(here, "1")
