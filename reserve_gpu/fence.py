"""The devices that somebody outside has limited this process to, and the devices that a name means.

A `CUDA_VISIBLE_DEVICES` that was there before (Slurm, Ray, a shell) is a fence: what is reserved is
inside of it. A control group is one too, but the driver itself shows only what is inside of that.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from reserve_gpu import cuda, names
from reserve_gpu.device import Device, Fault
from reserve_gpu.errors import ImpossibleError, RequestError
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reserve_gpu.device import Request
    from reserve_gpu.nvml import Nvml

CHILD_LIMIT_S = 60


def candidates(
    nvml: Nvml, wanted: Request, outside: Mapping[str, str | None]
) -> Iterator[Device | Fault]:
    """The devices to try for the request: those that it names, or all but the excluded.

    outside: the CUDA variables as they were before this process reserved anything.
    Raises RequestError for a name that means no device here.
    """
    if wanted.devices:
        return iter(_named(nvml, wanted, outside))
    whole = {index for name in wanted.exclude if (index := names.whole_index(name)) is not None}
    for name in wanted.exclude:
        _check_name(nvml, name)
    found = inside(nvml, outside, frozenset(whole))
    return (one for one in found if not names.is_one_of(one, wanted.exclude))


def inside(
    nvml: Nvml, outside: Mapping[str, str | None], skipped: frozenset[int] = frozenset()
) -> Iterator[Device | Fault]:
    """The devices that this process may use, in PCI bus order, each touched when it is reached.

    skipped: the indices of GPUs that need not be touched.
    Raises RequestError where only CUDA could say which devices are meant, and it can't be asked.
    """
    value = outside[cuda.VISIBLE]
    if value is None:
        return nvml.walk(skipped)
    listed = names.entries(value)
    numbers = [entry for entry in listed if isinstance(entry, int)]
    in_bus_order = outside[cuda.ORDER] == "PCI_BUS_ID"
    if in_bus_order and len(numbers) == len(listed):
        indices = names.numbers_within(numbers, nvml.count())
        return (one for index in indices if index not in skipped for one in nvml.devices(index))
    everything = list(nvml.walk())
    numbering = list(range(nvml.count()))
    if numbers and not in_bus_order:
        numbering = _numbering(value, everything, nvml.count())
    visible = names.visible(listed, everything, numbering)
    return (one for one in visible if one.index not in skipped)


def _named(nvml: Nvml, wanted: Request, outside: Mapping[str, str | None]) -> list[Device | Fault]:
    """The device that each name means, in their order, if this process may use all of them."""
    found = [_meant(nvml, name) for name in wanted.devices]
    names.require_distinct(found)
    names.require_one_kind(found)
    value = outside[cuda.VISIBLE]
    allowed = found if value is None else list(inside(nvml, outside))
    for one in found:
        if names.is_one_of(one, wanted.exclude):
            raise RequestError(f"{one.label} is both named and excluded.")
        if one not in allowed:
            left = ", ".join(other.label for other in allowed) or "no GPU"
            raise RequestError(
                f"{one.label} is outside of CUDA_VISIBLE_DEVICES={shown(value or '')!r}, "
                f"which was set before and limits this process to {left}."
            )
    return found


def _meant(nvml: Nvml, name: str) -> Device | Fault:
    index = names.gpu_index(name)
    if index is None:
        return names.pick(name, list(nvml.walk()))
    _check_index(nvml, index)
    return names.pick(name, nvml.devices(index))


def _check_name(nvml: Nvml, name: str) -> None:
    """Raise RequestError if the name means no device; a whole GPU's index touches none for that."""
    index = names.whole_index(name)
    if index is None:
        _meant(nvml, name)
    else:
        _check_index(nvml, index)


def _check_index(nvml: Nvml, index: int) -> None:
    count = nvml.count()
    if index >= count:
        there = "only GPU0" if count == 1 else f"GPU0 to GPU{count - 1}"
        raise ImpossibleError(f"There is no GPU{index}: this machine has {there}.")


def _numbering(value: str, everything: Sequence[Device | Fault], count: int) -> list[int]:
    """The index of the GPU that CUDA gives each number to, where nobody set CUDA_DEVICE_ORDER.

    CUDA's default order is fastest first. Among GPUs of one model that is the PCI bus order.
    """
    devices = [one for one in everything if isinstance(one, Device)]
    models = {names.model(device) for device in devices}
    sizes = {device.memory_mib for device in devices if device.instance is None}
    if len(models) <= 1 and len(sizes) <= 1:
        return list(range(count))
    if any(device.instance is not None for device in devices):
        why = "beside MIG instances it shows no whole GPUs"
    else:
        try:
            index = {device.uuid: device.index for device in devices}
            return [index.get(uuid, -1) for uuid in _device_uuids()]
        except OSError as error:
            why = str(error)
    raise RequestError(
        f"CUDA_VISIBLE_DEVICES={shown(value)!r} was set before, without CUDA_DEVICE_ORDER. "
        "The GPUs here are of different models, so only CUDA knows which it means, and CUDA can't "
        f"be asked ({why}). Set CUDA_DEVICE_ORDER=PCI_BUS_ID beside it, or UUIDs for numbers."
    )


def _device_uuids() -> list[str]:
    """The UUIDs of all GPUs in the order in which CUDA numbers them by default.

    Asked in a child process, as asking starts CUDA. Raises OSError if it can't be.
    """
    import subprocess

    unset = cuda.VISIBLE, cuda.ORDER
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD],
            env=environ, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no answer within {CHILD_LIMIT_S} s") from error
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout.split()


_CHILD = """
import ctypes, sys, uuid
cuda = ctypes.CDLL("libcuda.so.1")
def ask(function, *arguments):
    code = function(*arguments)
    if code:
        sys.exit(f"CUDA error {code} of {function.__name__}")
ask(cuda.cuInit, 0)
count, device, data = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
ask(cuda.cuDeviceGetCount, ctypes.byref(count))
for number in range(count.value):
    ask(cuda.cuDeviceGet, ctypes.byref(device), number)
    ask(cuda.cuDeviceGetUuid, ctypes.byref(data), device)
    print(f"GPU-{uuid.UUID(bytes=bytes(data))}")
"""
