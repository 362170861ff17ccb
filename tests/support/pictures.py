"""Helpers of tests: pictures."""

from __future__ import annotations

from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus
from tests.support.holders import a_holder

NOW = 1_795_000_000.0


def device(index: int, name: str = "NVIDIA A100-SXM4-80GB") -> Device:
    return Device(index, f"GPU-{index}", name, memory_mib=81920)


def usage(used_mib: float) -> Usage:
    return Usage(compute=0, mps=0, total_mib=81920, used_mib=used_mib)


def free(index: int, name: str = "NVIDIA A100-SXM4-80GB") -> DeviceStatus:
    return DeviceStatus(
        device(index, name), State.FREE, usage(0), 0, temperature_c=30 + index, power_w=55.0
    )


def held(
    index: int, user: str, notebook: str = "train.ipynb", note: str | None = None
) -> DeviceStatus:
    since = NOW - 3600.0 * index
    holder = a_holder(4000 + index, user, notebook, since=since, note=note, seen=True)
    row = DeviceStatus(device(index), State.RESERVED, usage(41000), 97, holders=(holder,))
    return row._replace(temperature_c=60 + index, power_w=240.0)
