"""%reserve_gpu in real Jupyter kernels and notebooks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.machine import LIMIT_S

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.machine import Cell, Kernel, Machine

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")

ONE_GPU = "gpu\n  memory 4038\n"
TWO_GPUS = "gpu\ngpu\n"
BUSY = "gpu\n  compute 4321 3500\n"
START_CUDA = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after a long time."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def variables(kernel: Kernel) -> dict[str, str]:
    """The CUDA variables of the kernel's process."""
    cell = kernel.run(
        "import os\nfor k in sorted(os.environ):\n  if k[:5] == 'CUDA_': print(k, os.environ[k])"
    )
    return dict(line.partition(" ")[::2] for line in cell.stdout.splitlines())


def visible(kernel: Kernel) -> str | None:
    return variables(kernel).get("CUDA_VISIBLE_DEVICES")


def others_get(machine: Machine) -> str | None:
    """What another process gets now, None for nothing."""
    with machine.child() as child:
        value: str | None = child.reserve().value
        return value


def has_no_traceback(cell: Cell) -> bool:
    """Whether an error shows our lines alone: no frame, no file, no name of a class."""
    text = "\n".join(cell.traceback)
    return not any(sign in text for sign in ("Traceback", "File ", "---->", "Error:", "\x1b"))


# -- reserving -------------------------------------------------------------------------------------


def test_kernel_and_its_children_see_the_variables(machine: Machine) -> None:
    """What is reserved is in the kernel's environment, in C's, and in that of what it starts."""
    with machine.kernel() as kernel:
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


def test_two_kernels_at_the_same_moment(machine: Machine) -> None:
    """Two kernels that run the cell at the same moment never get the same GPU, in any round."""
    machine.write(f"{TWO_GPUS}delay nvmlDeviceGetMemoryInfo_v2 * 0.02")  # time to be overtaken in
    with machine.kernel() as one, machine.kernel() as other:
        for _ in range(8):
            cells = [(kernel, kernel.start("%reserve_gpu")) for kernel in (one, other)]
            assert [kernel.finish(cell).error for kernel, cell in cells] == [None, None]
            assert {visible(one), visible(other)} == {"0", "1"}
            cells = [(kernel, kernel.start("%reserve_gpu --release")) for kernel in (one, other)]
            assert [kernel.finish(cell).error for kernel, cell in cells] == [None, None]


def test_cell_run_again(machine: Machine) -> None:
    """The cell run again says the same and changes nothing, also once CUDA has started."""
    with machine.child() as neighbour, machine.kernel() as kernel:
        neighbour.reserve("0")
        first = kernel.run("%reserve_gpu")
        neighbour.kill()
        before = variables(kernel)
        assert before["CUDA_VISIBLE_DEVICES"] == "1"
        again = [kernel.run(code) for code in ("%reserve_gpu", "%reserve_gpu 1")]
        assert kernel.run(START_CUDA).stdout == "0\n"
        again += [kernel.run(code) for code in ("%reserve_gpu", "%reserve_gpu 1")]
        assert [(cell.stdout, cell.stderr, cell.error) for cell in again] == [
            (first.stdout, "", None)
        ] * 4
        assert variables(kernel) == before


# -- the end of a kernel ---------------------------------------------------------------------------


def crash(kernel: Kernel) -> None:
    kernel.client.execute("import os; os._exit(1)")
    wait_for(lambda: not kernel.manager.is_alive())


def kill(kernel: Kernel) -> None:
    os.kill(kernel.pid, signal.SIGKILL)
    wait_for(lambda: not kernel.manager.is_alive())


def shut_down(kernel: Kernel) -> None:
    kernel.manager.shutdown_kernel()


def restart(kernel: Kernel) -> None:
    kernel.restart()
    assert visible(kernel) is None


@pytest.mark.parametrize("end", [shut_down, restart, crash, kill])
def test_gpu_is_free_when_the_kernel_ends(machine: Machine, end: Callable[[Kernel], None]) -> None:
    """However a kernel ends, its GPU can be had at once."""
    machine.write(ONE_GPU)
    with machine.kernel() as kernel:
        kernel.run("%reserve_gpu")
        assert others_get(machine) is None
        end(kernel)
        assert others_get(machine) == "0"


def test_gpu_is_free_when_children_outlive_the_kernel(machine: Machine) -> None:
    """A kernel that is killed with -9 frees its GPU although processes that it started live on."""
    machine.write(ONE_GPU)
    start_children = """
import os, subprocess, time
pid = os.fork()
if not pid:
    time.sleep(1000)
print(pid, subprocess.Popen(["sleep", "1000"], close_fds=False).pid)
"""
    with machine.kernel() as kernel, ExitStack() as cleanup:
        kernel.run("%reserve_gpu")
        children = [int(pid) for pid in kernel.run(start_children).stdout.split()]
        for child in children:
            cleanup.callback(os.kill, child, signal.SIGKILL)
        kill(kernel)
        assert others_get(machine) == "0"
        assert len(children) == 2
        for child in children:
            os.kill(child, 0)  # raises if it is gone


# -- failing ---------------------------------------------------------------------------------------


def test_too_late(machine: Machine) -> None:
    """Once CUDA has started, an error says to restart the kernel; nothing is changed or held."""
    with machine.kernel(CUDA_DEVICE_MEMORY="7") as kernel:
        assert kernel.run(START_CUDA).stdout == "0\n"
        for argument in ("", "1", "0,1"):
            cell = kernel.run(f"%reserve_gpu {argument}")
            assert cell.error == "TooLateError"
            assert has_no_traceback(cell)
            assert "estart the kernel" in cell.traceback[0]
        assert variables(kernel) == {"CUDA_DEVICE_MEMORY": "7"}
        with machine.child() as child:
            assert child.reserve("'0,1'").value == "0,1"


def test_too_late_for_another(machine: Machine) -> None:
    """Once CUDA has started, asking for another GPU is an error and the one that is held stays."""
    with machine.kernel() as kernel:
        kernel.run("%reserve_gpu 0")
        before = variables(kernel)
        kernel.run(START_CUDA)
        cell = kernel.run("%reserve_gpu 1")
        assert cell.error == "TooLateError"
        assert "GPU0" in cell.traceback[0]
        assert variables(kernel) == before
        assert others_get(machine) == "1"


def test_fails_closed_and_recovers(machine: Machine) -> None:
    """Nothing free: no GPU is visible, until one can be had or --release undoes the failure."""
    machine.write(BUSY)
    before = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_MEMORY": "7"}
    with machine.kernel(**before) as kernel:
        for _ in range(2):  # the second failure does not take the first one's '' for the fence
            cell = kernel.run("%reserve_gpu")
            assert cell.error == "NoFreeDeviceError"
            assert has_no_traceback(cell)
            assert cell.traceback[0].startswith("No free GPU devices")
            assert cell.traceback[1].startswith("  GPU0: busy")
            assert "4321" in cell.traceback[1]
            assert cell.traceback[-1] == "CUDA_VISIBLE_DEVICES = ''"
            assert variables(kernel) == {"CUDA_VISIBLE_DEVICES": ""}
        kernel.run("%reserve_gpu --release")
        assert variables(kernel) == before
        kernel.run("%reserve_gpu")
        machine.write(ONE_GPU)
        assert kernel.run("%reserve_gpu").error is None
        assert variables(kernel)["CUDA_VISIBLE_DEVICES"] == "0"
        assert variables(kernel)["CUDA_DEVICE_MEMORY"] == "4038"
        kernel.run("%reserve_gpu --release")
        assert variables(kernel) == before


def test_failure_shows_who_has_it(machine: Machine) -> None:
    """A GPU that another kernel holds is said to be reserved, with that kernel's pid."""
    machine.write(ONE_GPU)
    with (
        machine.kernel(JPY_SESSION_NAME="/home/alice/train.ipynb") as holder,
        machine.kernel() as kernel,
    ):
        holder.run("%reserve_gpu")
        cell = kernel.run("%reserve_gpu")
        assert cell.traceback[1].startswith("  GPU0: reserved by ")
        assert f"train.ipynb (pid {holder.pid})" in cell.traceback[1]


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetMemoryInfo_v2",  # when it is enumerated
        "nvmlDeviceGetComputeRunningProcesses_v3",  # when it is read, with lock and mutex held
    ],
)
def test_interrupt_ends_a_call_that_hangs(machine: Machine, function: str) -> None:
    """Interrupting a cell that hangs in the driver ends it, and leaves nothing held or changed."""
    machine.write(f"{TWO_GPUS}delay {function} * 1000")
    with machine.kernel() as kernel:
        cell = kernel.start("%reserve_gpu")
        wait_for(lambda: any(function in call for call in machine.calls()))
        kernel.manager.interrupt_kernel()
        assert kernel.finish(cell).error == "KeyboardInterrupt"
        assert variables(kernel) == {}
        machine.write(TWO_GPUS)
        with machine.child() as child:
            assert child.reserve("'0,1'").value == "0,1"


# -- notebooks -------------------------------------------------------------------------------------


def execute(machine: Machine, *cells: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a notebook with `jupyter execute`; return also what its last cell wrote to a file."""
    notebook, trace = machine.folder / "notebook.ipynb", machine.folder / "trace"
    last = f"import os; open({str(trace)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    empty: dict[str, Any] = {
        "cell_type": "code",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    content = {
        "cells": [empty | {"source": code} for code in (*cells, last)],
        "metadata": {"kernelspec": kernelspec},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    notebook.write_text(json.dumps(content))
    done = machine.command(sys.executable, "-m", "jupyter", "execute", str(notebook), "--inplace")
    return done, trace.read_text() if trace.exists() else ""


def test_notebook_runs_with_its_gpu(machine: Machine) -> None:
    """`jupyter execute` runs a notebook that reserves a GPU, and keeps what the cell printed."""
    done, trace = execute(machine, "%load_ext reserve_gpu", "%reserve_gpu 1")
    assert (done.returncode, trace) == (0, "1"), done.stderr
    saved = json.loads((machine.folder / "notebook.ipynb").read_text())
    printed = "".join(saved["cells"][1]["outputs"][0]["text"])
    assert printed.startswith("Reserving GPU1: 0000:02:00.0 16x GeForce")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["%reserve_gpu"], "No free GPU devices"),
        (["%reserve_gpu nonsense"], "nonsense"),
        ([START_CUDA, "%reserve_gpu"], "Too late"),
        (["import reserve_gpu; reserve_gpu.reserve()"], "No free GPU devices"),
    ],
)
def test_notebook_stops_where_reserving_fails(
    machine: Machine, cells: list[str], said: str
) -> None:
    """A notebook that gets no GPU stops there: no later cell runs, and the reason is shown."""
    machine.use("busy")
    done, trace = execute(machine, "%load_ext reserve_gpu", *cells)
    assert done.returncode != 0
    assert trace == ""
    assert said in done.stdout + done.stderr
