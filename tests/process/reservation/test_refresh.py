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
