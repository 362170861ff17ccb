"""The status again and again: in a notebook, in a terminal, and where nobody watches."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.errors import DriverError
from reserve_gpu.model import Request, Waiting
from reserve_gpu.report import progress
from tests.commandline import CommandLine
from tests.machine import LIMIT_S
from tests.waiters import read

if TYPE_CHECKING:
    from reserve_gpu.report.pictures import Picture
    from tests.here import Here
    from tests.machine import Machine

US = (sys.executable, "-m", "reserve_gpu")
WATCH = "%reserve_gpu --status --watch"


class Tty(io.StringIO):
    """A terminal, as far as Python asks."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


@pytest.mark.process
def test_in_a_notebook(machine: Machine) -> None:
    """A notebook has one display, which follows what happens; interrupting it is no error."""
    pytest.importorskip("ipykernel.kernelspec")
    shown: list[Any] = []
    with machine.child() as child, machine.kernel() as kernel:
        cell = kernel.start(WATCH)
        while len(shown) < 2:
            part = kernel.client.get_iopub_msg(timeout=LIMIT_S)
            if part["msg_type"] in ("display_data", "update_display_data"):
                if not shown:
                    child.reserve("0, note='the thesis'")
                shown.append(part)
        kernel.manager.interrupt_kernel()
        done = kernel.finish(cell)
        assert (done.error, done.stdout, done.stderr) == (None, "", "")
        assert kernel.run("print('went on')").stdout == "went on\n"
    assert [part["msg_type"] for part in shown] == ["display_data", "update_display_data"]
    assert len({part["content"]["transient"]["display_id"] for part in shown}) == 1
    first, last = (part["content"]["data"] for part in shown)
    assert ["the thesis" in data["text/plain"] for data in (first, last)] == [False, True]
    assert "<table" in last["text/html"]
    assert "the thesis" in (done.values or [last])[-1]["text/plain"]  # it stays


@pytest.mark.process
def test_where_nobody_watches(machine: Machine) -> None:
    """A cell that is run unattended shows the status once and ends; so does IPython in a pipe."""
    pytest.importorskip("ipykernel.kernelspec")
    with machine.kernel() as kernel:
        done = kernel.finish(kernel.client.execute(WATCH, allow_stdin=False))
    assert done.error is None
    assert [data["text/plain"].count("GPUs are free") for data in done.values] == [1]
    piped = machine.ipython(WATCH, "print('went on')")
    assert piped.stdout.count("GPUs are free") == 1
    assert piped.stdout.endswith("went on\n")


@pytest.mark.process
def test_in_a_terminal(machine: Machine) -> None:
    """A terminal has one picture, drawn in place; after Ctrl-C it stays, and the next is below."""
    ipython = ("-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu", "-c")
    words = (sys.executable, *ipython, f"{WATCH}\nprint('went on')")
    terminal, end = pty.openpty()
    environ = machine.environ(TERM="vt100", COLUMNS="100", LINES="40")
    text, is_interrupted = "", False
    with machine.child() as child, machine.running(
        *words, environ=environ, stdout=end, stderr=end
    ) as process:  # fmt: skip
        os.close(end)
        while part := read(terminal):
            text += part
            if "the thesis" in text and not is_interrupted:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
            elif "GPUs are free" in text:
                child.reserve("0, note='the thesis'")
        assert process.wait(LIMIT_S) == 0
    os.close(terminal)
    _, first, *_, last, after = text.split(progress.CLEAR)
    assert "the thesis" not in first
    assert f"\x1b[{first.count(chr(10))}A" in first  # back to its first line
    assert "the thesis" in last
    assert last.endswith("\r\n\r")
    assert after.split() == ["went", "on"]
    assert "Traceback" not in text
    assert "Interrupt" not in text


def test_a_driver_that_fails(here: Here) -> None:
    """While the driver fails its line is shown, and the status again when it is back."""
    shown: list[str] = []

    def show(picture: Picture) -> None:
        shown.append(str(picture))
        here.write("gpu" if len(shown) % 2 == 0 else "gpu\nfail nvmlInitWithFlags * 18")
        if len(shown) == 3:
            raise KeyboardInterrupt

    progress.watch(reserve_gpu.status, show, 0)
    with pytest.raises(DriverError) as failed:
        reserve_gpu.status()
    assert [str(failed.value) in text for text in shown] == [False, True, False]
    assert "GPU0 is not free" not in shown[2]


def drawn(here: Here, monkeypatch: pytest.MonkeyPatch, columns: int, lines: int) -> str:
    """Return what is written where eight GPUs are watched in a terminal of that size."""
    here.use("eight")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    monkeypatch.setenv("TERM", "xterm")
    stream = Tty()
    with progress.Live(stream, stays=True) as live:
        live.show_picture(reserve_gpu.status().picture())
    return stream.getvalue()


def test_temperature_in_a_terminal_of_120_columns(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is watched in 120 columns has temperature and power, as the same status printed once."""
    assert "temp" in drawn(here, monkeypatch, 120, 40)


def test_a_terminal_that_is_too_low(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a status with more lines than the terminal there is what has room: nothing scrolls."""
    text = drawn(here, monkeypatch, 80, 5)
    assert text.count("\n") == 4
    assert re.search("^0 ", text, re.MULTILINE)


def test_a_terminal_that_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown is broken to the new width at once, also where nothing else has changed."""
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    stream = Tty()
    with progress.Live(stream) as live:
        for waited_s, columns in ((3600.0, 80), (3601.0, 80), (3602.0, 30)):
            monkeypatch.setenv("COLUMNS", str(columns))
            live.show(Waiting(Request(), 1, waited_s, ()))
    wide, narrow, end = stream.getvalue().split(progress.CLEAR)[1:]
    assert wide.count("\n") == 1
    assert narrow.count("\n") > 1
    assert "Waiting" not in end


@pytest.mark.parametrize(
    ("line", "told"),
    [("--watch", "goes with --status"), ("--status 0", "--status shows every GPU"),
     ("--status --watch --json", "without --json")],
)  # fmt: skip
def test_what_goes_with_status(here: Here, line: str, told: str) -> None:
    """--watch is for the picture of the status, which is of every GPU; else one line says so."""
    done = here.shell().run(f"%reserve_gpu {line}")
    assert told in done.stdout + done.stderr + "".join(done.traceback)


def test_watch_is_for_text(typed: CommandLine) -> None:
    """The command line's --watch is for the picture, too."""
    done = typed("status", "--watch", "--format", "html")
    assert (done.code, done.stdout) == (2, "")
    assert "--watch" in done.stderr
