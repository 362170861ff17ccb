"""What `jupyter execute`, `nbconvert --to html` and IPython in a terminal show."""

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

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")
pexpect = pytest.importorskip("pexpect")  # IPython brings it

NAME = "NVIDIA A100-SXM4-80GB"
ONE = f"gpu\n  name {NAME}\n  memory 81920\n"
TWO = f"{ONE}{ONE}  compute 4321000 35000\n"
RESERVING = f"Reserving GPU0: 0000:01:00.0 16x {NAME} (VBIOS 86.07.22.00.A8)"
NOTE = "<b>until noon</b>"


@contextmanager
def holder(machine: Machine) -> Iterator[Child]:
    """Let somebody else reserve GPU 0 in a notebook of their own."""
    machine.write(TWO)
    with machine.child(JPY_SESSION_NAME="/home/alice/train.ipynb") as child:
        assert child.reserve(f"0, note={NOTE!r}").value == "0"
        yield child


# -- jupyter execute, nbconvert --------------------------------------------------------------------


@contextmanager
def executing(path: Path, machine: Machine, *cells: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `jupyter execute`, which goes on after errors; kill it at the end."""
    path.write_text(json.dumps(notebook("%load_ext reserve_gpu", *cells)))
    execute = (sys.executable, "-m", "jupyter", "execute", "--inplace", "--allow-errors")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with machine.running(*execute, str(path), environ=machine.environ(), **streams) as process:
        yield process


def texts(path: Path) -> list[str]:
    """Return what each cell but the first, which loads the magic, shows as text."""
    return ["".join(map(_text, cell["outputs"])) for cell in json.loads(path.read_text())["cells"]][
        1:
    ]


def _text(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        return "\n".join(output["traceback"])
    return "".join(output.get("text") or output["data"]["text/plain"])


class Page(HTMLParser):
    """The lines of text in the outputs of a page that nbconvert wrote, and the tags there."""

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
    """Return the text without blanks, which HTML has others of, and without bars."""
    return re.sub("[\\s\u2588\u2591]", "", text)


def look_on(machine: Machine) -> None:
    """Return once who waits has looked at the busy GPU 1 for some seconds."""
    reading = "nvmlDeviceGetComputeRunningProcesses_v3 1"
    seen = machine.calls().count(reading)
    wait_for(lambda: machine.calls().count(reading) >= seen + 15)


def check_free(shown: str) -> None:
    """Check that GPU 0 is reserved, and that nothing else is said but how long that took."""
    assert re.sub(r"^Waited for \d+ s\.\n", "", shown).splitlines() == [
        RESERVING,
        "CUDA_DEVICE_MEMORY = '81920'",
        "CUDA_DEVICE_ORDER = 'PCI_BUS_ID'",
        "CUDA_VISIBLE_DEVICES = '0'",
    ]


def check_refused(shown: str, first: str, child: Child) -> None:
    """Return what is said where no GPU is to be had."""
    headline = f"{first}No free GPU: 1 reserved, 1 busy."
    assert any(line.startswith(headline) for line in shown.splitlines())
    assert "No GPU is visible to this notebook." in shown.splitlines()
    assert re.match(rf"reserved: .*\b\w+, train.ipynb \(pid {child.pid}\) for", of_gpu(shown))
    assert of_gpu(shown).endswith(f'"{NOTE}"')
    assert "no reservation: pid 4321000" in of_gpu(shown, "1")
    assert "Traceback" not in shown


@pytest.mark.needs("browser")
def test_a_notebook_that_is_executed_and_made_a_page(machine: Machine) -> None:
    """Reservation, status, errors and waits are in the saved notebook, and in its HTML page."""
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
        look_on(machine)
        child.run("reserve_gpu.release()")
        assert process.wait(LIMIT_S) == 0
        refused, limit, mistake, waited, status = shown = texts(path)
        check_refused(refused, "", child)
        said, rest = limit.split("idle\n", 1)
        assert said.startswith(
            "Waiting for a GPU: next in the queue, 0 s so far (1.5 s at most).  "
            "2 x A100-SXM4-80GB\n"
        )
        check_refused(rest, "Timed out after 1.5 s. ", child)
    assert mistake == "UsageError: 'soon' is not a valid duration. Examples: 90s, 10m, 2h, 1h30m.\n"
    said, rest = waited.split("idle\n", 1)
    head = r"Waiting for a GPU: next in the queue, \d s so far\.  2 x A100-SXM4-80GB\n"
    assert re.match(head, said)
    check_free(rest)
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
def test_the_log_of_a_run_without_a_gpu(machine: Machine) -> None:
    """The log of an unattended notebook says why it got no GPU, and who has the GPUs."""
    path = machine.folder / "run.ipynb"
    path.write_text(json.dumps(notebook("%load_ext reserve_gpu", "%reserve_gpu")))
    with holder(machine) as child:
        convert = (sys.executable, "-m", "jupyter", "nbconvert", "--to=notebook", "--execute")
        done = machine.command(*convert, str(path))
    assert done.returncode != 0
    check_refused(done.stderr[done.stderr.rindex("No free GPU") :].rstrip(), "", child)


def test_interrupting_jupyter_execute(machine: Machine) -> None:
    """Ctrl-C ends `jupyter execute` while a cell waits, and nobody waits any more."""
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
        """Run a line to its end; what it wrote, to the letter."""
        self.process.sendline(line)
        return self.finish()

    def run_plain(self, line: str) -> str:
        """Run a line to its end; what it wrote, without the colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.run(line))

    def finish(self) -> str:
        """Wait for the prompt; what was written before it."""
        self.process.expect(self.PROMPT)
        text: str = self.process.before
        return text

    def screen(self, text: str) -> str:
        """Return what stands there once the text has been written."""
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


def test_a_terminal(machine: Machine, terminal: Terminal) -> None:
    """Reservation, status, mistakes and what is not to be had are plain rows in a terminal."""
    machine.write(TWO)
    check_free(terminal.screen(terminal.run("%reserve_gpu")))
    status = terminal.run_plain("%reserve_gpu --status")
    assert re.search(r"\b0 .*\breserved\b", status)
    assert re.search(r"\b1 .*\bbusy\b", status)
    terminal.run("%reserve_gpu --release")
    mistake = terminal.screen(terminal.run("%reserve_gpu --wait soon"))
    assert mistake == "UsageError: 'soon' is not a valid duration. Examples: 90s, 10m, 2h, 1h30m."
    with holder(machine) as child:
        check_refused(terminal.screen(terminal.run("%reserve_gpu")), "", child)
        limit = terminal.run("%reserve_gpu --wait 0.5s")
        check_refused(terminal.screen(limit), "Timed out after 0.5 s. ", child)


def test_status_fits_a_terminal(machine: Machine, terminal: Terminal) -> None:
    """No row of the status is longer than the terminal is wide."""
    machine.write(TWO)
    terminal.run("%reserve_gpu --note 'something that fills the row'")
    rows = terminal.run_plain("%reserve_gpu --status").split("\r\n")
    assert all(len(row) <= 100 for row in rows)


def test_waiting_in_a_terminal(machine: Machine, terminal: Terminal) -> None:
    """The picture is rewritten while a terminal waits, and is gone once the GPU is there."""
    with holder(machine) as child:
        terminal.process.sendline("%reserve_gpu --wait")
        for seconds in (0, 1, 2):
            terminal.process.expect(
                rf"\r(\x1b\[\d+A)?\x1b\[JWaiting for a GPU: next in the queue, {seconds} s so far\."
            )
        child.run("reserve_gpu.release()")
        check_free(terminal.screen(terminal.finish()))


def test_waiting_where_letters_are_unknown(machine: Machine) -> None:
    """A note with letters that the output has not does not end the wait."""
    machine.write(ONE)
    with machine.child() as child:
        assert child.reserve("note='\u6771\u4eac'").value == "0"
        done = machine.ipython("%reserve_gpu --wait 3s", PYTHONIOENCODING="ascii")
    assert re.search(
        r"Waiting for a GPU: next in the queue, \d s so far \(3 s at most\)\.\n(.*\n)*.*: .\?\?.\n",
        done.stdout,
    )


def test_interrupting_a_terminal(machine: Machine, terminal: Terminal) -> None:
    """Ctrl-C in a terminal leaves one line of the wait, and nothing is reserved."""
    with holder(machine):
        terminal.process.sendline("%reserve_gpu --wait")
        terminal.process.expect("Waiting for a GPU: ")
        terminal.process.sendintr()
        left = terminal.screen(terminal.finish())
        assert left.endswith(
            "Your place in the queue is kept for 2 min; the same request returns to it."
        )
        assert "Waiting" not in left
        assert not queue(machine)
