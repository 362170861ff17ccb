"""Ctrl-C, and handlers of signals, in the midst of a call."""

from __future__ import annotations

import os
import signal
from itertools import cycle
from typing import TYPE_CHECKING

import pytest

from tests.support.interrupting import ACTIONS, IN_VAIN, INTERRUPT, RAISE
from tests.support.machine import Machine
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Child

    Children = tuple[Child, Child]

FEW, MANY, ALL = 8, 40, 1 << 20  # places at which an action is interrupted
SHORT = ("release", "say it again", "reserve less")


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
        child.run("from tests.support import interrupting")
        yield child, other


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


@pytest.mark.parametrize("size", ["None", "'1GiB'"], ids=["whole", "part"])
def test_what_cuda_uses_is_kept(machine: Machine, size: str) -> None:
    """Whoever interrupts a change from a part to the whole, or back, while CUDA runs keeps one."""
    other = "'1GiB'" if size == "None" else "None"
    with machine.child() as child:
        child.run("from tests.support import interrupting; import ctypes, signal")
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
