"""Ctrl-C, and signal handlers that call this package, during a call of this package."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
SHORT_S = 0.5  # long enough for one check


def interrupt() -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def calling(function: Callable[[], object]) -> Iterator[list[str]]:
    """Call the function in a handler of SIGUSR1; yield the error's text of each call, or ""."""
    outcomes: list[str] = []

    def handler(_number: int, _frame: Any) -> None:
        try:
            function()
            outcomes.append("")
        except reserve_gpu.ReserveGPUError as error:
            outcomes.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield outcomes
    finally:
        signal.signal(signal.SIGUSR1, before)


def signal_once(_: object) -> None:
    """Send SIGUSR1 to this process."""
    signal.raise_signal(signal.SIGUSR1)


def is_free(here: Here, number: str) -> bool:
    """Return whether no process holds the device."""
    with LockDirectory(str(here.locks)) as locks, locks.mutex():
        return not locks.holders_of(here.uuid(number))


@pytest.mark.parametrize("held", [None, "1"], ids=["nothing", "another"])
def test_ctrl_c_ends_a_wait(here: Here, held: str | None) -> None:
    """The process leaves the queue, and keeps what it held, or sees no GPU."""
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


@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "refused"])
def test_a_release_in_a_handler_applies_at_the_end_of_the_call(
    here: Here, *, is_granted: bool
) -> None:
    """The handler's release is delayed, and then also releases what the call reserved."""
    assert got("1") == "1"
    with ExitStack() as stack, calling(reserve_gpu.release) as outcomes:
        stack.enter_context(here.rival("0"))

        def release_in_handler(_: object) -> None:
            signal.raise_signal(signal.SIGUSR1)
            assert reserve_gpu.current()
            assert not is_free(here, "1")
            if is_granted:
                stack.close()

        with nullcontext() if is_granted else pytest.raises(reserve_gpu.WaitTimeoutError):
            wait = LONG_S if is_granted else SHORT_S
            reserve_gpu.reserve("0", wait=wait, progress=release_in_handler)
    assert outcomes == [""]
    assert reserve_gpu.current() is None
    assert variables() == {}
    assert is_free(here, "0")
    assert is_free(here, "1")
    assert got() == "0"


def test_a_request_in_a_handler_is_refused_during_a_wait(here: Here) -> None:
    """The wait continues with the same ticket."""
    with ExitStack() as stack, calling(reserve_gpu.reserve) as outcomes:
        stack.enter_context(here.rival("0"))
        numbers: list[int] = []

        def signal_twice(_: object) -> None:
            signal.raise_signal(signal.SIGUSR1)
            with LockDirectory(str(here.locks)) as locks, locks.mutex():
                numbers.extend(ticket.number for ticket in locks.tickets())
            if len(outcomes) == 2:
                stack.close()

        assert got("0", wait=LONG_S, progress=signal_twice) == "0"
    assert len(outcomes) == 2
    assert all("already reserving" in text and len(text.splitlines()) == 1 for text in outcomes)
    assert len(set(numbers)) == 1
    assert not is_free(here, "0")


def test_current_and_status_can_be_called_in_a_handler(here: Here) -> None:
    held = reserve_gpu.reserve("1")

    def ask() -> None:
        assert reserve_gpu.current() is held
        assert len(reserve_gpu.status().rows) == 2

    with here.rival("0"), calling(ask) as outcomes:
        refused("0", wait=SHORT_S, progress=signal_once)
    assert outcomes == [""]
    assert reserve_gpu.current() is held


def test_a_request_in_a_handler_is_granted_during_a_status(here: Here) -> None:
    handled, main = threading.Event(), threading.main_thread().ident or 0

    def signal_once_in_the_mutex(event: str, arguments: tuple[Any, ...]) -> None:
        is_lock = event == "open" and "GPU-" in str(arguments[0])
        if is_lock and threading.get_ident() != main and not handled.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            handled.wait(LONG_S)

    def reserve_once() -> None:
        handled.set()
        reserve_gpu.reserve("0")

    with calling(reserve_once) as outcomes, watched(signal_once_in_the_mutex):
        assert len(reserve_gpu.status().rows) == 2
    assert outcomes == [""]
    assert not is_free(here, "0")


@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "refused"])
def test_the_release_of_one_reservation_in_a_handler_keeps_the_next_one(
    here: Here, *, is_granted: bool
) -> None:
    """A device that the interrupted call reserves is not released."""
    held = reserve_gpu.reserve("1")
    with ExitStack() as stack, calling(held.release):
        stack.enter_context(here.rival("0"))

        def signal_and_come_free(_: object) -> None:
            signal_once(None)
            if is_granted:
                stack.close()

        with suppress(reserve_gpu.WaitTimeoutError):
            wait = LONG_S if is_granted else SHORT_S
            reserve_gpu.reserve("0", wait=wait, progress=signal_and_come_free)
    current = reserve_gpu.current()
    assert (current and current.devices[0].number) == ("0" if is_granted else None)
    assert is_free(here, "0") == (not is_granted)
    assert is_free(here, "1")
