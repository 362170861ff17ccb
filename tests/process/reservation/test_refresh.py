"""A reservation whose device gets another number, or is lost, among several processes."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.locked import held
from tests.support.reserving import got, of_gpu, refused
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from tests.support.here import Here

A = "gpu\n  name RTX A6000\n  bus 0000:01:00.0\n  uuid GPU-aaaaaaaa-1\n"
B = "gpu\n  name RTX A6000\n  bus 0000:02:00.0\n  uuid GPU-bbbbbbbb-1\n"
NEW = "gpu\n  name RTX 4090\n  bus 0000:00:10.0\n  uuid GPU-eeeeeeee-1\n"
LOST = "fail nvmlDeviceGetHandleByIndex_v2 {} 15\n"
# Code for a child, which starts CUDA and returns the first digits of the UUID of its only device.
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


def test_a_gpu_is_refused_while_another_process_would_use_its_old_number(here: Here) -> None:
    """CUDA in the other process would start on this GPU."""
    here.write(A + B)
    with here.child() as child:
        child.reserve("1")
        here.write(NEW + A + B)
        text = refused("1")
        assert f"(pid {child.pid}) reserved another GPU" in text
        assert of_gpu(str(reserve_gpu.status()), "1").startswith("reserved")
        assert got(name="4090") == "0"
        assert child.run(CUDA_DEVICE).value == "aaaaaaaa"  # no other process has this GPU
        reserve_gpu.release()
    assert got("1") == "1"


def test_a_gpu_is_available_after_the_other_holder_has_its_new_number(here: Here) -> None:
    here.write(A + B)
    with here.child() as child:
        child.reserve("1")
        here.write(NEW + A + B)
        refused("1")
        assert child.reserve().value == "2"
        assert got("1") == "1"
        assert child.run(CUDA_DEVICE).value == "bbbbbbbb"


def test_a_waiter_gets_its_gpu_by_the_new_number(here: Here) -> None:
    here.write(A + B)
    with here.child() as child:
        got("1")
        waiter = Waiter(here, child, "'1'")
        here.write(NEW + A + B)
        reserve_gpu.release()
        assert waiter.answer().value == "2"
        assert child.run(CUDA_DEVICE).value == "bbbbbbbb"


def test_a_holder_that_runs_cuda_does_not_block_its_old_number(here: Here) -> None:
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
def test_a_holder_with_another_numbering_blocks_no_gpu(
    here: Here, other: dict[str, object]
) -> None:
    """The numbers in a container or a job are independent."""
    here.write(A + B)
    with here.child() as child:
        child.reserve("1")
        here.write(NEW + A + B)
        path = here.locks / f"GPU-bbbbbbbb-1.record-{os.geteuid()}-0"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **other}))
        assert got("1") == "1"


def test_a_joined_process_keeps_the_working_gpus(here: Here) -> None:
    here.write(A + B)
    with here.kernel(JPY_SESSION_NAME="train.ipynb") as host, here.kernel() as joined:
        host.run("%reserve_gpu 0,1")
        joined.run("%reserve_gpu --join")
        here.write(LOST.format(0) + A + B)
        assert "GPU0 is lost" in joined.run("1").all
        assert "CUDA_VISIBLE_DEVICES = '1'" in joined.run("%reserve_gpu").stdout
        assert "CUDA_VISIBLE_DEVICES = '1'" in host.run("%reserve_gpu").stdout


@pytest.mark.ipython
def test_a_restarted_kernel_gets_another_gpu_for_a_lost_one(here: Here) -> None:
    """A kernel that runs CUDA on the lost GPU is told to restart."""
    here.write(A + B)
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 0")
        kernel.run("import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)")
        here.write(LOST.format(0) + A + B)
        told = kernel.run("%reserve_gpu").all
        assert "restart the kernel" in told
        kernel.restart()
        kernel.load()
        cell = kernel.run("%reserve_gpu")
        assert "Reserving GPU1" in cell.stdout
        assert "GPU0 is lost" in cell.all
        kernel.restart()
        kernel.load()
        assert "Reserving GPU1" in kernel.run("%reserve_gpu").stdout


@pytest.mark.ipython
def test_a_process_from_before_a_restart_is_the_users_own(here: Here) -> None:
    """The message says how to end it."""
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
        assert "your own process from before the restart" in told
        assert f"\n!kill {pid}\n" in f"{told}\n"
        assert "other processes" not in told


# -- releases from another process -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "word"),
    [
        (LOST.format(1), "1"),
        ("fail nvmlInitWithFlags * 18\n", "train"),
    ],
)
def test_a_gpu_can_be_released_despite_driver_errors(here: Here, trouble: str, word: str) -> None:
    """The GPU may be lost, or the driver may not start."""
    here.write(A + B)
    with here.kernel(JPY_SESSION_NAME="train.ipynb") as kernel:
        kernel.run("%reserve_gpu 1")
        here.write(trouble + A + B)
        done = here.command(sys.executable, "-m", "reserve_gpu", "release", word)
        assert (done.returncode, f"(pid {kernel.pid})" in done.stdout) == (0, True)
        here.write(A + B)
        assert held(here) == []


def test_a_number_means_the_gpu_that_has_it_now(here: Here) -> None:
    """`release 0` does not release a GPU whose number was 0."""
    here.write(A + B)
    with here.kernel(JPY_SESSION_NAME="x.ipynb") as kernel:
        kernel.run("%reserve_gpu 0")
        here.write(NEW + A + B)
        done = here.command(sys.executable, "-m", "reserve_gpu", "release", "0")
        assert done.returncode == 2
        assert held(here) == [1]
        assert here.command(sys.executable, "-m", "reserve_gpu", "release", "1").returncode == 0
        assert held(here) == []
