"""Signal handlers that interrupt a call of this package at any place."""

from __future__ import annotations

import os
import signal
from itertools import cycle
from typing import TYPE_CHECKING

import pytest

from tests.support.interrupting import ACTIONS, FAILING, INTERRUPT, TIMEOUT
from tests.support.machine import Machine
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Child

    Children = tuple[Child, Child]

FEW, MANY, ALL = 8, 40, 1 << 20  # places at which an action is interrupted
SHORT = ("release", "reserve the same", "reserve less")


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, even if pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    """Run a process that is interrupted, and another one that can hold the GPUs meanwhile."""
    machine = Machine(tmp_path_factory.mktemp("interrupted"))
    with machine.child() as child, machine.child() as other:
        child.run("from tests.support import interrupting")
        yield child, other


@pytest.mark.parametrize(
    ("action", "handler", "number"),
    [
        param
        for action, handler in zip((*ACTIONS, *FAILING), cycle([INTERRUPT, TIMEOUT]))
        for param in (
            (action, handler, FEW),
            pytest.param(action, handler, ALL if action in SHORT else MANY, marks=pytest.mark.full),
        )
    ],
)
def test_an_exception_at_any_place_leaves_a_consistent_state(
    children: Children, action: str, handler: str, number: int
) -> None:
    """The locks, the variables and current() agree, and the next call works."""
    interrupt_everywhere(children, action, handler, number)


@pytest.mark.promise
def test_an_interrupted_request_holds_nothing(children: Children) -> None:
    """A request that a signal handler ends holds no GPU afterwards, at any place."""
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
def test_a_gpu_that_cuda_uses_is_kept(machine: Machine, size: str) -> None:
    """An interrupted change from a part to the whole GPU, or back, keeps one of them."""
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
    ("handler", "action"),
    [
        ("release", "reserve another"),
        ("release", "reserve less"),
        ("release", "with"),
        ("release", "fail to wait"),
        ("reserve", "reserve"),
        ("reserve", "release"),
        ("reserve", "status"),
    ],
)
def test_a_handler_can_reserve_or_release_at_any_place(
    children: Children, handler: str, action: str, number: int
) -> None:
    """The state stays consistent, and no call waits for itself."""
    interrupt_everywhere(children, action, handler, number)


def interrupt_everywhere(children: Children, action: str, handler: str, number: int) -> None:
    """Interrupt the action by this handler at about as many places, and check the state."""
    child, other = children
    if action in FAILING:
        assert not other.reserve("count=2").error
    answer = child.run(f"interrupting.interrupt_everywhere({action!r}, {handler!r}, {number})")
    other.run("reserve_gpu.release()")
    assert not answer.error, answer.text
    count, faults = answer.value
    assert count >= min(number, FEW)
    assert faults == []


# Code for a child, which calls a function in a handler of SIGALRM and keeps the outcomes.
ALARM = """
import signal
outcomes = []
def handler(*_):
    try:
        outcomes.append(repr({}))
    except reserve_gpu.ReserveGPUError as error:
        outcomes.append(type(error).__name__)
signal.signal(signal.SIGALRM, handler)
"""


@pytest.mark.parametrize(
    ("function", "outcome", "visible"),
    [("release", "()", None), ("reserve", "RequestError", "0")],
)
def test_a_handler_runs_while_a_call_waits_for_the_driver(
    machine: Machine, function: str, outcome: str, visible: str | None
) -> None:
    """A release in the handler applies at the end of the call, and a request is refused."""
    machine.add("delay-first nvmlDeviceGetUUID 0 4")
    with machine.child() as child, machine.child() as other:
        assert child.run(ALARM.format(f"reserve_gpu.{function}()")).error is None
        child.send("reserve_gpu.reserve(0)")
        wait_for(lambda: "nvmlDeviceGetUUID 0" in machine.calls())
        os.kill(child.pid, signal.SIGALRM)
        machine.use("two")  # without the delay, from the next call on
        assert child.answer().error is None
        assert child.run("outcomes").value == [outcome]
        assert child.visible() == visible
        assert (other.reserve("'0'").error is None) == (visible is None)
