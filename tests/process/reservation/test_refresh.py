"""A reservation is of a device, whatever number the driver gives it, and ends with the device."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import Device
from tests.support.locked import held
from tests.support.reserving import got, of_gpu, refused
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from tests.support.here import Here

A = "gpu\n  name RTX A6000\n  bus 0000:01:00.0\n  uuid GPU-aaaaaaaa-1\n"
B = "gpu\n  name RTX A6000\n  bus 0000:02:00.0\n  uuid GPU-bbbbbbbb-1\n"
NEW = "gpu\n  name RTX 4090\n  bus 0000:00:10.0\n  uuid GPU-eeeeeeee-1\n"
LOST = "fail nvmlDeviceGetHandleByIndex_v2 {} 15\n"
# Starts CUDA; returns the first digits of the UUID of the only device that it sees.
CUDA_DEVICE = """
import ctypes
cuda = ctypes.CDLL('libcuda.so.1')
assert cuda.cuInit(0) == 0
class Uuid(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_ubyte * 16)]
uuid, device = Uuid(), ctypes.c_int()
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDeviceGetUuid(ctypes.byref(uuid), device)
bytes(uuid.bytes).hex()[:8]
"""
CONTEXT = "context = ctypes.c_void_p(); cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)"


# -- the decision ----------------------------------------------------------------------------------

GPU0, GPU1 = Device(0, "GPU-aaaa"), Device(1, "GPU-bbbb")


def test_a_number_that_another_variable_names(here: Here) -> None:
    """A GPU is refused while CUDA in another process would start on it by an old number."""
    here.write(A + B)
    with here.child() as child:
        child.reserve("1")
        here.write(NEW + A + B)
        text = refused("1")
        assert text.startswith("GPU1 is reserved.")
        assert f"(pid {child.pid}) reserved another GPU that used to have this number" in text
        assert of_gpu(str(reserve_gpu.status()), "1").startswith("reserved")
        assert got(name="4090") == "0"
        assert child.run(CUDA_DEVICE).value == "aaaaaaaa"  # which nobody else has
        reserve_gpu.release()
    assert got("1") == "1"


def test_a_number_that_its_holder_corrects(here: Here) -> None:
    """A GPU is available once the holder of the other GPU has looked up its number again."""
    here.write(A + B)
    with here.child() as child:
        child.reserve("1")
        here.write(NEW + A + B)
        refused("1")
        assert child.reserve().value == "2"
        assert got("1") == "1"
        assert child.run(CUDA_DEVICE).value == "bbbbbbbb"


def test_the_numbers_change_during_a_wait(here: Here) -> None:
    """A waiter gets the GPU for which it waits, by the number that this GPU has in the end."""
    here.write(A + B)
    with here.child() as child:
        got("1")
        waiter = Waiter(here, child, "'1'")
        here.write(NEW + A + B)
        reserve_gpu.release()
        assert waiter.answer().value == "2"
        assert child.run(CUDA_DEVICE).value == "bbbbbbbb"


def test_a_number_that_its_holder_does_not_need(here: Here) -> None:
    """A holder that already computes on its own GPU does not block the one with its old number."""
    contexts = here.folder / "contexts"
    contexts.mkdir()
    here.write(f"contexts {contexts}\n" + A + B)
    with here.child() as child:
        child.reserve("1")
        assert child.run(CUDA_DEVICE).value == "bbbbbbbb"
        assert child.run(CONTEXT).error is None
        here.write(f"contexts {contexts}\n" + NEW + A + B)
        assert got("1") == "1"


@pytest.mark.parametrize("other", [{"mounts": 1}, {"job": "4711"}, {"label": "GPU1:0"}])
def test_a_number_of_another_numbering(here: Here, other: dict[str, object]) -> None:
    """A holder whose numbering is independent, as in a container or a job, blocks no GPU."""
    here.write(A + B)
    with here.child() as child:
        child.reserve("1")
        here.write(NEW + A + B)
        path = here.locks / f"GPU-bbbbbbbb-1.record-{os.geteuid()}-0"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **other}))
        assert got("1") == "1"


def test_one_of_two_is_lost_to_a_joined_process(here: Here) -> None:
    """A process that joined the reservation keeps the GPUs that still work as well."""
    here.write(A + B)
    with here.kernel(JPY_SESSION_NAME="train.ipynb") as host, here.kernel() as joined:
        host.run("%reserve_gpu 0,1")
        joined.run("%reserve_gpu --join")
        here.write(LOST.format(0) + A + B)
        assert "GPU0 is lost" in joined.run("1").all
        assert "CUDA_VISIBLE_DEVICES = '1'" in joined.run("%reserve_gpu").stdout
        assert "CUDA_VISIBLE_DEVICES = '1'" in host.run("%reserve_gpu").stdout


@pytest.mark.ipython
def test_a_restart_drops_a_lost_gpu(here: Here) -> None:
    """A kernel that runs CUDA on a lost GPU is told to restart, which gets it another GPU."""
    here.write(A + B)
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 0")
        kernel.run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        here.write(LOST.format(0) + A + B)
        told = kernel.run("%reserve_gpu").all
        assert "To reserve another GPU, restart the kernel and run:\n%reserve_gpu" in told
        kernel.restart()
        kernel.load()
        cell = kernel.run("%reserve_gpu")
        assert "Reserving GPU1" in cell.stdout
        assert "GPU0 is lost" in cell.all
        kernel.restart()
        kernel.load()
        assert "Reserving GPU1" in kernel.run("%reserve_gpu").stdout


@pytest.mark.ipython
def test_own_processes_from_before_a_restart(here: Here) -> None:
    """A process that outlives the restart is the user's own, and the line says how to end it."""
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 0")
        code = "import subprocess as s; print(s.Popen(['sleep', '99'], start_new_session=True).pid)"
        pid = int(kernel.run(code).stdout)
        try:
            here.write(f"gpu\n  compute {pid} 3000 until-dead\ngpu")
            kernel.restart()
            kernel.load()
            told = kernel.run("%reserve_gpu").all
        finally:
            os.kill(pid, 9)
        assert "GPU0 is still in use by your own process from before the restart: " in told
        assert f"To free the memory, end it:\n!kill {pid}\n" in f"{told}\n"
        assert "other processes are using it" not in told


# -- from elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "word"),
    [
        (LOST.format(1), "train.ipynb"),
        (LOST.format(1), "1"),
        ("fail nvmlInitWithFlags * 18\n", "GPU1"),
        ("fail nvmlInitWithFlags * 18\n", "train"),
    ],
)
def test_release_in_spite_of_the_driver(here: Here, trouble: str, word: str) -> None:
    """A notebook releases a lost GPU, or one of a driver that does not start, on request."""
    here.write(A + B)
    with here.kernel(JPY_SESSION_NAME="train.ipynb") as kernel:
        kernel.run("%reserve_gpu 1")
        here.write(trouble + A + B)
        done = here.command(sys.executable, "-m", "reserve_gpu", "release", word)
        assert done.stdout == f"Released GPU1 of train.ipynb (pid {kernel.pid}).\n"
        assert done.returncode == 0
        here.write(A + B)
        assert held(here) == []


def test_a_number_means_the_gpu_that_has_it(here: Here) -> None:
    """`release 0` releases GPU0 as it is now, and nothing that was GPU0, or was typed with a 0."""
    here.write(A + B)
    with here.kernel(JPY_SESSION_NAME="x.ipynb") as kernel:
        kernel.run("%reserve_gpu 0")
        here.write(NEW + A + B)
        done = here.command(sys.executable, "-m", "reserve_gpu", "release", "0")
        assert done.returncode == 2
        assert "You don't hold '0'." in done.stderr
        done = here.command(sys.executable, "-m", "reserve_gpu", "release", "1")
        assert done.stdout.startswith("Released GPU1 of x.ipynb")
