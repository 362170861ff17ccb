"""Query the driver for how a reservation's processes use the reserved devices."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import GRAPHICS, Device
from reserve_gpu.model.errors import DriverError
from reserve_gpu.reservation import joining
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.system import executor, procfs

DRIVER_LIMIT_S = 5.0  # timeout in seconds for reading held devices; the first access can take 3 s
# Maximum time in seconds to wait for a cuInit call that might be in progress. cuInit reads the
# environment variables when it starts, and takes up to 3 s without persistence mode
# (https://docs.nvidia.com/deploy/driver-persistence/).
HIDDEN_S = 5.0
HIDDEN_POLL_S = 0.05  # seconds between checks for a cuInit call in progress


class DeviceActivity(NamedTuple):
    """A device's recent use by a reservation's processes.

    Attributes:
        is_used: Whether these processes used the device; None if unknown.
        percent: The percentage of time during which these processes ran CUDA kernels; None if
            unknown.
        mib: The device memory that these processes are using, in MiB; None if unknown.
        share: The device's share of its GPU's memory, from 0 to 1; None if unknown.
    """

    is_used: bool | None = None
    percent: float | None = None
    mib: float | None = None
    share: float | None = None


def read(
    devices: Sequence[Device], pids: Collection[int], since: Instant, limit_s: float
) -> dict[Device, DeviceActivity]:
    """Return each device's use by the given processes and their descendants.

    Args:
        devices: The devices to read.
        pids: The pids of the reservation's processes.
        since: The start of the period.
        limit_s: The timeout for each driver call, in seconds.

    Returns:
        Each device's use. If the driver can't be used, all fields are None.
    """
    with suppress(DriverError), Nvml(limit_s) as gpus:
        return {device: _of_device(gpus, device, pids, since) for device in devices}
    return {device: DeviceActivity() for device in devices}


def _of_device(gpus: Nvml, device: Device, pids: Collection[int], since: Instant) -> DeviceActivity:
    """Return a device's use, based on samples for each process if the driver provides them.

    If the samples of these processes can't be read or understood, their use is unknown. If the
    driver provides no samples, any use of the device counts. A CUDA context alone does not count as
    use, because a notebook that has started CUDA keeps its context even while it is idle.
    """
    try:
        usage, gauges = gpus.read_all(device)
    except DeviceError:
        return DeviceActivity()
    share = gpus.share(device)
    if not gpus.sees_all:  # the driver's pids might belong to another PID namespace
        return DeviceActivity(_is_above_zero(gauges.utilisation), share=share)
    is_listed = usage.compute is not None
    is_own = {process.pid: procfs.is_descendant(process.pid, pids) for process in usage.processes}
    own_processes = [process for process in usage.processes if is_own[process.pid]]
    sizes = [process.memory_mib for process in own_processes]
    mib = float(sum(size or 0 for size in sizes)) if is_listed and None not in sizes else None
    try:
        suspects = is_own if _is_above_zero(gauges.utilisation) else ()
        uses = gpus.recent_use(device, since, suspects)
    except DeviceError:
        return DeviceActivity(mib=mib, share=share)
    if uses is not None:
        percents = [
            percent
            for pid, percent in uses.items()
            if (is_own[pid] if pid in is_own else procfs.is_descendant(pid, pids))
        ]
        known = [percent for percent in percents if percent is not None]
        if len(known) < len(percents):
            return DeviceActivity(True if known else None, mib=mib, share=share)
        return DeviceActivity(bool(known), float(min(100, sum(known))), mib, share)
    is_used = False if is_listed and not own_processes else _is_above_zero(gauges.utilisation)
    return DeviceActivity(is_used, mib=mib, share=share)


def _is_above_zero(utilisation: int | None) -> bool | None:
    return None if utilisation is None else utilisation > 0


def is_used(held: Holding, since: Instant) -> bool:
    """Return whether this process, a joined process, or one of their descendants used a device.

    A device whose use is unknown counts as used.

    Args:
        held: The reservation.
        since: The start of the period.
    """
    uses = read(held.devices, joining.own_pids(held), since, DRIVER_LIMIT_S)
    return any(each.is_used is not False for each in uses.values())


def of_hidden(held: Holding) -> tuple[bool, bool]:
    """Check whether this process or a descendant is using devices that have just been hidden.

    A cuInit call that started before the devices were hidden might still be in progress, so wait
    for it to finish first.

    Returns:
        Whether CUDA has started in this process, and whether a descendant is using a held device.
    """
    executor.wait_for(lambda: not cuda_environment.cuda_may_be_starting(), HIDDEN_S, HIDDEN_POLL_S)
    return cuda_environment.cuda_started(), by_child(held)


def _has_processes(gpus: Nvml, device: Device) -> bool:
    """Return whether a device has compute processes or MPS clients, with or without memory."""
    usage = gpus.usage(device)
    return bool(usage.compute or usage.mps) or any(
        process.kind != GRAPHICS for process in gpus.processes(device)
    )


def by_child(held: Holding) -> bool:
    """Return whether a descendant of this process is using one of the held devices.

    A device that can't be read counts as used if this process has any descendants. If processes
    can't be identified, any process on a device counts as a descendant, unless only parts of the
    devices are reserved.
    """
    own_pid = os.getpid()
    with suppress(DriverError, DeviceError), Nvml(DRIVER_LIMIT_S) as gpus:
        if not gpus.sees_all:
            is_part = held.terms.memory_limit_mib is not None
            return not is_part and any(_has_processes(gpus, device) for device in held.devices)
        pids = {process.pid for device in held.devices for process in gpus.processes(device)}
        return any(procfs.is_descendant(pid, {own_pid}) for pid in pids - {own_pid})
    return procfs.has_descendants()
