"""The magic in `jupyter execute`, nbconvert and IPython in a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lab import notebook
from tests.support.machine import LIMIT_S
from tests.support.processes import queue, wait_for
from tests.support.reserving import of_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Child, Machine

# Some versions set an environment variable at the first import by jupyter_client.
pytest.importorskip("ipykernel.kernelspec")
pexpect = pytest.importorskip("pexpect")  # IPython brings it

NAME = "NVIDIA A100-SXM4-80GB"
ONE = f"gpu\n  name {NAME}\n  memory 81920\n"
TWO = f"{ONE}{ONE}  compute 4321000 35000\n"
RESERVING = f"Reserving GPU0: 0000:01:00.0 16x {NAME} (VBIOS 86.07.22.00.A8)"
NOTE = "<b>until noon</b>"


@contextmanager
def holder(machine: Machine) -> Iterator[Child]:
    """Reserve GPU 0 for another notebook."""
    machine.write(TWO)
    with machine.child(JPY_SESSION_NAME="/home/alice/train.ipynb") as child:
        assert child.reserve(f"0, note={NOTE!r}").value == "0"
        yield child


# -- jupyter execute, nbconvert --------------------------------------------------------------------


@contextmanager
def executing(path: Path, machine: Machine, *cells: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `jupyter execute`, which continues after errors; kill it at the end."""
    path.write_text(json.dumps(notebook("%load_ext reserve_gpu", *cells)))
    execute = (sys.executable, "-m", "jupyter", "execute", "--inplace", "--allow-errors")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with machine.running(*execute, str(path), environ=machine.environ(), **streams) as process:
        yield process


def outputs(path: Path) -> list[str]:
    """Return the output of each cell, except the first, which loads the extension."""
    return ["".join(map(_text, cell["outputs"])) for cell in json.loads(path.read_text())["cells"]][
        1:
    ]


def _text(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        return "\n".join(output["traceback"])
    return "".join(output.get("text") or output["data"]["text/plain"])


class Page(HTMLParser):
    """The text and the tags in the outputs of a page from nbconvert."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: set[str] = set()
        self._depth = 0  # of <div> inside an output
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div" and (self._depth or "jp-OutputArea-output" in (dict(attrs)["class"] or "")):
            self._depth += 1
        if self._depth:
            self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._depth:
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.text += data


def squeezed(text: str) -> str:
    """Return the text without spaces, which differ in HTML, and without bars."""
    return re.sub("[\\s\u2588\u2591]", "", text)


def wait_for_reads(machine: Machine) -> None:
    """Wait until the waiter has read the processes of GPU 1 15 times."""
    reading = "nvmlDeviceGetComputeRunningProcesses_v3 1"
    seen = machine.calls().count(reading)
    wait_for(lambda: machine.calls().count(reading) >= seen + 15)


def assert_reserved(shown: str) -> None:
    """Assert that the output shows the reservation of GPU 0 and nothing else."""
    assert re.sub(r"^Waited for \d+ s\.\n", "", shown).splitlines() == [
        RESERVING,
        "CUDA_DEVICE_MEMORY = '81920'",
        "CUDA_DEVICE_ORDER = 'PCI_BUS_ID'",
        "CUDA_VISIBLE_DEVICES = '0'",
    ]


def assert_refused(shown: str, first: str, child: Child) -> None:
    """Assert that the output is the refusal of a GPU."""
    headline = f"{first}No free GPU"
    assert any(line.startswith(headline) for line in shown.splitlines())
    assert re.match(rf"reserved: .*\b\w+, train.ipynb \(pid {child.pid}\) for", of_gpu(shown))
    assert of_gpu(shown).endswith(f'"{NOTE}"')
    assert "no reservation: pid 4321000" in of_gpu(shown, "1")
    assert "Traceback" not in shown


@pytest.mark.needs("browser")
def test_executed_notebook_and_page(machine: Machine) -> None:
    """The saved notebook and its HTML page contain reservations, refusals, waits and a status."""
    path, begun = machine.folder / "run.ipynb", machine.folder / "begun"
    cells = (
        "%reserve_gpu",
        "%reserve_gpu --wait 1.5s",
        "%reserve_gpu --wait soon",
        f"open({str(begun)!r}, 'w').close()\n%reserve_gpu --wait",
        "%reserve_gpu --status",
    )
    with holder(machine) as child, executing(path, machine, *cells) as process:
        wait_for(begun.exists)
        wait_for(lambda: queue(machine))
        wait_for_reads(machine)
        child.run("reserve_gpu.release()")
        assert process.wait(LIMIT_S) == 0
        refused, limit, mistake, waited, status = shown = outputs(path)
        assert_refused(refused, "", child)
        wait, rest = limit.split("idle\n", 1)
        assert wait.startswith("Waiting for a GPU: next in the queue, 0 s so far (1.5 s at most).")
        assert_refused(rest, "Timed out after 1.5 s. ", child)
    assert mistake.startswith("UsageError: 'soon'")
    wait, rest = waited.split("idle\n", 1)
    assert re.match(r"Waiting for a GPU: next in the queue, \d s so far\.  2 x ", wait)
    assert_reserved(rest)
    assert re.search(r"^0 .*\breserved\b", status, re.MULTILINE)
    assert re.search(r"^1 .*\bbusy\b", status, re.MULTILINE)
    assert "this kernel" in status
    assert "4321000" in status

    done = machine.command(sys.executable, "-m", "jupyter", "nbconvert", "--to=html", str(path))
    assert done.returncode == 0, done.stderr
    page = Page(path.with_suffix(".html").read_text())
    for text in shown[:-1]:
        assert squeezed(text) in squeezed(page.text)
    assert {"table", "pre"} <= page.tags
    assert page.text.count(f'"{NOTE}"') == 4  # as text, not as HTML


@pytest.mark.needs("browser")  # which brings nbconvert
def test_log_of_a_refusal(machine: Machine) -> None:
    """The log of an unattended notebook contains the refusal and the holders."""
    path = machine.folder / "run.ipynb"
    path.write_text(json.dumps(notebook("%load_ext reserve_gpu", "%reserve_gpu")))
    with holder(machine) as child:
        convert = (sys.executable, "-m", "jupyter", "nbconvert", "--to=notebook", "--execute")
        done = machine.command(*convert, str(path))
    assert done.returncode != 0
    assert_refused(done.stderr[done.stderr.rindex("No free GPU") :].rstrip(), "", child)


def test_interrupted_jupyter_execute(machine: Machine) -> None:
    """Ctrl-C ends `jupyter execute` and the wait of its cell."""
    path = machine.folder / "run.ipynb"
    with holder(machine), executing(path, machine, "%reserve_gpu --wait") as process:
        wait_for(lambda: queue(machine))
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        wait_for(lambda: not queue(machine))


# -- a terminal ------------------------------------------------------------------------------------


class Terminal:
    """IPython in a terminal of 100 columns, with the extension loaded."""

    PROMPT = r"In \[\d+\]: $"

    def __init__(self, machine: Machine) -> None:
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--no-banner", "--colors=NoColor", "--simple-prompt",
             "--ext=reserve_gpu"],
            env=machine.environ(TERM="vt100"), cwd=str(machine.folder), dimensions=(24, 100),
            echo=False, encoding="utf-8", timeout=LIMIT_S,
        )  # fmt: skip
        self.process.expect(self.PROMPT)

    def run(self, line: str) -> str:
        """Run a line to its end, and return the raw output."""
        self.process.sendline(line)
        return self.finish()

    def finish(self) -> str:
        """Wait for the prompt, and return the output before it."""
        self.process.expect(self.PROMPT)
        text: str = self.process.before
        return text

    def screen(self, text: str) -> str:
        """Return the text that the terminal displays after the output."""
        text = re.sub("\x1b\\[[0-9;]*m", "", text).rpartition("\x1b[J")[2]
        rows = text.split("\r\n")
        assert not any(sign in row for row in rows for sign in "\r\x1b")
        assert all(len(row) < 100 for row in rows)
        return "\n".join(rows).strip("\n")


@pytest.fixture
def terminal(machine: Machine) -> Iterator[Terminal]:
    terminal = Terminal(machine)
    yield terminal
    terminal.process.close(force=True)


def test_terminal(machine: Machine, terminal: Terminal) -> None:
    """Reservation, status, mistakes and refusals are plain text in a terminal."""
    machine.write(TWO)
    assert_reserved(terminal.screen(terminal.run("%reserve_gpu")))
    status = re.sub(r"\x1b\[[0-9;]*m", "", terminal.run("%reserve_gpu --status"))
    assert all(len(row) <= 100 for row in status.split("\r\n"))
    assert re.search(r"\b0 .*\breserved\b", status)
    assert re.search(r"\b1 .*\bbusy\b", status)
    terminal.run("%reserve_gpu --release")
    mistake = terminal.screen(terminal.run("%reserve_gpu --wait soon"))
    assert mistake.startswith("UsageError: 'soon'")
    with holder(machine) as child:
        assert_refused(terminal.screen(terminal.run("%reserve_gpu")), "", child)
        limit = terminal.run("%reserve_gpu --wait 0.5s")
        assert_refused(terminal.screen(limit), "Timed out after 0.5 s. ", child)


def test_wait_in_a_terminal(machine: Machine, terminal: Terminal) -> None:
    """The display of a wait is rewritten, and is erased when the GPU is free."""
    with holder(machine) as child:
        terminal.process.sendline("%reserve_gpu --wait")
        for seconds in (0, 1, 2):
            terminal.process.expect(
                rf"\r(\x1b\[\d+A)?\x1b\[JWaiting for a GPU: next in the queue, {seconds} s so far\."
            )
        child.run("reserve_gpu.release()")
        assert_reserved(terminal.screen(terminal.finish()))


def test_wait_with_ascii_output(machine: Machine) -> None:
    """A note that the output's encoding cannot represent does not end the wait."""
    machine.write(ONE)
    with machine.child() as child:
        assert child.reserve("note='\u6771\u4eac'").value == "0"
        done = machine.ipython("%reserve_gpu --wait 3s", PYTHONIOENCODING="ascii")
    assert re.search(
        r"Waiting for a GPU: next in the queue, \d s so far \(3 s at most\)\.\n(.*\n)*.*: .\?\?.\n",
        done.stdout,
    )


def test_interrupted_wait_in_a_terminal(machine: Machine, terminal: Terminal) -> None:
    """Ctrl-C in a terminal ends the wait and erases its display."""
    with holder(machine):
        terminal.process.sendline("%reserve_gpu --wait")
        terminal.process.expect("Waiting for a GPU: ")
        terminal.process.sendintr()
        left = terminal.screen(terminal.finish())
        assert left.startswith("Stopped waiting")
        assert "Waiting" not in left
        assert not queue(machine)
