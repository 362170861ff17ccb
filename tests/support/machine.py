"""A simulated machine with the stand-in driver, and real processes and kernels on it."""

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
CHILD = f"{os.path.basename(sys.executable)} child.py"  # the name of a Child in messages
# Prefixes of variables of the user that runs the tests; they must not affect a test.
FOREIGN = (
    *("CUDA_", "RESERVE_GPU_", "JUPYTER", "JPY_", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "XDG_"),
    *("XLA_", "CUPY_", "PYTORCH_", "TF_"),
    *("SLURM_", "FLUX_", "KUBERNETES_"),
)
# Code for a child that acquires the mutex until the child ends.
TAKE_THE_MUTEX = (
    "from reserve_gpu.locks.directory import LockDirectory\n"
    "directory = LockDirectory().__enter__(); mutex = directory.mutex(); mutex.__enter__()"
)


class Machine:
    """A simulated machine with its own scenario, log of driver calls and lock directory.

    Processes on it use the machine's home, configuration and CUDA variables, not those of the user
    that runs the tests.
    """

    limit_s = LIMIT_S  # the timeout of a command

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scenario = folder / "scenario.txt"
        self.log = folder / "calls.log"
        self.locks = folder / "locks"
        self.rules = folder / "rules.toml"  # the administrator's rules
        self.rules.touch(mode=0o644)
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)  # the fixtures `machine` and `here` share it
        self.use("two")

    def use(self, name: str) -> None:
        """Use a scenario from tests/driver/scenarios."""
        self.write((driver.SCENARIOS / f"{name}.txt").read_text())

    def write(self, text: str) -> None:
        """Use a scenario; running processes notice it at their next driver call."""
        draft = self.folder / "draft.txt"
        draft.write_text(text)
        draft.replace(self.scenario)

    def add(self, text: str) -> None:
        """Add lines to the scenario, such as fields of its last device or faults."""
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
        """Return an environment in which the machine's driver is used."""
        return driver.environment(self.scenario, log=self.log, base=base)

    def calls(self) -> list[str]:
        """Return the driver calls so far, such as `nvmlDeviceGetHandleByIndex_v2 0`."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" ")[2] for line in lines]

    def command(self, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return its result."""
        return self._run(argv, subprocess.DEVNULL, extra)

    def typed(self, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command with a terminal as its standard input, and return its result."""
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
        """Start a command, and kill it at the end."""
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
        """Run Python code in a new process and return its result."""
        return self.command(sys.executable, "-c", code, **extra)

    def ipython(self, *lines: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run lines in a new IPython with the extension loaded, and return the result."""
        return self.command(
            sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "--ext=reserve_gpu",
            "-c", "\n".join(lines), **extra,
        )  # fmt: skip

    @contextmanager
    def child(self, **extra: str) -> Iterator[Child]:
        """Start a Python process that runs code on request, and kill it at the end."""
        child = Child(self.environ(**extra), self.folder)
        try:
            yield child
        finally:
            child.kill()

    @contextmanager
    def kernel(self, **extra: str) -> Iterator[Kernel]:
        """Start an ipykernel with the extension loaded, and shut it down at the end."""
        kernel = Kernel(self.environ(**extra), self.folder)
        try:
            kernel.load()
            yield kernel
        finally:
            kernel.close()


@dataclass
class Answer:
    """The result of code in a Child: a JSON value, or the name and text of an exception."""

    value: Any = None
    error: str | None = None
    text: str = ""


class Child:
    """A Python process on a machine that runs code on request."""

    def __init__(self, environ: Mapping[str, str], folder: Path, *prefix: str) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "tests" / "support" / "child.py")],
            env=dict(environ), cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.pid = int(self._read()["value"])  # of the Python process, even if there is a prefix

    def run(self, code: str) -> Answer:
        """Run code, and return the value of its last line if that is an expression."""
        self.send(code)
        return self.answer()

    def send(self, code: str) -> None:
        """Start to run code; `answer` waits for the result."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Answer:
        """Wait for the result of the code that was sent."""
        return Answer(**self._read())

    def reserve(self, arguments: str = "") -> Answer:
        """Reserve with these arguments; the value is the resulting CUDA_VISIBLE_DEVICES."""
        return self.run(f"reserve_gpu.reserve({arguments}).environ['CUDA_VISIBLE_DEVICES']")

    def visible(self) -> Any:
        """Return CUDA_VISIBLE_DEVICES, or None if it is not set."""
        return self.run("os.environ.get('CUDA_VISIBLE_DEVICES')").value

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
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
    """The output of a cell."""

    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    traceback: list[str] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """Return the displayed values as text."""
        return "\n".join(value["text/plain"] for value in self.values)

    @property
    def all(self) -> str:
        """Return all output of the cell as text."""
        return "\n".join([self.shown, self.stdout, self.stderr, *self.traceback])


class Kernel:
    """An ipykernel on a machine."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        self.manager = kernel_manager(folder, kernel_name="python3")
        self._begin(environ, folder)

    def _begin(self, environ: Mapping[str, str], folder: Path) -> None:
        """Start the kernel and connect to it; shut it down if that fails."""
        self.manager.start_kernel(env=dict(environ), cwd=str(folder))
        try:
            self.client = self._connect()
        except BaseException:
            self.manager.shutdown_kernel(now=True)
            raise

    def load(self) -> None:
        """Load the extension."""
        cell = self.run("%load_ext reserve_gpu")
        assert not cell.error, cell.traceback

    @property
    def pid(self) -> int:
        return int(self.run("import os; print(os.getpid())").stdout)

    def run(self, code: str) -> Cell:
        """Run a cell and return its output."""
        return self.finish(self.start(code))

    def start(self, code: str) -> str:
        """Start a cell, and return the ID of its message; `finish` waits for its end."""
        # By default, a kernel discards the next cell after an error.
        message: str = self.client.execute(code, stop_on_error=False)
        return message

    def finish(self, message: str) -> Cell:
        """Wait for the end of a cell, and return its output."""
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
                case "clear_output":  # front ends clear when the next output arrives
                    cell.stdout, cell.stderr, cell.values = "", "", []
                case "error":
                    cell.error, cell.traceback = content["ename"], content["traceback"]
                case "status" if content["execution_state"] == "idle":
                    return cell

    def reply(self, message: str) -> dict[str, Any]:
        """Return the reply to a cell; its status decides whether Run All continues."""
        while True:
            reply: dict[str, Any] = self.client.get_shell_msg(timeout=LIMIT_S)
            if reply["parent_header"].get("msg_id") == message:
                content: dict[str, Any] = reply["content"]
                return content

    def restart(self, **changed: Any) -> None:
        """Restart the kernel with these changed launch arguments."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=False, **changed)
        self.client = self._connect()

    def close(self) -> None:
        """Shut the kernel down."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def _connect(self) -> BlockingKernelClient:
        client: BlockingKernelClient = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=LIMIT_S)
        return client


def kernel_manager(folder: Path, **settings: Any) -> KernelManager:
    """Return the manager of a kernel whose connection file and sockets are in this folder.

    TCP ports are not used, because two kernels that start at once might choose the same port.
    """
    from jupyter_client.manager import KernelManager

    path = str(
        folder / f"k{uuid4().hex[:8]}"
    )  # short, because a socket's path has at most 107 characters
    return KernelManager(connection_file=f"{path}.json", transport="ipc", ip=path, **settings)


def program(name: str) -> str | None:
    """Return the path of a program, even if its folder is not on PATH, or None if it is missing."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")
