"""Ctrl-C, and handlers of signals, in the midst of a call."""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from tests.interrupting import ACTIONS, IN_VAIN, INTERRUPT, RAISE
from tests.locked import watched
from tests.machine import Machine
from tests.processes import wait_for
from tests.reserving import got, refused, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.here import Here
    from tests.machine import Child

    Children = tuple[Child, Child]

FEW, MANY, ALL = 8, 40, 1 << 20  # places at which an action is interrupted
SHORT = ("release", "say it again", "reserve less")
LONG_S = 30
SHORT_S = 0.5  # but long enough for a look
REFUSED_IN_A_LINE = r"This process is already reserving, releasing or querying GPUs.*\.$"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


# -- an interrupt in the midst of a call -----------------------------------------------------------


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Make a process to be interrupted, and another one that can have the GPUs meanwhile."""
    machine = Machine(tmp_path_factory.mktemp("interrupted"))
    with machine.child() as child, machine.child() as other:
        child.run("from tests import interrupting")
        yield child, other


@pytest.mark.process
@pytest.mark.parametrize(
    ("action", "does", "number"),
    [
        param
        for action, does in zip((*ACTIONS, *IN_VAIN), cycle([INTERRUPT, RAISE]))
        for param in (
            (action, does, FEW),
            pytest.param(action, does, ALL if action in SHORT else MANY, marks=pytest.mark.full),
        )
    ],
)
def test_interrupted_anywhere(children: Children, action: str, does: str, number: int) -> None:
    """Wherever a handler raises, locks, variables and current() agree, and the next call works."""
    try_all(children, action, does, number)


@pytest.mark.promise
@pytest.mark.process
def test_an_interrupted_reserve_holds_nothing(children: Children) -> None:
    """A reservation that a signal handler ends holds no GPU afterwards, wherever it was."""
    answer = children[0].run(
        "import signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "for _ in range(2):  # the first reservation also creates files and imports modules\n"
        " count = interrupting.Interrupted(reserve_gpu.reserve, signal.SIGUSR1).count\n"
        " reserve_gpu.release()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: interrupting.handle('TimeoutError'))\n"
        "left = []\n"
        "for at in range(1, count):  # at the last place reserve() has already returned\n"
        " there = interrupting.Interrupted(reserve_gpu.reserve, signal.SIGUSR1, at)\n"
        " left += [there.where] if reserve_gpu.current() else []\n"
        " reserve_gpu.release()\n"
        "count, left"
    )
    assert not answer.error, answer.text
    count, left = answer.value
    assert count > 50
    assert left == []


@pytest.mark.process
@pytest.mark.parametrize("size", ["None", "'1GiB'"], ids=["whole", "part"])
def test_what_cuda_uses_is_kept(machine: Machine, size: str) -> None:
    """Whoever interrupts a change from a part to the whole, or back, while CUDA runs keeps one."""
    other = "'1GiB'" if size == "None" else "None"
    with machine.child() as child:
        child.run("from tests import interrupting; import ctypes, signal")
        child.run(f"reserve_gpu.reserve('0', memory={other})")
        assert child.run("ctypes.CDLL('libcuda.so.1').cuInit(0)").value == 0
        answer = child.run(
            "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
            f"change = lambda: reserve_gpu.reserve('0', memory={size})\n"
            "count = interrupting.Interrupted(change, signal.SIGUSR1).count\n"
            "signal.signal(signal.SIGUSR1, lambda *_: interrupting.handle('TimeoutError'))\n"
            "left, interrupted = [], 0\n"
            f"for at in range(1, count + 1, max(1, count // {MANY})):\n"
            f" reserve_gpu.reserve('0', memory={other})\n"
            " there = interrupting.Interrupted(change, signal.SIGUSR1, at)\n"
            " interrupted += there.error is not None\n"
            " left += [there.where] if reserve_gpu.current() is None else []\n"
            " left += interrupting.disagreements()\n"
            "interrupted, left"
        )
    assert not answer.error, answer.text
    interrupted, left = answer.value
    assert interrupted
    assert left == []


@pytest.mark.process
@pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("does", "action"),
    [
        ("release", "reserve another"),
        ("release", "reserve less"),
        ("release", "release"),
        ("release", "with"),
        ("release", "wait in vain"),
        ("reserve", "reserve"),
        ("reserve", "release"),
        ("reserve", "with inside of with"),
        ("reserve", "status"),
    ],
)
def test_a_handler_anywhere(children: Children, does: str, action: str, number: int) -> None:
    """Wherever a handler reserves or releases, all agrees as well, and no call waits for itself."""
    try_all(children, action, does, number)


def try_all(children: Children, action: str, does: str, number: int) -> None:
    child, other = children
    if action in IN_VAIN:
        assert not other.reserve("count=2").error
    answer = child.run(f"interrupting.try_all({action!r}, {does!r}, {number})")
    other.run("reserve_gpu.release()")
    assert not answer.error, answer.text
    count, faults = answer.value
    assert count >= min(number, FEW)
    assert faults == []


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


ALARM = """
import signal
said = []
def handler(*_):
    try:
        said.append(repr({}))
    except reserve_gpu.ReserveGPUError as error:
        said.append(type(error).__name__)
signal.signal(signal.SIGALRM, handler)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("does", "said", "visible"),
    [("release", "()", None), ("reserve", "RequestError", "0")],
)
def test_alarm_while_the_driver_is_slow(
    machine: Machine, does: str, said: str, visible: str | None
) -> None:
    """A handler of SIGALRM runs while a call waits for the driver; the call has its own way."""
    machine.add("delay-first nvmlDeviceGetUUID 0 4")
    with machine.child() as child, machine.child() as other:
        assert child.run(ALARM.format(f"reserve_gpu.{does}()")).error is None
        child.send("reserve_gpu.reserve(0)")
        wait_for(lambda: "nvmlDeviceGetUUID 0" in machine.calls())
        os.kill(child.pid, signal.SIGALRM)
        machine.use("two")  # from the next call on
        assert child.answer().error is None
        assert child.run("said").value == [said]
        assert child.visible() == visible
        assert (other.reserve("'0'").error is None) == (visible is None)
