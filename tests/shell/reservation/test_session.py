"""After interrupts, errors, nested blocks and exec, locks and variables agree."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import api
from reserve_gpu.reservation.session import _sessions, session
from reserve_gpu.system.settings import HELD
from tests.support.locked import held, watched
from tests.support.processes import wait_for
from tests.support.reserving import got, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

VISIBLE = "CUDA_VISIBLE_DEVICES"
REASON = "none was free"
WRITING = "os.truncate"  # the audit event of each change of a record


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, even if pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@contextmanager
def sigint(handler: Any) -> Iterator[None]:
    """Replace the handler of SIGINT until the end of the block."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        there = signal.signal(signal.SIGINT, before)
    assert there is handler


@contextmanager
def interrupted_at(event: str) -> Iterator[None]:
    """Raise SIGINT in this thread at the first audit event of that name."""
    came: list[str] = []

    def interrupt(name: str, _: object) -> None:
        if name == event and not came:
            came.append(name)
            signal.raise_signal(signal.SIGINT)

    with watched(interrupt):
        yield
    assert came


# -- interrupts and errors -------------------------------------------------------------------------


def test_ctrl_c_in_a_request_for_the_same_releases_nothing(here: Here) -> None:
    reservation = reserve_gpu.reserve("0")
    with pytest.raises(KeyboardInterrupt), interrupted_at(WRITING):
        reserve_gpu.reserve("0", note="till noon")
    assert (reserve_gpu.current(), held(here)) == (reservation, [0])
    assert variables()[VISIBLE] == "0"


def test_ctrl_c_in_a_request_for_less_releases_everything(here: Here) -> None:
    """The call has already released a device, so no GPU is visible."""
    got("0,1")
    with pytest.raises(KeyboardInterrupt), interrupted_at(WRITING):
        reserve_gpu.reserve("0")
    assert (reserve_gpu.current(), held(here), variables()[VISIBLE]) == (None, [], "")


def test_repeated_ctrl_c_leaves_nothing_held(here: Here) -> None:
    """Ctrl-C can also interrupt the cleanup after the first one."""
    executor = session()
    main, raised = threading.get_ident(), []

    def handler(*_: object) -> None:
        raised.append(True)
        raise KeyboardInterrupt

    def is_cleaned_up(number: int) -> bool:
        return len(executor._calls) > number + 1

    def press(event: str, _: object) -> None:
        if event != WRITING or raised:
            return
        for number in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            # The main thread then waits for another call, which cleans up.
            wait_for(partial(is_cleaned_up, number))

    with sigint(handler), watched(press), pytest.raises(KeyboardInterrupt):
        reserve_gpu.reserve("0")
    assert raised == [True] * 3
    assert (reserve_gpu.current(), variables(), held(here)) == (None, {}, [])
    assert got("0") == "0"


def test_an_error_after_the_variables_were_set_restores_them(here: Here) -> None:
    """Devices that were held before stay held."""

    def fail(event: str, _: object) -> None:
        if event == WRITING and not failed:
            failed.append(True)
            raise MemoryError

    failed: list[bool] = []
    with watched(fail), pytest.raises(MemoryError):
        reserve_gpu.reserve("0")
    assert (reserve_gpu.current(), variables(), held(here)) == (None, {}, [])
    assert got("0") == "0"
    failed.clear()
    with watched(fail), pytest.raises(MemoryError):
        reserve_gpu.reserve("0,1")
    assert (held(here), variables()[VISIBLE]) == ([0], "0")


# -- nested blocks ---------------------------------------------------------------------------------

STAYS = "GPU1 stays reserved as well"


def test_a_smaller_block_releases_nothing_of_the_enclosing_block(here: Here) -> None:
    """A request that is not a block releases nothing either."""
    with reserve_gpu.reserve("0,1") as outer:
        with pytest.warns(reserve_gpu.ReserveGPUWarning, match=STAYS), reserve_gpu.reserve("0"):
            assert (held(here), variables()[VISIBLE]) == ([0, 1], "0,1")
        assert (reserve_gpu.current(), held(here)) == (outer, [0, 1])
        with pytest.warns(reserve_gpu.ReserveGPUWarning, match=STAYS):
            assert reserve_gpu.reserve("0") is outer
        assert variables()[VISIBLE] == "0,1"
    assert (variables(), held(here)) == ({}, [])


def test_a_smaller_block_keeps_an_earlier_reservation(here: Here) -> None:
    """The other device is released, and the end of the block does not end the reservation."""
    reserve_gpu.reserve("0,1")
    with reserve_gpu.reserve("0") as inner:
        assert held(here) == [0]
    assert (reserve_gpu.current(), held(here), variables()[VISIBLE]) == (inner, [0], "0")


# -- warnings that are errors ----------------------------------------------------------------------


def test_a_warning_that_is_an_error_releases_nothing(here: Here) -> None:
    """The cause of the warning is repaired."""
    reservation = reserve_gpu.reserve("0")
    os.environ[VISIBLE] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(reserve_gpu.ReserveGPUWarning):
            reserve_gpu.reserve("0")
        assert reserve_gpu.reserve("0") is reserve_gpu.current() is reservation
    assert (held(here), variables()[VISIBLE]) == ([0], "0")


# -- exec ------------------------------------------------------------------------------------------


@contextmanager
def next_program() -> Iterator[None]:
    """Forget this process's session, as a new program after exec does."""
    before = _sessions.pop(os.getpid(), None)
    try:
        yield
        reserve_gpu.release()
    finally:
        _sessions.pop(os.getpid(), None)
        if before:
            _sessions[os.getpid()] = before


def left(**changes: Any) -> str:
    """Return $RESERVE_GPU_HELD of a program that got no device, with these changes."""
    fields: dict[str, Any] = {"before": {}, "written": {}, "devices": [], "locks": [], "record": {}}
    return f"{os.getpid()} {json.dumps({**fields, 'reason': REASON, **changes})}"


def test_the_next_program_continues_the_reservation(here: Here) -> None:
    """It has the note, and its release restores the variables from before the first program."""
    os.environ[VISIBLE] = "0,1"
    first = reserve_gpu.reserve("1", note="till noon")
    api.before_exec()
    with next_program():
        now = reserve_gpu.current()
        assert now
        assert (now.devices, now.environ, now.note) == (first.devices, first.environ, "till noon")
        assert reserve_gpu.reserve("1") is now
        assert held(here) == [1]
        assert reserve_gpu.release() == first.devices
        assert (variables(), held(here)) == ({VISIBLE: "0,1"}, [])


def test_a_reservation_is_continued_only_at_the_start_of_a_program(here: Here) -> None:
    """Later values of $RESERVE_GPU_HELD are ignored."""
    with next_program():
        assert reserve_gpu.current() is None
        os.environ[HELD] = left()
        assert (reserve_gpu.current(), session().reason) == (None, None)
        assert got("0") == "0"
        reserve_gpu.release()
    assert held(here) == []


def test_a_reservation_with_a_lost_lock_is_not_continued(here: Here) -> None:
    """Its other locks are released."""
    got("0,1")
    api.before_exec()
    descriptor = int(os.environ[HELD].split()[2])
    handover: dict[str, Any] = json.loads(os.pread(descriptor, 10_000, 0))
    os.close(handover["locks"][1][0])
    assert held(here) == [0]
    with next_program():
        assert (reserve_gpu.current(), held(here)) == (None, [])
        with here.rival("0"), here.rival("1"):
            pass


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {VISIBLE: "0"}),
    ({"PATH": "/nowhere"}, {"PATH": os.environ["PATH"]}),
]


@pytest.mark.parametrize(("before", "written"), CHANGES, ids=repr)
def test_forged_changes_of_variables_are_ignored(
    here: Here, before: dict[str, Any], written: dict[str, Any]
) -> None:
    """Whatever $RESERVE_GPU_HELD contains, devices can be reserved and released."""
    os.environ[HELD] = left(before=before, written=written)
    os.environ[VISIBLE] = "0"
    path = os.environ["PATH"]
    with next_program():
        assert reserve_gpu.current() is None
        assert session().reason == REASON
        assert got("0") == "0"
        assert held(here) == [0]
        reserve_gpu.release()
        assert held(here) == []
        assert os.environ["PATH"] == path
