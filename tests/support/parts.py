"""Parts of GPUs: other processes' parts, own requests for parts, and waiters for parts."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.devices import State
from reserve_gpu.model.holders import Record
from tests.support.locked import locked
from tests.support.reserving import got

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reserve_gpu.model.holders import DeviceStatus
    from tests.support.here import Here
TOTAL = 10_000  # MiB of each GPU, unless a test says otherwise
ONE = f"gpu\n  memory {TOTAL}\n"


@contextmanager
def promised(here: Here, **parts: list[object]) -> Iterator[None]:
    """Let others hold parts of these sizes: of GPU 0 in `gpu0`, of GPU 0:1 in `gpu0_1`."""
    with ExitStack() as stack:
        for gpu, sizes in parts.items():
            number = gpu.removeprefix("gpu").replace("_", ":")
            for size in sizes:
                stack.enter_context(here.rival(number, part_mib=size))
        yield


def part(mib: float, *devices: Any, **wishes: Any) -> str:
    """Reserve a part; return CUDA_VISIBLE_DEVICES."""
    return got(*devices, memory=f"{mib}MiB", **wishes)


def rows(mib: float, *devices: Any, **wishes: Any) -> list[DeviceStatus]:
    """Fail to reserve a part; return the state of each device in the refusal."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        part(mib, *devices, **wishes)
    return list(caught.value.rows)


def room(mib: float, *devices: Any, **wishes: Any) -> float | None:
    """Fail to reserve a part because the only device is full; return its available memory."""
    (row,) = rows(mib, *devices, **wishes)
    assert row.state is State.FULL
    return row.promisable_mib


def records(here: Here) -> list[object]:
    """Return the sizes in the lock files of all holders of parts."""
    names = sorted(name for name in locked(here.locks) if ".share-" in name)
    return [json.loads((here.locks / name).read_bytes()).get("part_mib") for name in names]


@contextmanager
def waiting(here: Here, part_mib: float | None) -> Iterator[None]:
    """Let another user wait for a part of GPU 0, or for the whole GPU if the size is None."""
    record = Record.from_dict({"user": "carol", "part_mib": part_mib, "needs": 1})
    with (
        LockDirectory(str(here.locks)) as directory,
        QueueEntry(directory, [here.uuid("0")], record) as entry,
    ):
        with directory.mutex():
            entry.join()
        yield


# Code for a child, which defines a function that allocates memory on the child's first device, in a
# CUDA context of 300 MiB.
CUDA = """
import ctypes
cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()
def use(mib):
    '''Allocate this many MiB more.'''
    cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    address = ctypes.c_uint64()
    return cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib << 20)) or address.value
"""
