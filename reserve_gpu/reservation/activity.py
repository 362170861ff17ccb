"""What the processes of a reservation do on its devices, by what the driver says."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import DriverError
from reserve_gpu.reservation import joining
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.system import executor, procfs

DRIVER_LIMIT_S = 5.0  # for the driver to answer about what is held: a first touch takes up to 3 s
# cuInit reads the variables at its begin, and takes up to 3 s without persistence mode
# (https://docs.nvidia.com/deploy/driver-persistence/): what has begun shows itself within that.
HIDDEN_S = 5.0
HIDDEN_POLL_S = 0.05


class DeviceActivity(NamedTuple):
    """What they have done on one device lately; None for what can't be read.

    percent: of the time in which their kernels ran. mib: of its memory that they have.
    share: of the whole GPU that the device is, by memory.
    """

    is_used: bool | None = None
    percent: float | None = None
    mib: float | None = None
    share: float | None = None


def read(
    devices: Sequence[Device], own: Collection[int], since: float, limit_s: float
) -> dict[Device, DeviceActivity]:
    """Return what these processes, and those that they have started, have done since a moment.

    own: their pids. since: in seconds since the epoch. limit_s: for the driver to answer a call.
    """
    with suppress(DriverError), Nvml(limit_s) as gpus:
        return {device: _of_device(gpus, device, own, since) for device in devices}
    return {device: DeviceActivity() for device in devices}


def _of_device(gpus: Nvml, device: Device, own: Collection[int], since: float) -> DeviceActivity:
    """Return what these processes have done on a device: by process, else by the device.

    To be on a device is not to use it: a notebook that has started CUDA stays there to its end.
    """
    try:
        usage, processes, gauges = gpus.read_all(device)
    except DeviceError:
        return DeviceActivity()
    share = gpus.share(device)
    if not gpus.sees_all:  # a pid may mean another process
        return DeviceActivity(_is_above_zero(gauges.utilisation), share=share)
    is_listed = usage.compute is not None
    is_own = {process.pid: procfs.is_below(process.pid, own) for process in processes}
    mine = [process for process in processes if is_own[process.pid]]
    sizes = [process.memory_mib for process in mine]
    mib = float(sum(size or 0 for size in sizes)) if is_listed and None not in sizes else None
    workers = gpus.workers(device, since)
    if workers is not None:
        shares = [
            percent
            for pid, percent in workers.items()
            if (is_own[pid] if pid in is_own else procfs.is_below(pid, own))
        ]
        return DeviceActivity(bool(shares), float(min(100, sum(shares))), mib, share)
    is_used = False if is_listed and not mine else _is_above_zero(gauges.utilisation)
    return DeviceActivity(is_used, mib=mib, share=share)


def _is_above_zero(utilisation: int | None) -> bool | None:
    return None if utilisation is None else utilisation > 0


def is_used(held: Holding, since: float) -> bool:
    """Return whether this process, a joined one or a child of either has used a device since.

    What can't be read is never taken for idle.
    """
    uses = read(held.devices, joining.own_pids(held), since, DRIVER_LIMIT_S)
    return any(each.is_used is not False for each in uses.values())


def of_hidden(held: Holding) -> tuple[bool, bool]:
    """Return whether CUDA has started here, and whether a child uses what is hidden by now.

    What has begun to start before it was hidden is waited for.
    """
    executor.wait_for(lambda: not cuda_environment.cuda_may_be_starting(), HIDDEN_S, HIDDEN_POLL_S)
    return cuda_environment.cuda_started(), by_child(held)


def by_child(held: Holding) -> bool:
    """Tell whether a process that this one has started is on one of the devices.

    A device that can't be read counts as used if this process has any descendant. If the driver
    does not identify processes, any use counts, unless others share the devices.
    """
    own = os.getpid()
    with suppress(DriverError, DeviceError), Nvml(DRIVER_LIMIT_S) as gpus:
        if not gpus.sees_all:
            is_part = held.terms.memory_limit_mib is not None
            readings = [] if is_part else map(gpus.usage, held.devices)
            return any(reading.compute or reading.mps for reading in readings)
        pids = {process.pid for device in held.devices for process in gpus.processes(device)}
        return any(procfs.is_below(pid, {own}) for pid in pids - {own})
    return procfs.has_descendants()
