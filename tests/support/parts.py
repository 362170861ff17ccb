"""Helpers of tests: parts."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State
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
    """Let others have parts: of GPU 0 those in `gpu0`, of an instance in `gpu0_1`."""
    with ExitStack() as stack:
        for gpu, sizes in parts.items():
            number = gpu.removeprefix("gpu").replace("_", ":")
            for size in sizes:
                stack.enter_context(here.rival(number, part_mib=size))
        yield


def part(mib: float, *devices: Any, **wishes: Any) -> str:
    """Reserve a part; the CUDA_VISIBLE_DEVICES that came of it."""
    return got(*devices, memory=f"{mib}MiB", **wishes)


def rows(mib: float, *devices: Any, **wishes: Any) -> list[DeviceStatus]:
    """Fail to reserve a part; why, of each device."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        part(mib, *devices, **wishes)
    return list(caught.value.rows)


def room(mib: float, *devices: Any, **wishes: Any) -> float | None:
    """Fail to reserve a part of the only GPU that is asked for, as it is full; what is left."""
    (row,) = rows(mib, *devices, **wishes)
    assert row.state is State.FULL
    return row.promisable_mib


def records(here: Here) -> list[object]:
    """Return the size in each lock file of a sharer that is locked, as others read it."""
    names = sorted(name for name in locked(here.locks) if ".share-" in name)
    return [json.loads((here.locks / name).read_bytes()).get("part_mib") for name in names]
