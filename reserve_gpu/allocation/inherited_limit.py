"""The inherited limit: which devices this process may use at all, and which ones a name means.

A `CUDA_VISIBLE_DEVICES` that was set before (by Slurm, Ray, a shell) is a limit: only what is
inside of it is reserved. So is a control group, but the driver itself shows only what is inside.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reserve_gpu.gpus import cuda_environment, memory_caps, names
from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import Failure, ImpossibleError, RequestError
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import notices as notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reserve_gpu.gpus.nvml import Nvml
    from reserve_gpu.locks.directory import LockDirectory
    from reserve_gpu.model.requests import Request, Variables


def candidates(gpus: Nvml, request: Request, inherited: Variables) -> Iterator[Device | Fault]:
    """Return the devices to try for the request: those that it names, or all, screens last.

    Each GPU is touched only when it is reached: that can take seconds.
    inherited: the CUDA variables as they were before this process reserved anything.
    Raises RequestError for a name that means no device here, and Failure if the limit leaves none.
    """
    if request.devices:
        return iter(_named(gpus, request, inherited))
    return gpus.screens_last(inside(gpus, inherited))


def require_absolute(typed: Sequence[str], inherited: Variables) -> None:
    """Raise RequestError for a `cuda:0` where it is no number of nvidia-smi's.

    CUDA counts within CUDA_VISIBLE_DEVICES. Where somebody else has set that, who says `cuda:0` may
    mean the first GPU of that list or of the machine.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars
    """
    value = inherited[cuda_environment.VISIBLE]
    for name in typed:
        number = names.gpu_index(name) if name.lower().startswith("cuda:") else None
        if value is not None and number is not None:
            listed = names.entries(value)
            there = f"{listed[number]} of that list" if number < len(listed) else "no GPU at all"
            raise RequestError(
                f"{sanitize(name)} is CUDA's number, which counts within CUDA_VISIBLE_DEVICES="
                f"{sanitize(value)!r}, which was set elsewhere: it would be {sanitize(there)}. "
                "Name the GPU as nvidia-smi does."
            )


def adopt_parents_gpus(parent: int, gpus: Nvml, locks: LockDirectory) -> None:
    """Set the variables that a child of multiprocessing did not get from the process it works for.

    A fork server, the default from Python 3.14 on, hands on the environment that it was started
    with: by then nothing may have been reserved. parent: that process.
    """
    before = cuda_environment.before_hiding(cuda_environment.read())
    if before[cuda_environment.VISIBLE] is not None:
        return
    devices: list[Device] = []
    visible: str | None = None
    memory_limit_mib: float | None = None
    for device in gpus.walk():
        if isinstance(device, Device):
            holders = locks.listed_holders_of(device.uuid)
            if own := next((h for h in holders if h.listed_pid == parent), None):
                devices.append(device)
                visible = own.record.visible if own.record_owner == os.geteuid() else None
                memory_limit_mib = own.memory_limit_mib
    if not devices:
        return
    ordered = cuda_environment.in_visible_order(devices, visible or "")
    values = cuda_environment.variables(ordered, memory_limit_mib) | {cuda_environment.HIDDEN: None}
    if memory_limit_mib is not None:
        values |= memory_caps.marked(ordered, memory_limit_mib, before)
    cuda_environment.write(values)


def inside(gpus: Nvml, inherited: Variables) -> Iterator[Device | Fault]:
    """Return the devices that this process may use, in PCI bus order, each touched when reached.

    Raises RequestError where only CUDA knows which devices are meant.
    """
    value = inherited[cuda_environment.VISIBLE]
    if value is None:
        return gpus.walk()
    listed = names.entries(value)
    numbers = [entry for entry in listed if isinstance(entry, int)]
    in_bus_order = inherited[cuda_environment.ORDER] == "PCI_BUS_ID"
    if in_bus_order and len(numbers) == len(listed):
        indices = names.numbers_within(numbers, gpus.count())
        return (d for index in indices for d in gpus.devices(index))
    everything = list(gpus.walk())
    if numbers and not in_bus_order:
        _require_one_model(value, inherited[cuda_environment.ORDER], everything)
    return iter(names.visible(listed, everything))


def _named(gpus: Nvml, request: Request, inherited: Variables) -> list[Device | Fault]:
    """Return the device that each name means, in their order. Raises RequestError, Failure."""
    devices = [_meant(gpus, name) for name in request.devices]
    names.require_distinct(devices)
    names.require_one_kind(devices)
    value = inherited[cuda_environment.VISIBLE]
    allowed = devices if value is None else list(inside(gpus, inherited))
    if value is not None and not allowed:
        raise Failure(notice.HidesAll(request, value, gpus.count()))
    for device in devices:
        if device not in allowed:
            left = ", ".join(other.label for other in allowed)
            raise RequestError(
                f"{device.label} is outside of CUDA_VISIBLE_DEVICES={sanitize(value or '')!r}, "
                f"which was set elsewhere and limits this process to {left}."
            )
    return devices


def _meant(gpus: Nvml, name: str) -> Device | Fault:
    """Return the device of that name. Raises RequestError."""
    index = names.gpu_index(name)
    if index is None:
        return names.pick(name, list(gpus.walk()))
    count = gpus.count()
    if index >= count:
        there = "only GPU0" if count == 1 else f"GPU0 to GPU{count - 1}"
        raise ImpossibleError(f"There is no GPU{index}: this machine has {there}.")
    return names.pick(name, gpus.devices(index))


def _require_one_model(value: str, order: str | None, everything: Sequence[Device | Fault]) -> None:
    """Raise RequestError where numbers in CUDA's order may mean other GPUs than NVML's.

    Its default order is fastest first. Among GPUs of one model that is the PCI bus order.
    """
    devices = [device for device in everything if isinstance(device, Device)]
    models = {names.model(device) for device in devices}
    sizes = {device.memory_mib for device in devices if device.instance is None}
    if len(models) > 1 or len(sizes) > 1:
        how = (
            f"with CUDA_DEVICE_ORDER={sanitize(order)!r}" if order else "without CUDA_DEVICE_ORDER"
        )
        # Who has chosen an order means its numbers.
        remedy = "Set" if order else "Set CUDA_DEVICE_ORDER=PCI_BUS_ID beside it, or"
        raise RequestError(
            f"CUDA_VISIBLE_DEVICES={sanitize(value)!r} was set elsewhere, {how}, and the GPUs here "
            "are of different models, so its numbers may mean others than nvidia-smi's. "
            f"{remedy} UUIDs for numbers (nvidia-smi -L)."
        )
