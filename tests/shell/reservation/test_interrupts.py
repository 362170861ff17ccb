"""Ctrl-C, and signal handlers that call this package, during a call of this package."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from tests.support.reserving import got, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.here import Here
    from tests.support.machine import Child

    Children = tuple[Child, Child]
LONG_S = 30


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


def test_a_release_in_a_handler_applies_at_the_end_of_the_call(here: Here) -> None:
    """The handler's release is delayed, and then also releases what the call reserved."""
    assert got("1") == "1"
    with ExitStack() as stack, calling(reserve_gpu.release) as outcomes:
        stack.enter_context(here.rival("0"))

        def release_in_handler(_: object) -> None:
            signal.raise_signal(signal.SIGUSR1)
            assert reserve_gpu.current()
            assert not is_free(here, "1")
            stack.close()

        reserve_gpu.reserve("0", wait=LONG_S, progress=release_in_handler)
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
