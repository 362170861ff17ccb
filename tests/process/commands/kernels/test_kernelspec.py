"""Kernels that have their GPU before their first line runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from tests.support.here import Here
from tests.support.locked import held
from tests.support.machine import LIMIT_S, Kernel, kernel_manager
from tests.support.processes import US, is_running, living, wait_for
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.commandline import CommandLine
    from tests.support.machine import Cell, Machine

from tests.support.kernelspec import folder, install

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")

VISIBLE = "import os; print([os.environ.get('CUDA_VISIBLE_DEVICES')])"
# Short naps: a signal in the instant before a nap begins is noticed only at its end.
NAPS = "import time; print('on', flush=True)\nwhile True: time.sleep(0.05)"
# A job that has all that the kernel has open.
JOB = "import subprocess; print(subprocess.Popen(['sleep', '1000'], close_fds=False{}).pid)"


class SpecKernel(Kernel):
    """A kernel that is started by its kernelspec, as a notebook starts it."""

    def __init__(self, machine: Machine) -> None:
        from jupyter_client.kernelspec import KernelSpecManager

        self.manager = kernel_manager(
            machine.folder,
            kernel_name="python3-gpu",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder(machine).parent)]),
        )
        self._begin(machine.environ(), machine.folder)


class OtherKernel(Kernel):
    """A kernel that is started by its kernelspec without jupyter_client's manager, as in VS Code.

    It is done as there: read kernel.json, start the process, signal it, end all below it first.
    https://github.com/microsoft/vscode-jupyter, src/kernels/raw/launcher/kernelProcess.node.ts

    is_last: put the connection file behind all the rest, as VS Code does for the kernels that it
        takes for plain Python; else in its place.
    """

    def __init__(self, machine: Machine, spec: dict[str, Any], *, is_last: bool) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        assert spec.get("interrupt_mode", "signal") == "signal"
        # By files, relative to the working directory: a port may be gone before it is used.
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
        """Tell whether it answers, and what it publishes reaches us.

        The client's own wait_for_ready takes a kernel for dead that is slow to start.
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
        """Kill all processes below the kernel, then the kernel, and wait for its end."""
        self.client.stop_channels()
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.send_signal(number)
        self.process.send_signal(number)
        self.process.wait(LIMIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill(signal.SIGKILL)


@contextmanager
def other_kernel(here: Here, spec: dict[str, Any], *, is_last: bool) -> Iterator[OtherKernel]:
    """Make a kernel started as VS Code does; killed at the end."""
    kernel = OtherKernel(here, spec, is_last=is_last)
    try:
        yield kernel
    finally:
        kernel.close()


def interrupted_nap(kernel: Kernel) -> str | None:
    """Return the error of a cell that sleeps, once it has been interrupted.

    That of the reply: IPython 8 shows none where it comes between two statements.
    """
    message = kernel.start(NAPS)
    while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "stream":
        pass
    if isinstance(kernel, OtherKernel):
        kernel.process.send_signal(signal.SIGINT)
    else:
        kernel.manager.interrupt_kernel()
    error: str | None = kernel.reply(message).get("ename")
    return error


def is_gone(pid: int) -> bool:
    return not is_running(pid)


# -- a kernel with its GPU -------------------------------------------------------------------------


class Started(NamedTuple):
    """A kernel that was started with GPU1. first: what its first cell has shown."""

    machine: Here
    kernel: SpecKernel
    first: Cell


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    machine = Here(tmp_path_factory.mktemp("started"))
    done = machine.command(*US, "kernel", "install", "--prefix", ".", "1")
    assert done.stdout.startswith("Installed the kernel 'Python 3 (GPU: 1)' as python3-gpu, in ")
    with closing(SpecKernel(machine)) as kernel:
        yield Started(machine, kernel, kernel.run(VISIBLE))


together = pytest.mark.xdist_group("a kernel with its GPU")


@pytest.mark.promise
@together
def test_a_kernel_has_its_gpu_before_its_first_line(started: Started) -> None:
    """The first cell of such a kernel finds the variables set, and says which GPU that is."""
    told = "This kernel has GPU1 (GeForce GTX 1050 Ti)."
    assert (started.first.stdout, started.first.shown) == ("['1']\n", told)
    assert held(started.machine) == [1]
    cell = started.kernel.run("%reserve_gpu")
    assert cell.stdout.startswith("Reserving GPU1: 0000:02:00.0 16x GeForce"), cell
    assert not cell.stderr
    assert started.kernel.pid == started.kernel.manager.provisioner.pid  # type: ignore[union-attr]


@together
def test_the_name_that_vs_code_tells_the_kernel(started: Started) -> None:
    """A notebook's name that such a kernel is told later, as by VS Code, stands beside its GPU."""
    rows = "reserve_gpu.status().rows"
    look = f"[(h.notebook, h.record.who.command, h.pid) for r in {rows} for h in r.holders]"
    with started.machine.child() as asker:
        kernel = f"kernel in {started.machine.folder}"
        assert asker.run(look).value == [[None, kernel, started.kernel.pid]]
        told = "__vsc_ipynb_file__ = '/home/alice/train.ipynb'"
        started.kernel.finish(started.kernel.client.execute(told, store_history=False))
        assert asker.run(look).value == [["train.ipynb", kernel, started.kernel.pid]]


@pytest.mark.ipython
def test_its_life(here: Here, typed: CommandLine) -> None:
    """Interrupt, restart and kill do what they do to every kernel; a restart keeps its GPU."""
    install(here, typed)
    with closing(SpecKernel(here)) as kernel:
        assert interrupted_nap(kernel) == "KeyboardInterrupt"
        before = kernel.pid
        with here.child() as child:
            waiter = Waiter(here, child, "'0'")
            kernel.restart()
            waiter.sees(1, "reserved")
        job = int(kernel.run(JOB.format("")).stdout)  # in the first cell; nobody ran %reserve_gpu
        with living(job):
            assert kernel.pid != before
            assert kernel.run(VISIBLE).stdout == "['0']\n"
            assert held(here) == [0]
            os.kill(kernel.pid, signal.SIGKILL)
            kernel.manager.provisioner.process.wait()  # type: ignore[union-attr]
            assert held(here) == []


def test_without_jupyter_client_s_manager(here: Here, typed: CommandLine) -> None:
    """What reads kernel.json itself, as VS Code, can start, interrupt, kill and start it again."""
    spec = install(here, typed)
    for number, is_last in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        with other_kernel(here, spec, is_last=is_last) as kernel:
            assert kernel.run(VISIBLE).stdout == "['0']\n"
            assert kernel.pid == kernel.process.pid
            assert interrupted_nap(kernel) == "KeyboardInterrupt"
            job = int(kernel.run(JOB.format(", start_new_session=True")).stdout)
            assert is_running(job)
            assert held(here) == [0]
            kernel.kill(number)
            wait_for(partial(is_gone, job))
            assert held(here) == []


# -- a kernel without one --------------------------------------------------------------------------


def test_no_gpu_free(here: Here, typed: CommandLine) -> None:
    """Where no GPU is free the kernel starts, sees none, says why once, and can get one later."""
    install(here, typed)
    with here.child() as holder:
        holder.reserve("[0, 1]")
        with closing(SpecKernel(here)) as kernel:
            # What a front end asks before the first cell does not use up the reason.
            kernel.client.execute("1", silent=True)
            kernel.client.execute("1", store_history=False)
            first = kernel.run(VISIBLE)
            assert first.stdout == "['']\n"
            assert first.shown.startswith("This kernel was started without a GPU of its own.\n")
            assert "\nNo free GPU: 2 reserved." in first.shown
            assert "None of 2 GPUs is free" in first.shown  # as the machine stands then
            assert any("<table" in value.get("text/html", "") for value in first.values)
            assert f"(pid {holder.pid})" in first.shown
            assert "%reserve_gpu --wait" in first.shown
            assert not first.error
            assert kernel.run("1;").shown == ""
            assert kernel.run("%reserve_gpu").error == "NoFreeDeviceError"
            holder.kill()
            assert kernel.run("%reserve_gpu").stdout.startswith("Reserving GPU0: ")
            assert kernel.run("%reserve_gpu --release").stdout.startswith("Released GPU0.")
            assert kernel.run(VISIBLE).stdout == "[None]\n"


@pytest.mark.xdist_group("nbclient")
def test_a_profile_that_loads_the_extension_too(here: Here, typed: CommandLine) -> None:
    """Under nbclient and a configuration that loads extensions all are; the reason is saved."""
    import nbformat
    from nbclient.client import NotebookClient

    install(here, typed)
    os.environ["JUPYTER_PATH"] = str(here.folder / "share" / "jupyter")
    profile = here.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipython_config.py").write_text(
        "c = get_config()\nc.InteractiveShellApp.extensions = ['autoreload', 'reserve_gpu']\n"
    )
    cell = nbformat.v4.new_code_cell(f"%autoreload\n{VISIBLE}")  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=[cell])  # type: ignore[no-untyped-call]
    with here.child() as holder:
        holder.reserve("[0, 1]")
        NotebookClient(notebook, kernel_name="python3-gpu", timeout=LIMIT_S).execute()
    told, printed = cell["outputs"]
    assert told["data"]["text/plain"].count("No free GPU") == 1
    assert printed["text"] == "['']\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["7"], "There is no GPU7"),
        (["GPU-ffff"], "No GPU is named GPU-ffff"),
        (["--name", "H100"], "H100"),
    ],
)
def test_what_this_machine_has_not(machine: Machine, options: list[str], text: str) -> None:
    """A kernel that asks for what is not there starts anyway, without a GPU, and says so."""
    start = (*US, "kernel", "start", *options, "--")
    code = "from reserve_gpu.reservation.session import session; import os\n"
    code += "print([os.environ['CUDA_VISIBLE_DEVICES']], session().reason)"
    done = machine.command(*start, sys.executable, "-c", code)
    assert done.stdout.startswith("[''] This kernel was started without a GPU"), done.stderr
    assert text in done.stdout
    assert done.stdout.endswith("Try again with %reserve_gpu.\n")
    assert text in done.stderr


def test_a_notebook_beside_modules_of_any_name(machine: Machine) -> None:
    """Files beside a notebook that are called like modules of ours or Python's don't break it."""
    for name in ("errors", "argparse", "locks", "json", "shutil"):
        (machine.folder / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    done = machine.command(*US, "kernel", "start", "--", "echo", "ran")
    assert done.stdout == "ran\n", done.stderr


def test_a_kernel_whose_reservation_ends(machine: Machine) -> None:
    """The options that end a reservation stand in the kernelspec, and the kernel has them."""
    ends = ("--for", "8h", "--idle", "2h", "--if-wanted", "--end-kernel")
    done = machine.command(*US, "kernel", "install", "--prefix", ".", *ends)
    assert done.returncode == 0, done.stderr
    words = json.loads((folder(machine) / "kernel.json").read_text())["argv"]
    words = words[: words.index("--")]
    assert words[words.index("kernel") :] == [
        *("kernel", "start", "--for=8h", "--idle=2h", "--if-wanted", "--end-kernel")
    ]
    code = "import reserve_gpu, time; terms = reserve_gpu.current().lease\n"
    code += "print(round((terms.until - time.time()) / 3600), terms[2:5])"
    done = machine.command(*words, "--", sys.executable, "-c", code)
    assert done.stdout == "8 (7200.0, True, True)\n", done.stderr


def test_a_kernel_until_a_time_of_day(machine: Machine) -> None:
    """An --until in a kernelspec is the next such moment at each start of the kernel."""
    done = machine.command(*US, "kernel", "install", "--prefix", ".", "--until", "Fri 18:00")
    assert done.returncode == 0, done.stderr
    words = json.loads((folder(machine) / "kernel.json").read_text())["argv"]
    assert "--until=Fri 18:00" in words


def test_a_kernel_with_a_part(machine: Machine) -> None:
    """A kernel that starts with a part has its variables, and others see its size."""
    machine.write("gpu\n memory 8192\n")
    start = (*US, "kernel", "start", "--memory=2GiB", "--", sys.executable, "-c")
    code = "import os, reserve_gpu; (row,) = reserve_gpu.status().rows\n"
    code += "names = 'CUDA_DEVICE_MEMORY', 'CUPY_GPU_MEMORY_LIMIT'\n"
    code += (
        "print([os.environ[name] for name in names], row.holders[0].memory_limit_mib, end=' ')\n"
    )
    code += "print(row.promisable_mib)"
    done = machine.command(*start, code)
    assert done.stdout == "['2048', '1342177280'] 2048.0 6144.0\n", done.stderr


# -- for a kernel that another machine starts here -----------------------------------------------


@pytest.fixture
def holding(machine: Machine) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return what starts `kernel hold` on the machine; killed at the end."""
    installed = machine.command(*US, "kernel", "install")
    assert installed.returncode == 0, installed.stderr
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        argv = [*US, "kernel", "hold", "--id", "ssh-1", "--kernel", "python3-gpu", *words]
        process = subprocess.Popen(
            argv, env=machine.environ(), cwd=machine.folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_is_held_is_left_to_the_kernel(machine: Machine, holding: Any) -> None:
    """What is reserved for a kernel is kept until that one starts, and nobody else gets it."""
    process = holding("--count=2", "--note=far")
    assert json.loads(process.stdout.readline())["gpus"] == "GPU0 and GPU1"
    out, _ = process.communicate("keep\n", LIMIT_S)
    assert json.loads(out) == {"kept": True}
    told = {"id": "ssh-1", "notebook": "/home/a/it's far.ipynb", "machine": "laptop"}
    code = "import os, reserve_gpu; rows = reserve_gpu.status().rows\n"
    code += (
        "print([(h.notebook, h.record.who.origin, h.note) for row in rows for h in row.holders])"
    )
    with machine.child() as rival:
        assert "kept" in rival.reserve().text
        start = [*US, "kernel", "start", "--", sys.executable, "-c", code, "-f", "x.json"]
        done = machine.command(*start, RESERVE_GPU_STARTED=json.dumps(told).encode().hex())
    assert done.stdout == f"{[('it' + chr(39) + 's far.ipynb', 'laptop', 'far')] * 2}\n", done


@pytest.mark.parametrize("said", ["", "no\n", "keeper"])
def test_what_nobody_wants_is_released(machine: Machine, holding: Any, said: str) -> None:
    """If the one who asks goes, or says anything else, the GPU is free at once."""
    process = holding()
    assert "gpus" in process.stdout.readline()
    process.communicate(said, LIMIT_S)
    with machine.child() as rival:
        assert rival.reserve().value == "0"


def test_a_wait_that_nobody_wants_ends(machine: Machine, holding: Any) -> None:
    """If the one who asks goes while `kernel hold` waits, it leaves the queue."""
    with machine.child() as rival:
        assert not rival.reserve("count=2").error
        process = holding("--wait=1h")
        wait_for(lambda: bool(rival.run("len(reserve_gpu.status().waiting)").value))
        process.stdin.close()
        process.stdin = None
        assert process.wait(LIMIT_S) != 0


def test_a_refusal_is_a_line(machine: Machine, holding: Any) -> None:
    """Where nothing is free `kernel hold` says why in its line, and keeps nothing."""
    with machine.child() as rival:
        assert not rival.reserve("count=2").error
        out, _ = holding().communicate("keep\n", LIMIT_S)
    assert json.loads(out) == {"refused": "No free GPU: 2 reserved."}
