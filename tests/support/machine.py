"""A machine of the stand-in driver, and real processes, shells and kernels on it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tests import driver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
TWO_GPUS = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
LIMIT_S = 60
CHILD = f"{os.path.basename(sys.executable)} child.py"  # what others call a Child
# Of the person who runs the tests, and no affair of theirs.
FOREIGN = (
    *("CUDA_", "RESERVE_GPU_", "JUPYTER", "JPY_", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "XDG_"),
    *("XLA_", "CUPY_", "PYTORCH_", "TF_"),
    *("SLURM_", "FLUX_", "KUBERNETES_"),
)
# For a child to run: it has the mutex until it ends.
TAKE_THE_MUTEX = (
    "from reserve_gpu.locks.directory import LockDirectory\n"
    "directory = LockDirectory().__enter__(); mutex = directory.mutex(); mutex.__enter__()"
)


class Machine:
    """A machine with a scenario, a log of driver calls and a lock directory of its own.

    Nothing of the person who runs the tests reaches what runs on it: home, configuration and the
    CUDA variables are the machine's.
    """

    limit_s = LIMIT_S  # for a command

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scenario = folder / "scenario.txt"
        self.log = folder / "calls.log"
        self.locks = folder / "locks"
        self.rules = folder / "rules.toml"  # the administrator's file
        self.rules.touch(mode=0o644)
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)  # the fixtures `machine` and `here` of a test are one
        self.use("two")

    def use(self, name: str) -> None:
        """Become the machine of a scenario in tests/driver/scenarios."""
        self.write((driver.SCENARIOS / f"{name}.txt").read_text())

    def write(self, text: str) -> None:
        """Become the machine that the text describes; what runs on it notices at its next call."""
        draft = self.folder / "draft.txt"
        draft.write_text(text)
        draft.replace(self.scenario)

    def add(self, text: str) -> None:
        """Add lines to the scenario: to its last device, or faults."""
        self.write(f"{self.scenario.read_text()}\n{text}\n")

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the environment of a process on this machine."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        base = kept | {
            "HOME": str(self.home),
            "IPYTHONDIR": str(self.home / ".ipython"),
            "PYTHONPATH": str(ROOT),
            "RESERVE_GPU_LOCK_DIR": str(self.locks),
            "RESERVE_GPU_CONFIG": str(self.rules),
            "RESERVE_GPU_HISTORY": str(self.folder / "history"),
            "NO_COLOR": "1",
            "TERM": "dumb",  # no window title from IPython 7
        }
        return self.on_driver(base) | extra

    def on_driver(self, base: dict[str, str]) -> dict[str, str]:
        """Return the environment with the machine's driver in it."""
        return driver.environment(self.scenario, log=self.log, base=base)

    def calls(self) -> list[str]:
        """Return the driver calls so far, as `nvmlDeviceGetHandleByIndex_v2 0`."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" ")[2] for line in lines]

    def command(self, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return self._run(argv, subprocess.DEVNULL, extra)

    def typed(self, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as somebody types it who sits at a terminal."""
        master, slave = pty.openpty()
        with os.fdopen(master), os.fdopen(slave):
            return self._run(argv, slave, extra)

    def _run(
        self, argv: Sequence[str], stdin: int, extra: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, env=self.environ(**extra), cwd=self.folder, text=True, capture_output=True,
            timeout=self.limit_s, check=False, stdin=stdin,
        )  # fmt: skip

    @contextmanager
    def running(
        self, *argv: str, environ: Mapping[str, str], stdout: int, stderr: int | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Make a command at work; killed at the end."""
        process = subprocess.Popen(
            argv, env=dict(environ), cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=stdout, stderr=stderr,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait(LIMIT_S)

    def python(self, code: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run Python code to its end."""
        return self.command(sys.executable, "-c", code, **extra)

    def ipython(self, *lines: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run lines in a fresh IPython with the extension loaded."""
        return self.command(
            sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu",
            "-c", "\n".join(lines), **extra,
        )  # fmt: skip

    @contextmanager
    def child(self, **extra: str) -> Iterator[Child]:
        """Make a Python process that runs what it is told; killed at the end."""
        child = Child(self.environ(**extra), self.folder)
        try:
            yield child
        finally:
            child.kill()

    @contextmanager
    def kernel(self, **extra: str) -> Iterator[Kernel]:
        """Make a real ipykernel with the extension loaded; shut down at the end."""
        kernel = Kernel(self.environ(**extra), self.folder)
        try:
            kernel.load()
            yield kernel
        finally:
            kernel.close()


@dataclass
class Answer:
    """What running code came to: a JSON value, or the name and text of an exception."""

    value: Any = None
    error: str | None = None
    text: str = ""


class Child:
    """A Python process on a machine, told what to do line by line."""

    def __init__(self, environ: Mapping[str, str], folder: Path, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "tests" / "support" / "child.py")],
            env=dict(environ), cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = int(self._read()["value"])  # of the Python process, also behind a prefix

    def run(self, code: str) -> Answer:
        """Run code; the value is that of its last line, if that is an expression."""
        self.send(code)
        return self.answer()

    def send(self, code: str) -> None:
        """Start running code; `answer` waits for its end."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        return Answer(**self._read())

    def reserve(self, arguments: str = "") -> Answer:
        """Reserve; the value is the CUDA_VISIBLE_DEVICES that came of it."""
        return self.run(f"reserve_gpu.reserve({arguments}).environ['CUDA_VISIBLE_DEVICES']")

    def visible(self) -> Any:
        return self.run("os.environ.get('CUDA_VISIBLE_DEVICES')").value

    def kill(self) -> None:
        """Kill it with -9 and wait until it is gone."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(LIMIT_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Cell:
    """What running a cell showed."""

    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    traceback: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """Return what was displayed, as text."""
        return "\n".join(value["text/plain"] for value in self.values)

    @property
    def all(self) -> str:
        """Return whatever there is to read."""
        return "\n".join([self.shown, self.stdout, self.stderr, *self.traceback])


class Kernel:
    """A real kernel on a machine."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        self.manager = kernel_manager(folder, kernel_name="python3")
        self._begin(environ, folder)

    def _begin(self, environ: Mapping[str, str], folder: Path) -> None:
        """Start the kernel of the manager, and connect; shut it down if that fails."""
        self.manager.start_kernel(env=dict(environ), cwd=str(folder))
        try:
            self.client = self._connect()
        except BaseException:
            self.manager.shutdown_kernel(now=True)
            raise

    def load(self) -> None:
        cell = self.run("%load_ext reserve_gpu")
        assert not cell.error, cell.traceback

    @property
    def pid(self) -> int:
        return int(self.run("import os; print(os.getpid())").stdout)

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        return self.finish(self.start(code))

    def start(self, code: str) -> str:
        """Start a cell; `finish` waits for its end."""
        # Else a kernel that has just shown an error may throw away the next cell in silence.
        message: str = self.client.execute(code, stop_on_error=False)
        return message

    def finish(self, message: str) -> Cell:
        cell = Cell()
        while True:
            part = self.client.get_iopub_msg(timeout=LIMIT_S)
            if part["parent_header"].get("msg_id") != message:
                continue
            content = part["content"]
            match part["msg_type"]:
                case "stream":
                    setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
                case "execute_result" | "display_data" | "update_display_data":
                    cell.values.append(content["data"])
                case "clear_output":  # front ends wait with that for what comes next
                    cell.stdout, cell.stderr, cell.values = "", "", []
                case "error":
                    cell.error, cell.traceback = content["ename"], content["traceback"]
                case "status" if content["execution_state"] == "idle":
                    return cell

    def reply(self, message: str) -> dict[str, Any]:
        """Return what who runs a cell is told of its end, which stops Run All or does not."""
        while True:
            reply: dict[str, Any] = self.client.get_shell_msg(timeout=LIMIT_S)
            if reply["parent_header"].get("msg_id") == message:
                content: dict[str, Any] = reply["content"]
                return content

    def restart(self, **changed: Any) -> None:
        """Restart it. changed: what it is launched with, in place of what it was."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False, **changed)
        self.client = self._connect()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def _connect(self) -> BlockingKernelClient:
        client: BlockingKernelClient = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        return client


def kernel_manager(folder: Path, **settings: Any) -> KernelManager:
    """Return what starts a kernel, with its connection file in that folder.

    They talk by files beside it: two kernels that start together may be given the same port.
    """
    from jupyter_client.manager import KernelManager

    path = str(folder / f"k{uuid4().hex[:8]}")  # short: a socket's path has 107 characters at most
    return KernelManager(connection_file=f"{path}.json", transport="ipc", ip=path, **settings)


def program(name: str) -> str | None:
    """Return the path of a program, None if it is not installed; servers are on no user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")
