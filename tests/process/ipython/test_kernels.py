"""%reserve_gpu in Jupyter kernels and notebooks."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.here import Here
from tests.support.locked import held
from tests.support.machine import LIMIT_S
from tests.support.processes import is_running, queue, wait_for
from tests.support.reserving import of_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Two
    from tests.support.machine import Cell, Kernel

# Old versions set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")

START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"


def read_variables(kernel: Kernel) -> dict[str, str]:
    """Return the CUDA variables of the kernel's process."""
    cell = kernel.run(
        "import os\nfor k in sorted(os.environ):\n  if k[:5] == 'CUDA_': print(k, os.environ[k])"
    )
    return dict(line.partition(" ")[::2] for line in cell.stdout.splitlines())


def shows_only_the_message(cell: Cell) -> bool:
    """Return whether an error is one line, without frames, files or the name of its class."""
    (text,) = cell.traceback
    return not any(sign in text for sign in ("Traceback", "File ", "---->", "Error:", "\x1b"))


def published_messages(kernel: Kernel, cell: str) -> Iterator[tuple[str, Any]]:
    """Yield the type and the content of each message that a kernel publishes for a cell."""
    while True:
        message = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if message["parent_header"].get("msg_id") == cell:
            kind, content = message["msg_type"], message["content"]
            yield kind, content
            if (kind, content.get("execution_state")) == ("status", "idle"):
                return


def reply_status(kernel: Kernel, code: str) -> str:
    """Run a cell, and return the status in the kernel's reply: `ok` or `error`."""
    reply: Any = kernel.client.execute(code, reply=True, stop_on_error=False, timeout=LIMIT_S)
    status: str = reply["content"]["status"]
    return status


# -- two kernels -----------------------------------------------------------------------------------


two_kernels = pytest.mark.xdist_group("two kernels")


@pytest.mark.promise
@two_kernels
def test_simultaneous_requests_get_different_gpus(two: Two) -> None:
    two.machine.add("delay nvmlDeviceGetMemoryInfo_v2 * 0.02")  # makes the requests overlap
    kernels = (two.first, two.second)
    for _ in range(4):
        cells = [(kernel, kernel.start("%reserve_gpu")) for kernel in kernels]
        assert [kernel.finish(cell).error for kernel, cell in cells] == [None, None]
        visible = {read_variables(kernel)["CUDA_VISIBLE_DEVICES"] for kernel in kernels}
        assert visible == {"0", "1"}
        cells = [(kernel, kernel.start("%reserve_gpu --release")) for kernel in kernels]
        assert [kernel.finish(cell).error for kernel, cell in cells] == [None, None]


@pytest.mark.ipython
@pytest.mark.promise
@two_kernels
def test_error_names_the_holder(two: Two) -> None:
    """The error shows the notebook and the pid of another kernel that holds a GPU."""
    two.first.run("%reserve_gpu 0,1")
    cell = two.second.run("%reserve_gpu")
    assert cell.error == "NoFreeDeviceError"
    assert shows_only_the_message(cell)
    assert of_gpu(cell.shown).startswith("reserved: ")
    assert f"train.ipynb (pid {two.first.pid})" in of_gpu(cell.shown)


@pytest.mark.promise
@two_kernels
@pytest.mark.parametrize(
    "code",
    [
        "%reserve_gpu",
        "%reserve_gpu nonsense",
        "import reserve_gpu; reserve_gpu.reserve()",
    ],
)
def test_reply_to_a_failed_cell_is_an_error(two: Two, code: str) -> None:
    """The status of the reply stops `Run all` and nbclient."""
    two.first.run("%reserve_gpu 0,1")
    assert reply_status(two.second, code) == "error"
    assert reply_status(two.second, "%reserve_gpu --release") == "ok"


@pytest.mark.ipython
@pytest.mark.promise
@two_kernels
@pytest.mark.parametrize("code", ["%reserve_gpu --stat", "x = 1\nreserve_gpu --stat"])
def test_completion(two: Two, code: str) -> None:
    """A kernel completes options, and reserves nothing."""
    two.first.run("get_ipython().Completer.use_jedi = False")  # takes seconds to load
    reply: Any = two.first.client.complete(code, len(code), reply=True, timeout=LIMIT_S)
    content = reply["content"]
    assert content["status"] == "ok"
    assert "--status" in content["matches"]
    assert (content["cursor_start"], content["cursor_end"]) == (len(code) - 6, len(code))
    assert held(two.machine) == []


@two_kernels
def test_wait_without_a_reader_is_printed_once(two: Two) -> None:
    """If the client accepts no input, as nbclient, the wait is one line instead of a display."""
    two.first.run("%reserve_gpu 0,1")
    cell = two.second.client.execute("%reserve_gpu --wait", allow_stdin=False)
    printed = ""
    for kind, content in published_messages(two.second, cell):
        assert "data" not in content
        if kind == "stream":
            printed += content["text"]
            two.first.client.execute("%reserve_gpu --release")
    waited, _, reserved = printed.partition("Reserving GPU0: ")
    assert of_gpu(waited).startswith("reserved: ")
    assert printed.count("Waiting") == 1
    assert reserved


@pytest.mark.ipython
@pytest.mark.promise
@two_kernels
def test_interrupted_wait(two: Two) -> None:
    """An interrupt ends the wait without a traceback, and leaves neither lock nor queue entry.

    The reply is an error, because `Run All` has to stop.
    """
    two.first.run("%reserve_gpu 0,1")
    cell = two.second.start("%reserve_gpu --wait")
    wait_for(lambda: queue(two.machine))
    while two.second.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "display_data":
        pass
    two.second.manager.interrupt_kernel()
    done = two.second.finish(cell)
    assert two.second.reply(cell)["ename"] == "WaitInterrupted"
    assert (done.error, done.traceback) == (None, [])
    assert "nothing is reserved" in done.stdout
    assert "place in the queue is kept" in done.stdout
    assert done.values[-1]["text/plain"] == ""
    assert not queue(two.machine)
    assert read_variables(two.second) == {"CUDA_VISIBLE_DEVICES": ""}


# -- a kernel in which CUDA has started ------------------------------------------------------------


class Started(NamedTuple):
    """A kernel that reserved GPU1 and GPU2 of three, and then started CUDA.

    Attributes:
        machine: The machine.
        kernel: The kernel.
        first: The output of the reservation.
        before: The variables after the reservation.
    """

    machine: Here
    kernel: Kernel
    first: Cell
    before: dict[str, str]


@pytest.fixture(scope="module")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Start the kernel once for all tests of the group."""
    machine = Here(tmp_path_factory.mktemp("started"))
    machine.write("gpu\ngpu\ngpu\n")
    with machine.kernel() as kernel:
        first = kernel.run("%reserve_gpu 1,2")
        before = read_variables(kernel)
        assert kernel.run(START_CUDA).stdout == "0\n"
        yield Started(machine, kernel, first, before)


@pytest.fixture
def started(started_once: Started) -> Started:
    """Return the kernel, holding GPU1 and GPU2."""
    assert started_once.kernel.run("%reserve_gpu 1,2").error is None
    assert held(started_once.machine) == [1, 2]
    return started_once


one_kernel = pytest.mark.xdist_group("a kernel with CUDA")


@one_kernel
def test_other_gpu_is_refused_after_cuda_has_started(started: Started) -> None:
    """The reservation stays, and the error suggests to restart the kernel."""
    for words in ("0", "0,1,2", "2,1"):
        cell = started.kernel.run(f"%reserve_gpu {words}")
        assert cell.error == "TooLateError"
        assert shows_only_the_message(cell)
        assert "GPU1 and GPU2" in cell.traceback[0]
        assert "estart the kernel" in cell.traceback[0]
        assert (read_variables(started.kernel), held(started.machine)) == (started.before, [1, 2])


# -- the end of kernels and cells ------------------------------------------------------------------


def crash(kernel: Kernel) -> None:
    """End the process of a kernel."""
    kernel.client.execute("import os; os._exit(1)")
    wait_for(lambda: not kernel.manager.is_alive())


@pytest.fixture
def plain(tmp_path: Path) -> Here:
    """Make a machine with two idle GPUs; the test process is not on it."""
    return Here(tmp_path)


@pytest.mark.ipython
@pytest.mark.promise
def test_gpu_is_free_when_the_kernel_ends(plain: Here) -> None:
    """A kernel that crashes or is shut down frees its GPU."""
    with plain.kernel() as kernel:
        kernel.run("%reserve_gpu")
        assert held(plain) == [0]
        crash(kernel)
        assert held(plain) == []
    with plain.kernel() as kernel:
        kernel.run("%reserve_gpu")
        kernel.manager.shutdown_kernel()
        assert held(plain) == []


def test_gpu_is_free_when_children_outlive_the_kernel(plain: Here) -> None:
    """A kernel that is killed with SIGKILL frees its GPU although its child processes survive."""
    start_children = """
import os, subprocess, time
pid = os.fork()
if not pid:
    time.sleep(1000)
print(pid, subprocess.Popen(["sleep", "1000"], close_fds=False).pid)
"""
    with plain.kernel() as kernel, ExitStack() as cleanup:
        kernel.run("%reserve_gpu")
        children = [int(pid) for pid in kernel.run(start_children).stdout.split()]
        for child in children:
            cleanup.callback(os.kill, child, signal.SIGKILL)
        os.kill(kernel.pid, signal.SIGKILL)
        wait_for(lambda: not kernel.manager.is_alive())
        assert held(plain) == []
        assert [is_running(child) for child in children] == [True, True]


@pytest.mark.parametrize("line", ["%reserve_gpu", "%reserve_gpu --status"])
def test_hanging_driver_is_reported(plain: Here, line: str) -> None:
    """After 2 s, a display names the driver call, until the call returns."""
    plain.write("gpu\ndelay-first nvmlDeviceGetMemoryInfo_v2 * 3.5")
    with plain.kernel() as kernel:
        cell = kernel.start(line)
        shown = [content for _, content in published_messages(kernel, cell) if "data" in content]
    texts = [content["data"]["text/plain"] for content in shown]
    assert "nvmlDeviceGetMemoryInfo" in texts[0]
    assert "" in texts


# -- notebooks -------------------------------------------------------------------------------------


@pytest.mark.ipython
@pytest.mark.promise
@pytest.mark.xdist_group("nbclient")  # nbformat takes seconds to load next to JupyterLab
def test_notebook_stops_at_a_failed_request(here: Here) -> None:
    """Nbclient runs a notebook with its GPU, up to a request that fails."""
    import nbformat
    from nbclient.client import NotebookClient
    from nbclient.exceptions import CellExecutionError

    codes = [
        "%load_ext reserve_gpu",
        "%reserve_gpu 1",
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])",
        "%reserve_gpu 7",
        "print('continued')",
    ]
    cells = [nbformat.v4.new_code_cell(code) for code in codes]  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    with pytest.raises(CellExecutionError):
        NotebookClient(notebook, kernel_name="python3", timeout=LIMIT_S).execute()
    _, reserved, shown, failed, unreached = [cell["outputs"] for cell in cells]
    assert "GPU1" in reserved[0]["text"]
    assert shown[0]["text"] == "1\n"
    assert "GPU7" in failed[0]["text"]
    assert unreached == []
