"""`reserve-gpu top` in a real pseudo-terminal."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machine import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

pexpect = pytest.importorskip("pexpect")  # IPython depends on it

LEAVE_SCREEN = "\x1b[?1049l"  # xterm's sequence that restores the terminal's own screen


def start_top(machine: Machine, term: str = "xterm") -> Any:
    """Start `reserve-gpu top` in a terminal."""
    return pexpect.spawn(
        sys.executable, ["-m", "reserve_gpu", "top"], env=machine.environ(TERM=term),
        cwd=str(machine.folder), dimensions=(24, 120), encoding="utf-8", timeout=LIMIT_S,
    )  # fmt: skip


def wait_for_end(child: Any) -> tuple[str, int | None]:
    """Return the output until the program ends, and its exit code."""
    child.expect(pexpect.EOF)
    child.close()
    return child.before, child.exitstatus


@pytest.fixture
def top(machine: Machine) -> Iterator[Any]:
    """Start `reserve-gpu top` on a machine with two free GPUs."""
    machine.write("gpu\n name NVIDIA A100\ngpu\n")
    child = start_top(machine)
    child.expect("GPUs are free")
    yield child
    child.close(force=True)


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
def test_changes_are_shown_until_a_key_ends_it(machine: Machine, top: Any, key: str) -> None:
    with machine.child() as child:
        assert child.reserve("0, note='thesis'").value == "0"
        top.expect("thesis")
    top.expect("2 of 2|2")  # only the changed digit is written
    top.send(key)
    text, code = wait_for_end(top)
    assert LEAVE_SCREEN in text
    assert code == 0
    assert "Traceback" not in text


@pytest.mark.full
def test_a_driver_that_fails_for_a_while_is_shown(machine: Machine, top: Any) -> None:
    before = machine.scenario.read_text()
    # The first failure ends the session with the driver. The second keeps the next from starting.
    reading, beginning = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlInitWithFlags"
    machine.write(f"{before}fail {reading} * 15\nfail {beginning} * 9\n")
    top.expect("kernel module")
    machine.write(before)
    top.expect("GPUs are free")
    top.send("q")
    assert wait_for_end(top)[1] == 0


def test_sigterm_restores_the_terminal(top: Any) -> None:
    top.kill(signal.SIGTERM)
    text, code = wait_for_end(top)
    assert LEAVE_SCREEN in text
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("scenario", "term", "key", "code"),
    [
        ("gpu", "no-such-terminal", "TERM=no-such-terminal", 2),
        ("gpu\nfail nvmlInitWithFlags * 9", "xterm", "kernel module", 69),
    ],
)
def test_an_unknown_terminal_or_a_missing_driver_is_one_line(
    machine: Machine, scenario: str, term: str, key: str, code: int
) -> None:
    machine.write(scenario)
    text, found = wait_for_end(start_top(machine, term))
    (line,) = text.split("\r\n")[:-1]
    assert key in line
    assert found == code
