"""What a process holds stays true to what its calls said, whatever comes in between."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

import reserve_gpu
from reserve_gpu import api
from reserve_gpu.reservation.session import _sessions, session
from reserve_gpu.system.settings import HELD
from tests.support.locked import held, watched
from tests.support.processes import wait_for
from tests.support.reserving import got, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.here import Here

VISIBLE = "CUDA_VISIBLE_DEVICES"
LONG_S = 30
REASON = "none was free"
PRESS_S = 0.01  # between two presses of Ctrl-C
WRITING = "os.truncate"  # the audit event of each change of what a lock file says


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@contextmanager
def sigint(handler: Any) -> Iterator[None]:
    """Have something else done at SIGINT."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        there = signal.signal(signal.SIGINT, before)
    assert there is handler


def in_a_thread(function: Callable[[], object]) -> None:
    """Call it in another thread, to its end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Fail where KeyboardInterrupt, which would end pytest, is raised."""
    try:
        yield
    except KeyboardInterrupt:
        pytest.fail("KeyboardInterrupt was raised once more")


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


@contextmanager
def interrupted_in(name: str, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> Iterator[None]:
    """Let Ctrl-C end the block while that function of NVML does not return.

    after: The number of calls that return before.
    """
    calls = iter(range(after))
    call, raised, over, done = getattr(pynvml, name), *(threading.Event() for _ in range(3))

    def handler(*_: object) -> None:
        raised.set()
        raise KeyboardInterrupt

    def called(*arguments: Any) -> Any:
        if next(calls, None) is not None:
            return call(*arguments)
        while not raised.wait(PRESS_S):  # as a person does who sees that nothing happens
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        over.wait(LONG_S)
        answer = call(*arguments)
        done.set()
        return answer

    with monkeypatch.context() as patch, sigint(handler):
        patch.setattr(pynvml, name, called)
        with pytest.raises(KeyboardInterrupt):
            yield
    over.set()
    assert done.wait(LONG_S)  # the thread of the call then shuts NVML down, as `Here` checks


# -- Ctrl-C leaves nothing that nobody knows of ----------------------------------------------------


def test_interrupted_while_reasons_are_looked_up(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a refusal is explained leaves no GPU visible, as the refusal itself does."""
    with here.rival("0"), here.rival("1"):
        with interrupted_in("nvmlDeviceGetComputeMode", monkeypatch):
            reserve_gpu.reserve()
        assert variables() == {VISIBLE: ""}
    reserve_gpu.release()
    assert variables() == {}


@pytest.mark.parametrize(
    ("before", "after"), [(None, {}), ("1", {VISIBLE: ""})], ids=["nothing", "another"]
)
def test_interrupted_after_success(
    here: Here, monkeypatch: pytest.MonkeyPatch, before: str | None, after: dict[str, str]
) -> None:
    """What was reserved by a call that ends by Ctrl-C is released; what it held then is gone."""
    if before:
        got(before)
    # What is held is looked at before, in a conversation of its own.
    with interrupted_in("nvmlShutdown", monkeypatch, after=1 if before else 0):
        reserve_gpu.reserve("0")
    assert (variables().get(VISIBLE), held(here)) == (after.get(VISIBLE), [])
    assert reserve_gpu.current() is None
    reserve_gpu.release()
    assert variables() == {}
    assert got("0") == "0"


def test_interrupted_with(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `with` that Ctrl-C keeps from beginning leaves nothing held."""
    begun = False
    with interrupted_in("nvmlShutdown", monkeypatch), reserve_gpu.reserve("0"):
        begun = True
    assert not begun
    assert (variables(), held(here)) == ({}, [])


def test_interrupted_while_asking_for_the_same(here: Here) -> None:
    """A call that ends by Ctrl-C releases nothing that was held before it."""
    reservation = reserve_gpu.reserve("0")
    with pytest.raises(KeyboardInterrupt), interrupted_at(WRITING):
        reserve_gpu.reserve("0", note="till noon")
    assert (reserve_gpu.current(), held(here)) == (reservation, [0])
    assert variables()[VISIBLE] == "0"


def test_interrupted_while_asking_for_less(here: Here) -> None:
    """Ctrl-C in a call that has released a part leaves nothing held, and no GPU visible."""
    got("0,1")
    with pytest.raises(KeyboardInterrupt), interrupted_at(WRITING):
        reserve_gpu.reserve("0")
    assert (reserve_gpu.current(), held(here), variables()[VISIBLE]) == (None, [], "")


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_interrupted_more_than_once(here: Here, presses: int) -> None:
    """Ctrl-C in a reservation, and again while that is cleaned up, ends it and leaves nothing."""
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
        for number in range(presses):
            signal.pthread_kill(main, signal.SIGINT)
            # The main thread then waits for one more call, which cleans up.
            wait_for(partial(is_cleaned_up, number))

    with sigint(handler), watched(press), pytest.raises(KeyboardInterrupt):
        reserve_gpu.reserve("0")
    assert raised == [True] * presses
    assert (reserve_gpu.current(), variables(), held(here)) == (None, {}, [])
    assert got("0") == "0"


def test_an_error_while_it_is_written_leaves_nothing(here: Here) -> None:
    """An error once the variables are set leaves them, and what was held, as before."""

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


# -- blocks ----------------------------------------------------------------------------------------


STAYS = "The enclosing `with` block asked for more, so GPU1 stays reserved as well"


def test_smaller_with_inside_with(here: Here) -> None:
    """A `with` for less inside of a `with` takes nothing from it, neither then nor at its end."""
    with reserve_gpu.reserve("0,1") as outer:
        with pytest.warns(reserve_gpu.ReserveGPUWarning, match=STAYS), reserve_gpu.reserve("0"):
            assert (held(here), variables()[VISIBLE]) == ([0, 1], "0,1")
        assert (reserve_gpu.current(), held(here)) == (outer, [0, 1])
        assert variables()[VISIBLE] == "0,1"
    assert (variables(), held(here)) == ({}, [])


def test_smaller_wish_of_another_thread(here: Here) -> None:
    """Nor does a wish of another thread; what that one was answered with stays after the block."""
    warns = pytest.warns(reserve_gpu.ReserveGPUWarning, match=STAYS)
    with reserve_gpu.reserve("0,1") as outer, warns:
        in_a_thread(lambda: reserve_gpu.reserve("0"))
    assert (reserve_gpu.current(), held(here)) == (outer, [0, 1])


def test_smaller_with_after_a_reservation(here: Here) -> None:
    """A `with` for less than was reserved before does not end that reservation."""
    reserve_gpu.reserve("0,1")
    with reserve_gpu.reserve("0") as inner:
        assert held(here) == [0]
    assert (reserve_gpu.current(), held(here), variables()[VISIBLE]) == (inner, [0], "0")


# -- where warnings are errors ---------------------------------------------------------------------


def change_variable(_: Here) -> None:
    os.environ[VISIBLE] = "1"


def close_lock(here: Here) -> None:
    (name,) = (
        name
        for name in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{name}") == f"{here.locks}/{here.uuid('0')}.lock"
    )
    os.close(int(name))


def delete_lock(here: Here) -> None:
    (here.locks / f"{here.uuid('0')}.lock").unlink()


@pytest.mark.parametrize("change", [change_variable, close_lock, delete_lock])
def test_a_warning_that_is_an_error(here: Here, change: Callable[[Here], None]) -> None:
    """Where warnings are errors what was held before stays held, and is mended anyway."""
    reservation = reserve_gpu.reserve("0")
    change(here)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(reserve_gpu.ReserveGPUWarning):
            reserve_gpu.reserve("0")
        assert reserve_gpu.reserve("0") is reserve_gpu.current() is reservation
    assert (held(here), variables()[VISIBLE]) == ([0], "0")


def test_a_warning_that_is_an_error_in_a_block(here: Here) -> None:
    """Where warnings are errors a wish for less inside of a `with` takes nothing from it either."""
    with reserve_gpu.reserve("0,1") as outer:
        with pytest.raises(reserve_gpu.ReserveGPUWarning, match=STAYS):
            reserve_gpu.reserve("0")
        assert (reserve_gpu.current(), held(here)) == (outer, [0, 1])
    assert held(here) == []


# -- what the program before has left --------------------------------------------------------------


@contextmanager
def next_program() -> Iterator[None]:
    """Know nothing of what is reserved but what was left over exec, as a program that begins."""
    before = _sessions.pop(os.getpid(), None)
    try:
        yield
        reserve_gpu.release()
    finally:
        _sessions.pop(os.getpid(), None)
        if before:
            _sessions[os.getpid()] = before


def left(**changes: Any) -> str:
    """Return what a program that has got no device leaves to the next one."""
    fields: dict[str, Any] = {"before": {}, "written": {}, "devices": [], "locks": [], "record": {}}
    return f"{os.getpid()} {json.dumps({**fields, 'reason': REASON, **changes})}"


def test_adopt(here: Here) -> None:
    """The next program of the process has the reservation, its note, and what was before it."""
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


def test_adopt_once(here: Here) -> None:
    """What was left is adopted once: what stands in the variable later counts for nothing."""
    with next_program():
        assert reserve_gpu.current() is None
        os.environ[HELD] = left()
        assert (reserve_gpu.current(), session().reason) == (None, None)
        assert got("0") == "0"
        reserve_gpu.release()
    assert held(here) == []


def test_adopt_all_or_nothing(here: Here) -> None:
    """Where one of several locks is lost none is adopted, and none stays locked for nobody."""
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
    ({}, {VISIBLE: "0"}),
    ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {VISIBLE: "0"}),
    ({"PATH": "/nowhere"}, {"PATH": os.environ["PATH"]}),
    ({VISIBLE: None}, {}),
    ({}, {}),
]


@pytest.mark.parametrize(("before", "written"), CHANGES, ids=repr)
def test_forged_changes(here: Here, before: dict[str, Any], written: dict[str, Any]) -> None:
    """Whatever $RESERVE_GPU_HELD says was changed, one can reserve and release as ever."""
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
