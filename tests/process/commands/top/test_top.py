"""reserve-gpu top: the status live in a terminal."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

from tests.support.top import start

pexpect = pytest.importorskip("pexpect")  # IPython brings it

LEFT = "\x1b[?1049l"  # back from the screen that programs have for themselves (xterm's terminfo)


def end(child: Any) -> tuple[str, int | None]:
    """Return what is written until the program ends by itself, and its exit code."""
    child.expect(pexpect.EOF)
    child.close()
    return child.before, child.exitstatus


@pytest.fixture
def screen(machine: Machine) -> Iterator[Any]:
    machine.write("gpu\n name NVIDIA A100\ngpu\n")
    child = start(machine)
    yield child
    child.close(force=True)


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
def test_it_is_live_until_a_key(machine: Machine, screen: Any, key: str) -> None:
    """What changes is shown within moments; q and Ctrl-C give the terminal back, without a word."""
    screen.expect("Both GPUs are free")
    with machine.child() as child:
        assert child.reserve("0, note='thesis'").value == "0"
        screen.expect("thesis")
    screen.expect("2 of 2|2")  # only the digit is written anew
    screen.send(key)
    text, code = end(screen)
    assert LEFT in text
    assert code == 0
    assert "Traceback" not in text


def test_a_sign_of_life(screen: Any) -> None:
    """The clock below the picture goes on, though nothing changes on the machine."""
    screen.expect(r"\d\d:\d\d:\d\d   q quit")
    screen.expect(r"\x1b\[[78]G\d")  # only the digits of the clock are written anew


def test_it_shows_parts(machine: Machine) -> None:
    """What somebody was promised and uses stands there, and below it what is left to promise."""
    machine.write("gpu\n memory 8192")
    with machine.child() as holder:
        assert holder.reserve("0, memory='2GiB'").value == "0"
        child = start(machine)
        child.expect(" 0.0 of 2.0 GiB")
        child.expect("6.0 GiB still available")
        child.send("q")
        assert end(child)[1] == 0


def test_a_terminal_of_another_size(screen: Any) -> None:
    """A window that is made small, and large again, is drawn anew, and keys go on."""
    screen.expect("Both GPUs are free")
    for size in ((4, 20), (1, 1), (30, 100)):
        screen.setwinsize(*size)
        time.sleep(0.1)  # a person is not quicker
    screen.expect("q quit")
    screen.send("q")
    assert end(screen)[1] == 0


@pytest.mark.full
def test_a_driver_that_fails_meanwhile(machine: Machine, screen: Any) -> None:
    """A driver that fails is said in one line, and shown again when it comes back."""
    screen.expect("Both GPUs are free")
    before = machine.scenario.read_text()
    # The first that fails ends the conversation with the driver; the next does not begin.
    reading, beginning = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlInitWithFlags"
    machine.write(f"{before}fail {reading} * 15\nfail {beginning} * 9\n")
    screen.expect("kernel module")
    machine.write(before)
    screen.expect("Both GPUs are free")
    screen.send("q")
    assert end(screen)[1] == 0


def test_ended_by_a_signal(screen: Any) -> None:
    """SIGTERM gives the terminal back as well."""
    screen.expect("Both GPUs are free")
    screen.kill(signal.SIGTERM)
    text, code = end(screen)
    assert LEFT in text
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize(("scenario", "term", "part"), [
    ("gpu", "no-such-terminal", "TERM=no-such-terminal"),
    ("gpu\nfail nvmlInitWithFlags * 9", "xterm", "kernel module"),
])  # fmt: skip
def test_what_can_not_be_shown(machine: Machine, scenario: str, term: str, part: str) -> None:
    """A terminal that nobody knows, and a driver that is not there, are one line."""
    machine.write(scenario)
    child = start(machine, term)
    text, code = end(child)
    (line,) = text.split("\r\n")[:-1]
    assert part in line
    assert code in {2, 69}
