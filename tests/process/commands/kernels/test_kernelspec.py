"""Kernels that reserve their GPU before their first cell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from tests.support.here import Here
from tests.support.kernelspec import install_kernelspec, kernelspec_folder, read_kernelspec
from tests.support.locked import held
from tests.support.machine import LIMIT_S, Kernel, kernel_manager
from tests.support.processes import US, living, wait_for
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.commandline import CommandLine
    from tests.support.machine import Cell, Machine

VISIBLE = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"
# The sleeps are short because Python handles a signal just before a sleep only after the sleep.
SLEEP = "import time; print('on', flush=True)\nwhile True: time.sleep(0.05)"
# Starts a process that inherits all of the kernel's descriptors.
START_JOB = "import subprocess; print(subprocess.Popen(['sleep', '1000'], close_fds=False{}).pid)"


class SpecKernel(Kernel):
    """A kernel that jupyter_client starts from the installed kernelspec."""

    def __init__(self, machine: Machine) -> None:
        from jupyter_client.kernelspec import KernelSpecManager

        folders = [str(kernelspec_folder(machine).parent)]
        self.manager = kernel_manager(
            machine.folder,
            kernel_name="python3-gpu",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=folders),
        )
        self._begin(machine.environ(), machine.folder)


class RawKernel(Kernel):
    """A kernel that is started without jupyter_client, as VS Code starts it.

    https://github.com/microsoft/vscode-jupyter, src/kernels/raw/launcher/kernelProcess.node.ts

    Args:
        machine: The machine to start the kernel on.
        spec: The kernelspec.
        is_last: Whether the connection file is the last argument, which is how VS Code starts a
            kernel that it takes for plain Python.
    """

    def __init__(self, machine: Machine, spec: dict[str, Any], *, is_last: bool) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        assert spec.get("interrupt_mode", "signal") == "signal"
        # Files instead of ports, because a free port may be taken before it is used.
        name = "last" if is_last else "inside"
        path, _ = write_connection_file(
            str(machine.folder / f"{name}.json"), transport="ipc", ip=name
        )
        argv = [word.replace("{connection_file}", path) for word in spec["argv"]]
        if is_last:
            at = argv.index(path)
            assert argv[at - 1] == "-f"
            argv[at - 1 : at + 1] = []
            argv.append(f"--f={path}")
        environ = machine.environ(**spec.get("env", {}))
        self.process = subprocess.Popen(argv, env=environ, cwd=machine.folder)
        self.client = BlockingKernelClient(connection_file=path)
        self.client.load_connection_file()
        self.client.start_channels(hb=False)
        try:
            wait_for(self._is_ready)
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        """Return whether the kernel replies and publishes.

        The client's wait_for_ready considers a slow kernel dead.
        """
        assert self.process.poll() is None
        self.client.kernel_info()
        try:
            self.client.get_shell_msg(timeout=1)
            self.client.get_iopub_msg(timeout=1)
        except Empty:
            return False
        return True

    def kill(self, number: signal.Signals) -> None:
        """Kill all descendants of the kernel, then the kernel, and wait for its end."""
        self.client.stop_channels()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.send_signal(number)
        self.process.send_signal(number)
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        """Kill the kernel unless it has ended."""
        if self.process.poll() is None:
            self.kill(signal.SIGKILL)


def error_of_interrupted_cell(kernel: Kernel) -> str | None:
    """Return the error in the reply to a cell that is interrupted.

    IPython 8 shows no error if the signal arrives between two statements.
    """
    message = kernel.start(SLEEP)
    while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "stream":
        pass
    if isinstance(kernel, RawKernel):
        kernel.process.send_signal(signal.SIGINT)
    else:
        kernel.manager.interrupt_kernel()
    error: str | None = kernel.reply(message).get("ename")
    return error


# -- a kernel with a GPU ---------------------------------------------------------------------------


class Started(NamedTuple):
    """A kernel that was started with GPU1, and the output of its first cell."""

    machine: Here
    kernel: SpecKernel
    first: Cell


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Install a kernelspec for GPU1, and start its kernel."""
    machine = Here(tmp_path_factory.mktemp("started"))
    assert machine.command(*US, "kernel", "install", "--prefix", ".", "1").returncode == 0
    with closing(SpecKernel(machine)) as kernel:
        yield Started(machine, kernel, kernel.run(VISIBLE))


@pytest.mark.xdist_group("a kernel with its GPU")
def test_a_kernel_has_its_gpu_in_its_first_cell(started: Started) -> None:
    """The first cell also shows which GPU that is."""
    assert started.first.stdout == "['1']\n"
    assert "GPU1" in started.first.shown
    assert held(started.machine) == [1]
    cell = started.kernel.run("%reserve_gpu")
    assert cell.stdout.startswith("Reserving GPU1: "), cell
    assert not cell.stderr
    assert started.kernel.pid == started.kernel.manager.provisioner.pid  # type: ignore[union-attr]


@pytest.mark.ipython
def test_a_kernel_can_be_interrupted_restarted_and_killed(here: Here, typed: CommandLine) -> None:
    """A restart keeps its GPU; a kill releases it."""
    install_kernelspec(here, typed)
    with closing(SpecKernel(here)) as kernel:
        assert error_of_interrupted_cell(kernel) == "KeyboardInterrupt"
        before = kernel.pid
        with here.child() as child:
            waiter = Waiter(here, child, "'0'")
            kernel.restart()
            waiter.sees(1, "reserved")
        job = int(kernel.run(START_JOB.format("")).stdout)
        with living(job):
            assert kernel.pid != before
            assert kernel.run(VISIBLE).stdout == "['0']\n"
            assert held(here) == [0]
            os.kill(kernel.pid, signal.SIGKILL)
            kernel.manager.provisioner.process.wait()  # type: ignore[union-attr]
            assert held(here) == []


def test_a_kernel_has_the_lease_in_its_kernelspec(machine: Machine) -> None:
    ends = ("--for", "8h", "--idle", "2h", "--if-wanted", "--end-kernel")
    assert machine.command(*US, "kernel", "install", "--prefix", ".", *ends).returncode == 0
    words = read_kernelspec(machine)["argv"]
    code = "import reserve_gpu, time; terms = reserve_gpu.current().lease\n"
    code += "print(round((terms.until - time.time()) / 3600), terms[2:5])"
    done = machine.command(*words[: words.index("--")], "--", sys.executable, "-c", code)
    assert done.stdout == "8 (7200.0, True, True)\n", done.stderr


def test_the_first_cell_shows_why_there_is_no_gpu(here: Here, typed: CommandLine) -> None:
    install_kernelspec(here, typed)
    with here.child() as holder:
        holder.reserve("[0, 1]")
        with closing(SpecKernel(here)) as kernel:
            # A client's own requests before the first cell don't show the reason.
            kernel.client.execute("1", silent=True)
            kernel.client.execute("1", store_history=False)
            first = kernel.run(VISIBLE)
            assert (first.stdout, first.error) == ("['']\n", None)
            assert "No free GPU" in first.shown
            assert f"(pid {holder.pid})" in first.shown
            assert any("<table" in value.get("text/html", "") for value in first.values)
            assert kernel.run("1;").shown == ""
            assert kernel.run("%reserve_gpu").error == "NoFreeDeviceError"
            holder.kill()
            assert kernel.run("%reserve_gpu").stdout.startswith("Reserving GPU0: ")
            assert kernel.run("%reserve_gpu --release").stdout.startswith("Released GPU0.")
            assert kernel.run(VISIBLE).stdout == "[None]\n"


def test_files_next_to_a_notebook_are_not_imported(machine: Machine) -> None:
    for name in ("errors", "argparse", "locks", "json", "shutil"):
        (machine.folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    done = machine.command(*US, "kernel", "start", "--", "echo", "ran")
    assert done.stdout == "ran\n", done.stderr


# -- a kernel that another machine starts ----------------------------------------------------------


@pytest.fixture
def hold(machine: Machine) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts `kernel hold`; the process is killed at the end."""
    assert machine.command(*US, "kernel", "install").returncode == 0
    processes = []

    def start(*options: str) -> subprocess.Popen[str]:
        argv = [*US, "kernel", "hold", "--id", "ssh-1", "--kernel", "python3-gpu", *options]
        process = subprocess.Popen(
            argv, env=machine.environ(), cwd=machine.folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_held_gpu_is_kept_for_its_kernel(machine: Machine, hold: Any) -> None:
    """The kernel gets the notebook's name and the machine that started it."""
    process = hold("--count=2", "--note=far")
    assert json.loads(process.stdout.readline())["gpus"] == "GPU0 and GPU1"
    out, _ = process.communicate("keep\n", LIMIT_S)
    assert json.loads(out) == {"kept": True}
    description = {"id": "ssh-1", "notebook": "/home/a/it's far.ipynb", "machine": "laptop"}
    code = "import os, json, reserve_gpu; rows = reserve_gpu.status().rows\n"
    code += "facts = [[h.notebook, h.record.who.origin, h.note] for r in rows for h in r.holders]\n"
    code += "print(json.dumps(facts))"
    with machine.child() as rival:
        assert "kept" in rival.reserve().text
        start = [*US, "kernel", "start", "--", sys.executable, "-c", code, "-f", "x.json"]
        done = machine.command(*start, RESERVE_GPU_STARTED=json.dumps(description).encode().hex())
    assert json.loads(done.stdout) == [["it's far.ipynb", "laptop", "far"]] * 2


@pytest.mark.parametrize("answer", ["", "no\n", "keeper"])
def test_other_answers_release_a_held_gpu(machine: Machine, hold: Any, answer: str) -> None:
    process = hold()
    assert "gpus" in process.stdout.readline()
    process.communicate(answer, LIMIT_S)
    with machine.child() as rival:
        assert rival.reserve().value == "0"


def test_kernel_hold_leaves_the_queue_if_its_caller_ends(machine: Machine, hold: Any) -> None:
    with machine.child() as rival:
        assert not rival.reserve("count=2").error
        process = hold("--wait=1h")
        wait_for(lambda: bool(rival.run("len(reserve_gpu.status().waiting)").value))
        process.stdin.close()
        process.stdin = None
        assert process.wait(LIMIT_S) != 0


def test_kernel_hold_answers_with_a_refusal(machine: Machine, hold: Any) -> None:
    with machine.child() as rival:
        assert not rival.reserve("count=2").error
        out, _ = hold().communicate("keep\n", LIMIT_S)
    assert [*json.loads(out)] == ["refused"]
