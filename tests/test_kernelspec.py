"""Kernels that have their GPU before their first line runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.machine import LIMIT_S, Kernel
from tests.test_cli import US, free
from tests.test_forks import is_running, living

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.machine import Machine

VISIBLE = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"
# Short naps: a signal in the instant before a nap begins is noticed only at its end.
NAPS = "import time; print('on', flush=True)\nwhile True: time.sleep(0.05)"
# A job that has all that the kernel has open, and a session of its own.
JOB = "subprocess.Popen(['sleep', '1000'], close_fds=False, start_new_session=True)"


class SpecKernel(Kernel):
    """A kernel that is started by its kernelspec, as a notebook starts it."""

    def __init__(self, machine: Machine, prefix: Path, name: str = "python3-gpu") -> None:
        from jupyter_client.kernelspec import KernelSpecManager
        from jupyter_client.manager import KernelManager

        specs = KernelSpecManager(kernel_dirs=[str(prefix / "share" / "jupyter" / "kernels")])
        self.manager = KernelManager(kernel_name=name, kernel_spec_manager=specs)
        self.manager.start_kernel(env=machine.environ(), cwd=str(machine.folder))
        self.client = self._connect()


class OtherKernel(Kernel):
    """A kernel that is started by its kernelspec without jupyter_client's manager, as in VS Code.

    It is done as there: read kernel.json, start the process, signal it, end all below it first.
    https://github.com/microsoft/vscode-jupyter, src/kernels/raw/launcher/kernelProcess.node.ts

    is_last: put the connection file behind all the rest, as VS Code does for the kernels that it
        takes for plain Python; else in its place.
    """

    def __init__(self, machine: Machine, spec: dict[str, Any], *, is_last: bool) -> None:
        self.machine, self.spec, self.is_last = machine, spec, is_last
        assert spec.get("interrupt_mode", "signal") == "signal"
        self.spawn()

    def spawn(self) -> None:
        """Start the process, and connect to it."""
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        path, _ = write_connection_file(str(self.machine.folder / "kernel-v2.json"))
        argv = [word.replace("{connection_file}", path) for word in self.spec["argv"]]
        if self.is_last:
            at = argv.index(path)
            assert argv[at - 1] == "-f"
            argv[at - 1 : at + 1] = []
            argv.append(f"--f={path}")
        environ = self.machine.environ(**self.spec.get("env", {}))
        self.process = subprocess.Popen(argv, env=environ, cwd=self.machine.folder)
        self.client = BlockingKernelClient(connection_file=path)
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def kill(self, number: signal.Signals) -> None:
        """Signal all processes below the kernel, then the kernel, and wait for its end."""
        self.client.stop_channels()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.send_signal(number)
        self.process.send_signal(number)
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill(signal.SIGKILL)


@contextmanager
def other_kernel(machine: Machine, *, is_last: bool = False) -> Iterator[OtherKernel]:
    """A kernel of `reserve-gpu kernel install`, started as VS Code does; killed at the end."""
    kernel = OtherKernel(machine, install(machine), is_last=is_last)
    try:
        yield kernel
    finally:
        kernel.close()


@contextmanager
def spec_kernel(machine: Machine, *options: str) -> Iterator[SpecKernel]:
    """A kernel of `reserve-gpu kernel install OPTIONS`; shut down at the end."""
    install(machine, *options)
    kernel = SpecKernel(machine, machine.folder)
    try:
        yield kernel
    finally:
        kernel.close()


def install(machine: Machine, *options: str) -> dict[str, Any]:
    """Install the kernel below the machine's folder; returns what its kernel.json says."""
    done = machine.command(*US, "kernel", "install", "--prefix", ".", *options)
    assert done.returncode == 0, done.stderr
    spec: dict[str, Any] = json.loads((folder(machine) / "kernel.json").read_text())
    return spec


def folder(machine: Machine, name: str = "python3-gpu") -> Path:
    return machine.folder / "share" / "jupyter" / "kernels" / name


def test_the_kernelspec(machine: Machine) -> None:
    """The kernelspec is the stock one with its logos and metadata, started by this Python."""
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict

    spec, stock = install(machine, "-n", "2", "--gpu-name", "1050"), get_kernel_dict()
    at = spec["argv"].index("--")
    assert spec["argv"][:at] == [*US, "kernel", "start", "--count=2", "--name=1050"]
    assert spec["argv"][at + 1 :] == [*stock["argv"], "--ext", "reserve_gpu"]
    assert os.path.isabs(spec["argv"][0])
    assert spec["display_name"] == "Python 3 (GPU)"
    assert spec["metadata"].items() >= stock["metadata"].items()
    logos = {path.name for path in Path(RESOURCES).iterdir() if path.suffix in (".png", ".svg")}
    assert {path.name for path in folder(machine).iterdir()} >= logos


def test_a_kernel_has_its_gpu_before_its_first_line(machine: Machine) -> None:
    """The first cell of such a kernel finds the variables set, and %reserve_gpu says the same."""
    with spec_kernel(machine, "1") as kernel:
        assert kernel.run(VISIBLE).stdout == "['1']\n"
        cell = kernel.run("%reserve_gpu")
        assert cell.stdout.startswith("Reserving GPU1: 0000:02:00.0 16x GeForce"), cell
        assert not cell.stderr
        assert kernel.pid == kernel.manager.provisioner.pid  # type: ignore[union-attr]
        assert free(machine) == [0]
    assert free(machine) == [0, 1]


def test_its_life(machine: Machine) -> None:
    """Interrupt, restart, crash and shutdown do what they do to every kernel; the GPU follows."""
    with spec_kernel(machine) as kernel:
        message = kernel.start(NAPS)
        while kernel.client.get_iopub_msg(timeout=30)["msg_type"] != "stream":
            pass
        kernel.manager.interrupt_kernel()
        assert kernel.finish(message).error == "KeyboardInterrupt"
        before = kernel.pid
        kernel.restart()
        assert kernel.pid != before
        assert kernel.run(VISIBLE).stdout == "['0']\n"
        assert free(machine) == [1]
        os.kill(kernel.pid, signal.SIGKILL)
        kernel.manager.provisioner.process.wait()  # type: ignore[union-attr]
        assert free(machine) == [0, 1]


@pytest.mark.parametrize("is_last", [False, True])
def test_without_jupyter_client_s_manager(machine: Machine, *, is_last: bool) -> None:
    """What reads kernel.json itself, as VS Code, can start, interrupt, kill and start it again."""
    with other_kernel(machine, is_last=is_last) as kernel:
        assert kernel.run(VISIBLE).stdout == "['0']\n"
        assert kernel.pid == kernel.process.pid
        for number in (signal.SIGTERM, signal.SIGKILL):
            message = kernel.start(NAPS)
            while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "stream":
                pass
            kernel.process.send_signal(signal.SIGINT)
            assert kernel.finish(message).error == "KeyboardInterrupt"
            job = int(kernel.run(f"import subprocess; print({JOB}.pid)").stdout)
            assert is_running(job)
            assert free(machine) == [1]
            kernel.kill(number)
            while is_running(job):
                os.sched_yield()
            assert free(machine) == [0, 1]
            kernel.spawn()
            assert kernel.run(VISIBLE).stdout == "['0']\n"
            assert free(machine) == [1]
    assert free(machine) == [0, 1]


@pytest.mark.parametrize("is_spec", [True, False])
def test_the_name_that_vs_code_tells_the_kernel(machine: Machine, *, is_spec: bool) -> None:
    """A notebook's name that a kernel with a GPU is told later, as by VS Code, stands beside it."""
    with (
        other_kernel(machine) if is_spec else machine.kernel() as kernel,
        machine.child() as asker,
    ):
        if not is_spec:
            kernel.run("%reserve_gpu")
        holder = "[(h.notebook, h.pid) for r in reserve_gpu.status().rows for h in r.holders]"
        assert asker.run(holder).value == [[str(machine.folder), kernel.pid]]
        told = "__vsc_ipynb_file__ = '/home/alice/train.ipynb'"
        kernel.finish(kernel.client.execute(told, store_history=False))
        assert asker.run(holder).value == [["train.ipynb", kernel.pid]]


def test_children_of_the_kernel_do_not_keep_its_gpu(machine: Machine) -> None:
    """What a cell starts has no part in the reservation, though nobody ran %reserve_gpu."""
    with spec_kernel(machine) as kernel:
        pid = kernel.pid
        popen = "subprocess.Popen(['sleep', '1000'], close_fds=False)"
        job = kernel.run(f"import subprocess; print({popen}.pid)").stdout
        with living(int(job)):
            os.kill(pid, signal.SIGKILL)
            while is_running(pid):
                os.sched_yield()
            assert free(machine) == [0, 1]


def test_no_gpu_free(machine: Machine) -> None:
    """Where no GPU is free the kernel starts, sees none, says why once, and can get one later."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with spec_kernel(machine) as kernel:
            first = kernel.run(VISIBLE)
            assert first.stdout == "['']\n"
            assert first.stderr.startswith("This kernel was started without a GPU of its own.\n")
            assert "No free GPU devices: 2 of 2" in first.stderr
            assert f"(pid {holder.pid})" in first.stderr
            assert "%reserve_gpu --wait" in first.stderr
            assert not first.error
            assert kernel.run("1").stderr == ""
            assert kernel.run("%reserve_gpu").error == "NoFreeDeviceError"
            holder.kill()
            assert kernel.run("%reserve_gpu").stdout.startswith("Reserving GPU0: ")
            assert kernel.run("%reserve_gpu --release").stdout.startswith("Released GPU0.")
            assert kernel.run(VISIBLE).stdout == "[None]\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["7"], "There is no GPU7"),
        (["GPU-ffff"], "No GPU is called GPU-ffff here"),
        (["--name", "H100"], "H100"),
    ],
)
def test_what_this_machine_has_not(machine: Machine, options: list[str], text: str) -> None:
    """A kernel that asks for what is not there starts all the same, without a GPU, and says so."""
    start = (*US, "kernel", "start", *options, "--")
    code = "from reserve_gpu.reservation import reason; import os\n"
    code += "print([os.environ['CUDA_VISIBLE_DEVICES']], reason())"
    done = machine.command(*start, sys.executable, "-c", code)
    assert done.stdout.startswith("[''] This kernel was started without a GPU"), done.stderr
    assert text in done.stdout
    assert done.stdout.endswith("Try again with %reserve_gpu.\n")
    assert text in done.stderr


def test_a_silent_request_is_no_first_cell(machine: Machine) -> None:
    """What a front end asks the kernel before the first cell does not use up the reason."""
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with spec_kernel(machine) as kernel:
            kernel.client.execute("1", silent=True)
            kernel.client.execute("1", store_history=False)
            assert "No free GPU" in kernel.run("1").stderr


def test_a_profile_that_loads_the_extension_too(machine: Machine) -> None:
    """Beside a configuration that loads extensions, all of them are loaded, and the reason told."""
    profile = machine.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_config.py").write_text(
        "c = get_config()\nc.InteractiveShellApp.extensions = ['autoreload', 'reserve_gpu']\n"
    )
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        with spec_kernel(machine) as kernel:
            cell = kernel.run("%autoreload\nprint('done')")
            assert cell.stdout == "done\n"
            assert cell.stderr.count("No free GPU") == 1


def notebook(machine: Machine, *cells: str) -> subprocess.CompletedProcess[str]:
    """Run a notebook of that kernel with `jupyter execute`."""
    empty: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": []}
    kernelspec = {"name": "python3-gpu", "display_name": "", "language": "python"}
    content = {
        "cells": [empty | {"source": code, "execution_count": None} for code in cells],
        "metadata": {"kernelspec": kernelspec},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    (machine.folder / "notebook.ipynb").write_text(json.dumps(content))
    jupyter = (sys.executable, "-m", "jupyter", "execute", "notebook.ipynb", "--inplace")
    return machine.command(*jupyter, JUPYTER_PATH=str(machine.folder / "share" / "jupyter"))


def test_jupyter_execute(machine: Machine) -> None:
    """`jupyter execute` runs a notebook of that kernel, and saves why it had no GPU."""
    install(machine)
    done = notebook(machine, "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == '0'")
    assert done.returncode == 0, done.stderr
    with machine.child() as holder:
        holder.reserve("[0, 1]")
        done = notebook(machine, "import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == ''")
    assert done.returncode == 0, done.stderr
    saved = json.loads((machine.folder / "notebook.ipynb").read_text())
    assert "No free GPU devices" in "".join(saved["cells"][0]["outputs"][0]["text"])


def test_a_notebook_beside_modules_of_any_name(machine: Machine) -> None:
    """Files beside a notebook that are called like modules of ours or Python's don't break it."""
    for name in ("errors", "argparse", "locks", "json", "shutil"):
        (machine.folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    done = machine.command(*US, "run", "--", "echo", "ran")
    assert done.stdout == "ran\n", done.stderr


# -- installing -----------------------------------------------------------------------------------


def test_install_again_and_uninstall(machine: Machine) -> None:
    """Installing again replaces ours; uninstalling leaves nothing of it."""
    install(machine, "-n", "2")
    assert "--count=2" not in install(machine)["argv"]
    done = machine.command(*US, "kernel", "uninstall", "--prefix", ".")
    assert (done.returncode, done.stderr) == (0, "")
    assert not folder(machine).exists()
    done = machine.command(*US, "kernel", "uninstall", "--prefix", ".")
    assert (done.returncode, done.stderr) == (2, "There is no kernel python3-gpu.\n")


def test_the_user_s_place(machine: Machine) -> None:
    """By default the kernel is the user's, where every notebook of theirs finds it."""
    data = machine.home / "data"
    extra = {"JUPYTER_DATA_DIR": str(data)}
    done = machine.command(*US, "kernel", "install", "--name", "Mine", **extra)
    assert f"in {data}/kernels/mine\n" in done.stdout, done.stderr
    done = machine.command(*US, "kernel", "uninstall", "--name", "mine", **extra)
    assert done.returncode == 0
    assert list((data / "kernels").iterdir()) == []


@pytest.mark.parametrize("content", ['{"argv": ["x"], "metadata": {}}', "rubbish", None])
def test_another_s_kernel_is_left_alone(machine: Machine, content: str | None) -> None:
    """A kernel of the same name that is not ours is neither replaced nor removed."""
    folder(machine).mkdir(parents=True)
    if content is not None:
        (folder(machine) / "kernel.json").write_text(content)
    before = list(folder(machine).iterdir())
    for verb in ("install", "uninstall"):
        done = machine.command(*US, "kernel", verb, "--prefix", ".")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
    assert list(folder(machine).iterdir()) == before


def test_the_stock_kernel_is_not_replaced(machine: Machine) -> None:
    """The name of the stock kernel is refused: whoever opens a notebook expects that one."""
    done = machine.command(*US, "kernel", "install", "--prefix", ".", "--name", "python3")
    assert done.returncode == 2
    assert "Choose another --name" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--wait", "up to 45 s"),
        ("--wait 2m", "up to 45 s"),
        ("--wait soon", "no duration"),
        ("--min-memory much", "no size"),
        ("nonsense", "names no GPU"),
        ("--name ../x", "name of a kernel"),
        ("--name ..", "name of a kernel"),
        ("--user --sys-prefix", "Give one of"),
        ("--prefix /dev/null", "can't be installed"),
    ],
)
def test_what_can_not_be_installed(machine: Machine, words: str, text: str) -> None:
    """A kernel that could never start is refused in one line, before anything is written."""
    done = machine.command(
        *US, "kernel", "install", *words.split(), JUPYTER_DATA_DIR=str(machine.folder / "data")
    )
    assert done.returncode == (73 if "/dev/null" in words else 2)
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (machine.folder / "data").exists()


def test_without_jupyter(machine: Machine) -> None:
    """Without jupyter_client one line says how to get it."""
    code = (
        "import sys; sys.modules['jupyter_client.kernelspec'] = None\n"
        "from reserve_gpu.cli import main; sys.exit(main(['kernel', 'install']))"
    )
    done = machine.python(code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("-m pip install jupyter_client\n")
    assert done.stderr.count("\n") == 1
