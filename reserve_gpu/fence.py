"""The devices that somebody outside has limited this process to, and the devices that a name means.

A `CUDA_VISIBLE_DEVICES` that was there before (Slurm, Ray, a shell) is a fence: what is reserved is
inside of it. A control group is one too, but the driver itself shows only what is inside of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu import cuda, names
from reserve_gpu.device import Device, Fault
from reserve_gpu.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reserve_gpu.nvml import Nvml


def inside(nvml: Nvml, outside: Mapping[str, str | None]) -> Iterator[Device | Fault]:
    """The devices that this process may use, in PCI bus order, each touched when it is reached.

    outside: the CUDA variables as they were before this process reserved anything.
    Raises RequestError where only CUDA could say which devices are meant, and it can't be asked.
    """
    value = outside[cuda.VISIBLE]
    if value is None:
        return nvml.walk()
    listed = names.entries(value)
    numbers = [entry for entry in listed if isinstance(entry, int)]
    in_bus_order = outside[cuda.ORDER] == "PCI_BUS_ID"
    if in_bus_order and len(numbers) == len(listed):
        indices = names.numbers_within(numbers, nvml.count())
        return (found for index in indices for found in nvml.devices(index))
    everything = list(nvml.walk())
    numbering = list(range(nvml.count()))
    if numbers and not in_bus_order:
        numbering = _numbering(value, everything)
    return iter(names.visible(listed, everything, numbering))


def named(
    nvml: Nvml, wanted: tuple[str, ...], outside: Mapping[str, str | None]
) -> list[Device | Fault]:
    """The device that each name means, in their order. Raises RequestError for one that means none."""
    found = [_named(nvml, name) for name in wanted]
    names.require_distinct(found)
    value = outside[cuda.VISIBLE]
    if value is not None:
        allowed = list(inside(nvml, outside))
        for one in found:
            if one not in allowed:
                left = ", ".join(other.label for other in allowed) or "no GPU"
                raise RequestError(
                    f"{one.label} is outside of CUDA_VISIBLE_DEVICES={names.shown(value)!r}, which was set before "
                    f"and limits this process to {left}."
                )
    return found


def _named(nvml: Nvml, name: str) -> Device | Fault:
    index = names.gpu_index(name)
    if index is None:
        return names.pick(name, list(nvml.walk()))
    count = nvml.count()
    if index >= count:
        there = "GPU0" if count == 1 else f"GPU0 to GPU{count - 1}"
        raise RequestError(f"There is no GPU{index}: this machine has {there}.")
    return names.pick(name, nvml.devices(index))


def _numbering(value: str, everything: Sequence[Device | Fault]) -> list[int]:
    """The index of the GPU that CUDA gives each number to, where nobody set CUDA_DEVICE_ORDER.

    CUDA's default order is fastest first. Among GPUs of one model that is the PCI bus order.
    """
    devices = [one for one in everything if isinstance(one, Device)]
    if len({(device.name, device.memory_mib) for device in devices if device.instance is None}) <= 1:
        return list(range(1 + max((d.index for d in devices), default=-1)))
    try:
        order = cuda.device_uuids()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"CUDA_VISIBLE_DEVICES={names.shown(value)!r} was set before, without CUDA_DEVICE_ORDER. The GPUs here are of "
            f"different models, so only CUDA knows which it means, and CUDA can't be asked ({error}). Set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID beside it, or UUIDs instead of numbers."
        ) from error
    index = {device.uuid: device.index for device in devices}
    return [index.get(uuid, -1) for uuid in order]
