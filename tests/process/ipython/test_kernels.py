"""%reserve_gpu in real Jupyter kernels and notebooks."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from functools import partial
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

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")

START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
LONG_S = 1000  # than any test takes


def variables(kernel: Kernel) -> dict[str, str]:
    """Return the CUDA variables of the kernel's process."""
    cell = kernel.run(
        "import os\nfor k in sorted(os.environ):\n  if k[:5] == 'CUDA_': print(k, os.environ[k])"
    )
    return dict(line.partition(" ")[::2] for line in cell.stdout.splitlines())


def visible(kernel: Kernel) -> str | None:
    return variables(kernel).get("CUDA_VISIBLE_DEVICES")


def has_no_traceback(cell: Cell) -> bool:
    """Tell whether an error shows our lines alone: no frame, no file, no name of a class."""
    text = "\n".join(cell.traceback)
    return not any(sign in text for sign in ("Traceback", "File ", "---->", "Error:", "\x1b"))


def messages(kernel: Kernel, cell: str) -> Iterator[tuple[str, Any]]:
    """Return what the kernel publishes for a cell until that is done: the kind, and the content."""
    while True:
        message = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if message["parent_header"].get("msg_id") == cell:
            kind, content = message["msg_type"], message["content"]
            yield kind, content
            if (kind, content.get("execution_state")) == ("status", "idle"):
                return


def status_of(kernel: Kernel, code: str) -> str:
    """Return what the kernel replies to who has a cell run: `ok` or `error`."""
    reply: Any = kernel.client.execute(code, reply=True, stop_on_error=False, timeout=LIMIT_S)
    status: str = reply["content"]["status"]
    return status


# -- two kernels that stay as they are -------------------------------------------------------------


together = pytest.mark.xdist_group("two kernels")


@pytest.mark.ipython
@pytest.mark.promise
@together
def test_kernel_and_its_children_see_the_variables(two: Two) -> None:
    """What is reserved is in the kernel's environment, in C's, and in that of what it starts."""
    kernel = two.first
    assert kernel.run("%reserve_gpu 1").error is None
    assert variables(kernel) == {
        "CUDA_DEVICE_MEMORY": "4038",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    shell = kernel.run("!echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $CUDA_DEVICE_MEMORY")
    assert shell.stdout.split() == ["1", "PCI_BUS_ID", "4038"]
    getenv = "import ctypes; c = ctypes.CDLL(None).getenv; c.restype = ctypes.c_char_p"
    assert kernel.run(f"{getenv}; print(c(b'CUDA_VISIBLE_DEVICES'))").stdout == "b'1'\n"


@pytest.mark.promise
@together
def test_two_kernels_at_the_same_moment(two: Two) -> None:
    """Two kernels that run the cell at the same moment never get the same GPU, in any round."""
    two.machine.add("delay nvmlDeviceGetMemoryInfo_v2 * 0.02")  # time to be overtaken in
    kernels = (two.first, two.second)
    for _ in range(4):
        cells = [(kernel, kernel.start("%reserve_gpu")) for kernel in kernels]
        assert [kernel.finish(cell).error for kernel, cell in cells] == [None, None]
        assert {visible(kernel) for kernel in kernels} == {"0", "1"}
        cells = [(kernel, kernel.start("%reserve_gpu --release")) for kernel in kernels]
        assert [kernel.finish(cell).error for kernel, cell in cells] == [None, None]


@pytest.mark.ipython
@pytest.mark.promise
@together
def test_failure_shows_who_has_it(two: Two) -> None:
    """A GPU that another kernel holds is said to be, with that kernel's notebook and pid."""
    two.first.run("%reserve_gpu 0,1")
    cell = two.second.run("%reserve_gpu")
    assert cell.error == "NoFreeDeviceError"
    assert has_no_traceback(cell)
    assert cell.traceback == ["No free GPU: 2 reserved."]
    assert of_gpu(cell.shown).startswith("reserved: ")
    assert f"train.ipynb (pid {two.first.pid})" in of_gpu(cell.shown)


@pytest.mark.promise
@together
@pytest.mark.parametrize(
    "code",
    [
        "%reserve_gpu",
        "%reserve_gpu --wait 0.01s",
        "%reserve_gpu nonsense",
        "import reserve_gpu; reserve_gpu.reserve()",
    ],
)
def test_who_runs_the_cell_is_told_that_it_failed(two: Two, code: str) -> None:
    """However reserving fails, the reply says so: that is what stops `Run all` and nbclient."""
    two.first.run("%reserve_gpu 0,1")
    assert status_of(two.second, code) == "error"
    assert status_of(two.second, "%reserve_gpu --release") == "ok"


@pytest.mark.ipython
@pytest.mark.promise
@together
@pytest.mark.parametrize("code", ["%reserve_gpu --stat", "x = 1\nreserve_gpu --stat"])
def test_tab(two: Two, code: str) -> None:
    """A kernel answers a front end's request to complete, and takes nothing for it."""
    two.first.run("get_ipython().Completer.use_jedi = False")  # which takes seconds to load
    reply: Any = two.first.client.complete(code, len(code), reply=True, timeout=LIMIT_S)
    content = reply["content"]
    assert content["status"] == "ok"
    assert "--status" in content["matches"]
    assert (content["cursor_start"], content["cursor_end"]) == (len(code) - 6, len(code))
    assert held(two.machine) == []


@together
def test_a_wait_is_one_display(two: Two) -> None:
    """A cell that waits has one display, updated in place and empty at the end, then the output."""
    two.first.run("%reserve_gpu 0 --note thesis")
    two.second.run("%reserve_gpu 1")
    cell = two.second.start("%reserve_gpu 0 --wait")
    shown = []
    for kind, content in messages(two.second, cell):
        shown.append((kind, content))
        if sum("data" in content for _, content in shown) == 2:  # another second has come
            two.first.client.execute("%reserve_gpu --release")
    displays = [(kind, content) for kind, content in shown if "data" in content]
    assert displays[0][0] == "display_data"
    assert {kind for kind, _ in displays[1:]} == {"update_display_data"}
    assert len({content["transient"]["display_id"] for _, content in displays}) == 1
    texts = [content["data"]["text/plain"] for _, content in displays]
    assert re.match(r"Waiting for GPU0: next in the queue, \d+ s so far\.\n", texts[0])
    assert of_gpu(texts[0]).startswith("reserved: ")
    assert f"train.ipynb (pid {two.first.pid})" in texts[0]
    assert "thesis" in texts[0]
    assert texts[-1] == ""
    kinds = [kind for kind, content in shown if "data" in content or kind == "stream"]
    assert kinds.index("stream") == len(displays)
    (output,) = [content["text"] for _, content in shown if content.get("name") == "stdout"]
    waited, released, reserving, *_ = output.splitlines()
    assert re.match(r"Waited for \d+ s\.$", waited)
    assert released == "Released GPU1."
    assert reserving.startswith("Reserving GPU0: ")


@together
def test_a_wait_that_nobody_watches(two: Two) -> None:
    """Where nobody could answer a question, as in nbclient, a wait is printed once."""
    two.first.run("%reserve_gpu 0,1")
    cell = two.second.client.execute("%reserve_gpu --wait", allow_stdin=False)
    printed = ""
    for kind, content in messages(two.second, cell):
        assert "data" not in content
        if kind == "stream":
            printed += content["text"]
            two.first.client.execute("%reserve_gpu --release")
    waited, _, reserved = printed.partition("Reserving GPU0: ")
    assert waited.startswith("Waiting for a GPU: next in the queue, ")
    assert of_gpu(waited).startswith("reserved: ")
    assert waited.count("Waiting") == 1
    assert reserved


@pytest.mark.ipython
@pytest.mark.promise
@together
def test_interrupting_a_cell_that_waits(two: Two) -> None:
    """Interrupting a waiting cell prints one line; nothing is held, nobody in the queue.

    It is an error to who runs the cell, as Run All has to stop, but none is shown.
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
    assert done.stdout == (
        "Stopped waiting; nothing is reserved. No GPU is visible to this notebook.\n"
        "Your place in the queue is kept for 2 min; the same request returns to it.\n"
    )
    assert done.values[-1]["text/plain"] == ""
    assert not queue(two.machine)
    assert variables(two.second) == {"CUDA_VISIBLE_DEVICES": ""}


@together
def test_the_name_that_vs_code_tells_the_kernel(two: Two) -> None:
    """A notebook's name that a kernel is told after it has reserved, as by VS Code, is shown."""
    kernel = two.second
    kernel.run("%reserve_gpu")
    look = (
        "import reserve_gpu; "
        "print([(h.notebook, h.record.who.cwd) for h in reserve_gpu.status().rows[0].holders])"
    )
    assert two.first.run(look).stdout == f"{[(None, str(two.machine.folder))]}\n"
    told = "__vsc_ipynb_file__ = '/home/bob/tune.ipynb'"
    kernel.finish(kernel.client.execute(told, store_history=False))
    assert two.first.run(look).stdout == f"{[('tune.ipynb', str(two.machine.folder))]}\n"
    kernel.run("del __vsc_ipynb_file__")


# -- a kernel in which CUDA has started ------------------------------------------------------------


class Started(NamedTuple):
    """A kernel that reserved GPU1 and GPU2 of three, and then started CUDA.

    first: what its first reservation has shown. before: its variables then.
    """

    machine: Here
    kernel: Kernel
    first: Cell
    before: dict[str, str]


@pytest.fixture(scope="module")
def started_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    machine = Here(tmp_path_factory.mktemp("started"))
    machine.write("gpu\ngpu\ngpu\n")
    with machine.kernel() as kernel:
        first = kernel.run("%reserve_gpu 1,2")
        before = variables(kernel)
        assert kernel.run(START_CUDA).stdout == "0\n"
        yield Started(machine, kernel, first, before)


@pytest.fixture
def started(started_once: Started) -> Started:
    """Return the same kernel again, which holds GPU1 and GPU2."""
    assert started_once.kernel.run("%reserve_gpu 1,2").error is None
    assert held(started_once.machine) == [1, 2]
    return started_once


one_cuda = pytest.mark.xdist_group("a kernel with CUDA")


@one_cuda
@pytest.mark.parametrize("wish", ["", "1,2", "-n 2"])
def test_cell_run_again(started: Started, wish: str) -> None:
    """Once CUDA has started, the cell run again says the same and changes nothing."""
    again = started.kernel.run(f"%reserve_gpu {wish}")
    assert (again.stdout, again.stderr, again.error) == (started.first.stdout, "", None)
    assert (variables(started.kernel), held(started.machine)) == (started.before, [1, 2])


@one_cuda
def test_too_late_for_another(started: Started) -> None:
    """Once CUDA has started, asking for another GPU fails without traceback; what is held stays."""
    for wish in ("0", "0,1,2", "2,1"):
        cell = started.kernel.run(f"%reserve_gpu {wish}")
        assert cell.error == "TooLateError"
        assert has_no_traceback(cell)
        assert "This kernel keeps GPU1 and GPU2." in cell.traceback[0]
        assert "estart the kernel" in cell.traceback[0]
        assert (variables(started.kernel), held(started.machine)) == (started.before, [1, 2])


@one_cuda
def test_less_once_cuda_has_started(started: Started) -> None:
    """Once CUDA has started, asking for less keeps everything, and a warning says that it stays."""
    cell = started.kernel.run("%reserve_gpu 1")
    assert (cell.stdout, cell.error) == (started.first.stdout, None)
    assert cell.shown.startswith("Warning: CUDA has started in this kernel and keeps using ")
    assert cell.shown.endswith("GPU2 stays reserved as well.")
    assert (variables(started.kernel), held(started.machine)) == (started.before, [1, 2])


@one_cuda
def test_taken_back(started: Started) -> None:
    """What was released after CUDA has started can be had again, unless somebody else has it."""
    released = started.kernel.run("%reserve_gpu --release").stdout
    assert released.startswith("Released GPU1 and GPU2.\nCUDA is still running in this kernel. ")
    assert held(started.machine) == []
    with started.machine.child() as other:
        assert other.reserve("2").value == "2"
        refused = started.kernel.run("%reserve_gpu 1,2")
        assert refused.error == "NoFreeDeviceError"
        assert f"(pid {other.pid})" in refused.shown
    cell = started.kernel.run("%reserve_gpu 1,2")
    assert (cell.stdout, cell.error) == (started.first.stdout, None)
    assert (variables(started.kernel), held(started.machine)) == (started.before, [1, 2])


# -- the end of a kernel, and of a cell ------------------------------------------------------------


def crash(kernel: Kernel) -> None:
    kernel.client.execute("import os; os._exit(1)")
    wait_for(lambda: not kernel.manager.is_alive())


@pytest.fixture
def plain(tmp_path: Path) -> Here:
    """Make a machine with two idle GPUs; the test process is not on it."""
    return Here(tmp_path)


@pytest.mark.ipython
@pytest.mark.promise
def test_gpu_is_free_when_the_kernel_ends(plain: Here) -> None:
    """A kernel that crashes or is shut down frees its GPU at once."""
    with plain.kernel() as kernel:
        kernel.run("%reserve_gpu")
        assert held(plain) == [0]
        crash(kernel)
        assert held(plain) == []
    with plain.kernel() as kernel:
        kernel.run("%reserve_gpu")
        kernel.manager.shutdown_kernel()
        assert held(plain) == []


@pytest.mark.promise
def test_gpu_is_free_when_children_outlive_the_kernel(plain: Here) -> None:
    """A kernel that is killed with -9 frees its GPU although processes that it started live on."""
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


def has_called(machine: Here, function: str) -> bool:
    return any(call.startswith(function) for call in machine.calls())


def test_interrupt_ends_a_call_that_hangs(plain: Here) -> None:
    """Interrupting a cell that hangs in the driver ends it, and leaves nothing held or changed."""
    functions = [
        "nvmlDeviceGetMemoryInfo_v2",  # when it is enumerated
        "nvmlDeviceGetComputeRunningProcesses_v3",  # when it is read, with lock and mutex held
    ]
    with plain.kernel() as kernel:
        for function in functions:
            plain.write(f"gpu\ngpu\ndelay {function} * {LONG_S}")
            plain.log.unlink(missing_ok=True)
            cell = kernel.start("%reserve_gpu")
            wait_for(partial(has_called, plain, function))
            kernel.manager.interrupt_kernel()
            assert kernel.finish(cell).error == "KeyboardInterrupt"
            assert variables(kernel) == {}
            assert held(plain) == []
            plain.write("gpu\ngpu")
            with plain.child() as child:
                assert child.reserve("'0,1'").value == "0,1"


@pytest.mark.parametrize("line", ["%reserve_gpu", "%reserve_gpu --status"])
def test_a_driver_that_hangs_is_told(plain: Here, line: str) -> None:
    """After 2 s the cell says that it waits for the driver, each second, and then nothing of it."""
    plain.write("gpu\ndelay-first nvmlDeviceGetMemoryInfo_v2 * 3.5")
    with plain.kernel() as kernel:
        cell = kernel.start(line)
        shown = [content for _, content in messages(kernel, cell) if "data" in content]
    texts = [content["data"]["text/plain"] for content in shown]
    first, *_ = texts
    assert re.match(
        r"Still waiting for the NVIDIA driver after \d s \(nvmlDeviceGetMemoryInfo\w*\)\.$", first
    )
    assert "" in texts


# -- notebooks -------------------------------------------------------------------------------------


@pytest.mark.ipython
@pytest.mark.promise
@pytest.mark.xdist_group("nbclient")  # nbformat takes seconds to load where JupyterLab is, too
def test_notebook_runs_with_its_gpu_up_to_a_failure(here: Here) -> None:
    """A notebook that reserves a GPU is run with it by nbclient, up to a cell that gets none."""
    import nbformat
    from nbclient.client import NotebookClient
    from nbclient.exceptions import CellExecutionError

    codes = [
        "%load_ext reserve_gpu",
        "%reserve_gpu 1",
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])",
        "%reserve_gpu 7",
        "print('went on')",
    ]
    cells = [nbformat.v4.new_code_cell(code) for code in codes]  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    with pytest.raises(CellExecutionError):
        NotebookClient(notebook, kernel_name="python3", timeout=LIMIT_S).execute()
    _, reserved, shown, failed, unreached = [cell["outputs"] for cell in cells]
    assert reserved[0]["text"].startswith("Reserving GPU1: 0000:02:00.0 16x GeForce")
    assert shown[0]["text"] == "1\n"
    assert "There is no GPU7" in failed[0]["text"]
    assert unreached == []
