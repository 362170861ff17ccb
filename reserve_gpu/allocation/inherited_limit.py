"""Find the devices that this process may use, and look up devices by name.

The inherited limit is the value of `CUDA_VISIBLE_DEVICES` that another program, such as Slurm, Ray
or a shell, has set. Only devices listed in this value can be reserved. A control group can also
limit the devices, but in that case the driver shows only the allowed ones.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING

from reserve_gpu.gpus import cuda_environment, memory_caps, names
from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import Failure, ImpossibleError, RequestError
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import notices as notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reserve_gpu.gpus.nvml import Nvml
    from reserve_gpu.locks.directory import LockDirectory
    from reserve_gpu.model.requests import Request, Variables


def candidates(
    gpus: Nvml,
    request: Request,
    inherited: Variables,
    is_wanted: Callable[[Sequence[Device | Fault]], bool] | None = None,
) -> Iterator[Sequence[Device | Fault]]:
    """Return the devices that the request names, or else all devices within the inherited limit.

    The devices are returned as an iterator over batches.

    Args:
        gpus: The NVML session.
        request: The request.
        inherited: The CUDA variables as they were before this process reserved anything.
        is_wanted: A function that limits the batches of devices as in `Nvml.batches`, if the
            request names no devices.

    Raises:
        RequestError: A name does not match a device that this process may use.
        Failure: The inherited limit leaves no device to use.
    """
    if request.devices:
        return iter([_named(gpus, request, inherited)])
    return _batches_within_limit(gpus, inherited, is_wanted)


def require_absolute(typed: Sequence[str], inherited: Variables) -> None:
    """Raise RequestError if a name such as `cuda:0` is ambiguous.

    CUDA numbers only the devices in CUDA_VISIBLE_DEVICES. If another program has set this variable,
    `cuda:0` can mean either the first GPU in its value or the machine's first GPU. See
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars.

    Args:
        typed: The names as the user typed them.
        inherited: The CUDA variables as they were before this process reserved anything.
    """
    value = inherited[cuda_environment.VISIBLE]
    for name in typed:
        number = names.gpu_index(name) if name.lower().startswith("cuda:") else None
        if value is not None and number is not None:
            listed = names.entries(value)
            entry = f"the entry '{listed[number]}'" if number < len(listed) else "no entry"
            raise RequestError(
                f"{sanitize(name)} is an index into CUDA_VISIBLE_DEVICES={sanitize(value)!r}, "
                f"which was set elsewhere, so it refers to {sanitize(entry)}. Name the GPU as "
                "nvidia-smi does."
            )


def adopt_parents_gpus(parent: int, gpus: Nvml, locks: LockDirectory) -> None:
    """Set the CUDA variables in a multiprocessing child that did not inherit them from its parent.

    With a fork server, the default start method since Python 3.14, child processes inherit the fork
    server's environment. The parent might have reserved its devices after starting the fork server.

    Args:
        parent: The PID of the process that the child is working for.
        gpus: The NVML session.
        locks: The lock directory.
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
            if holder := next((h for h in holders if h.listed_pid == parent), None):
                devices.append(device)
                visible = holder.record.visible if holder.record_owner == os.geteuid() else None
                memory_limit_mib = holder.memory_limit_mib
    if not devices:
        return
    ordered = cuda_environment.in_visible_order(devices, visible or "")
    values = cuda_environment.variables(ordered, memory_limit_mib) | {cuda_environment.HIDDEN: None}
    if memory_limit_mib is not None:
        values |= memory_caps.marked_variables(ordered, memory_limit_mib, before)
    cuda_environment.write(values)


def devices_within_limit(gpus: Nvml, inherited: Variables) -> Iterator[Device | Fault]:
    """Return the devices that this process may use, in PCI bus order.

    Args:
        gpus: The NVML session.
        inherited: The CUDA variables as they were before this process reserved anything.

    Raises:
        RequestError: The numbers in CUDA_VISIBLE_DEVICES are ambiguous.
    """
    return chain.from_iterable(_batches_within_limit(gpus, inherited))


def _batches_within_limit(
    gpus: Nvml,
    inherited: Variables,
    is_wanted: Callable[[Sequence[Device | Fault]], bool] | None = None,
) -> Iterator[Sequence[Device | Fault]]:
    value = inherited[cuda_environment.VISIBLE]
    if value is None:
        return gpus.batches(range(gpus.count()), is_wanted)
    listed = names.entries(value)
    numbers = [entry for entry in listed if isinstance(entry, int)]
    in_bus_order = inherited[cuda_environment.ORDER] == "PCI_BUS_ID"
    if in_bus_order and len(numbers) == len(listed):
        indices = names.numbers_within(numbers, gpus.count())
        return gpus.batches(indices, is_wanted)
    everything = list(gpus.walk())
    if numbers and not in_bus_order:
        _require_one_model(value, inherited[cuda_environment.ORDER], everything)
    return iter([names.visible(listed, everything)])


def _named(gpus: Nvml, request: Request, inherited: Variables) -> list[Device | Fault]:
    """Return the devices that the request names, in the same order.

    Raises:
        RequestError: A name does not match a device that this process may use.
        Failure: The inherited limit leaves no device to use.
    """
    devices = [_find_device(gpus, name) for name in request.devices]
    names.require_distinct(devices)
    names.require_one_kind(devices)
    value = inherited[cuda_environment.VISIBLE]
    allowed = devices if value is None else list(devices_within_limit(gpus, inherited))
    if value is not None and not allowed:
        raise Failure(notice.HidesAll(request, value, gpus.count()))
    for device in devices:
        if device not in allowed:
            labels = ", ".join(each.label for each in allowed)
            raise RequestError(
                f"{device.label} is not in CUDA_VISIBLE_DEVICES={sanitize(value or '')!r}, which "
                f"was set elsewhere and limits this process to {labels}."
            )
    return devices


def _find_device(gpus: Nvml, name: str) -> Device | Fault:
    """Return the device with this name.

    Raises:
        RequestError: The name does not match exactly one device.
    """
    index = names.gpu_index(name)
    if index is None:
        return names.pick(name, list(gpus.walk()))
    count = gpus.count()
    if index >= count:
        labels = "only GPU0" if count == 1 else f"GPU0 to GPU{count - 1}"
        raise ImpossibleError(f"There is no GPU{index}: this machine has {labels}.")
    return names.pick(name, gpus.devices(index))


def _require_one_model(value: str, order: str | None, everything: Sequence[Device | Fault]) -> None:
    """Raise RequestError if the machine's GPUs are of different models.

    CUDA puts the fastest GPU first by default, so CUDA's numbers might differ from NVML's. GPUs of
    the same model are numbered in PCI bus order.
    """
    devices = [device for device in everything if isinstance(device, Device)]
    models = {names.model(device) for device in devices}
    sizes = {device.memory_mib for device in devices if device.instance is None}
    if len(models) > 1 or len(sizes) > 1:
        how = (
            f"with CUDA_DEVICE_ORDER={sanitize(order)!r}" if order else "without CUDA_DEVICE_ORDER"
        )
        # If the user has set CUDA_DEVICE_ORDER, changing it would change what the numbers mean.
        remedy = "Use" if order else "Also set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use"
        raise RequestError(
            f"CUDA_VISIBLE_DEVICES={sanitize(value)!r} was set elsewhere, {how}. This machine's "
            "GPUs are of different models, so these numbers may differ from nvidia-smi's. "
            f"{remedy} UUIDs instead of numbers (nvidia-smi -L)."
        )
