"""What the processes of a reservation do on its devices, by what the driver says."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu import proc
from reserve_gpu.errors import DriverError
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.usage import DESKTOP_MIB
from reserve_gpu.model import GRAPHICS, Row, State
from reserve_gpu.notices import UsedByOthers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reserve_gpu.model import Device, Process
    from reserve_gpu.notices import Notice


class Use(NamedTuple):
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
) -> dict[Device, Use]:
    """Return what these processes, and those that they have started, have done since a moment.

    own: their pids. since: in seconds since the epoch. limit_s: for the driver to answer a call.
    """
    try:
        with Nvml(limit_s) as gpus:
            return {device: _of_device(gpus, device, own, since) for device in devices}
    except DriverError:
        return {device: Use() for device in devices}


def _of_device(gpus: Nvml, device: Device, own: Collection[int], since: float) -> Use:
    """Return what these processes have done on a device: by process, else by the device.

    To be on a device is not to use it: a notebook that has started CUDA stays there to its end.
    """
    try:
        usage, processes, gauges = gpus.read_all(device)
    except DeviceError:
        return Use()
    share = gpus.share(device)
    if not gpus.sees_all:  # a pid may mean another process
        return Use(_is_above_zero(gauges.utilisation), share=share)
    is_listed = usage.compute is not None
    is_own = {process.pid: proc.is_below(process.pid, own) for process in processes}
    mine = [process for process in processes if is_own[process.pid]]
    sizes = [process.memory_mib for process in mine]
    mib = float(sum(size or 0 for size in sizes)) if is_listed and None not in sizes else None
    workers = gpus.workers(device, since)
    if workers is not None:
        shares = [
            percent
            for pid, percent in workers.items()
            if (is_own[pid] if pid in is_own else proc.is_below(pid, own))
        ]
        return Use(bool(shares), float(min(100, sum(shares))), mib, share)
    is_used = False if is_listed and not mine else _is_above_zero(gauges.utilisation)
    return Use(is_used, mib=mib, share=share)


def _is_above_zero(utilisation: int | None) -> bool | None:
    return None if utilisation is None else utilisation > 0


def strangers(
    listed: Mapping[Device, Sequence[Process]], told: set[tuple[str, int]]
) -> list[Notice]:
    """Return a notice for each device on which another user has begun to use gigabytes.

    listed: what is on each device that is held. told: which of them are known; grows by the others.
    """
    notices: list[Notice] = []
    own, user = {os.getpid()}, proc.user_of(os.getpid())
    for device, processes in listed.items():
        new = [
            proc.identified(process)
            for process in processes
            if process.kind != GRAPHICS
            and (process.memory_mib or 0) > DESKTOP_MIB
            and (device.uuid, process.pid) not in told
            and not proc.is_below(process.pid, own)
        ]
        told |= {(device.uuid, process.pid) for process in new}
        if others := tuple(process for process in new if process.user != user):
            row = Row(device, State.RESERVED, processes=others, use_state=State.BUSY)
            notices.append(UsedByOthers(row))
    return notices
