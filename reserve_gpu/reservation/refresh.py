"""Compare the devices that this process holds with what the driver shows now.

A reservation is of a device, which has a UUID, while CUDA reads the number that the device had when
it was reserved. The driver renumbers all GPUs if one is added, removed or bound to another driver,
and it can lose a GPU (Xid 79: https://docs.nvidia.com/deploy/xid-errors/).
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from reserve_gpu.gpus import cuda_environment, names
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import DriverError
from reserve_gpu.model.requests import End
from reserve_gpu.render import notices as notice
from reserve_gpu.reservation.activity import DRIVER_LIMIT_S
from reserve_gpu.reservation.feature import Owner
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.system import procfs

# The kernel module lists its GPUs here by PCI address, and NVML numbers them in that order.
PCI_ADDRESSES = "/proc/driver/nvidia/gpus"


def pci_addresses() -> tuple[str, ...] | None:
    """Return the PCI addresses of the machine's GPUs, None where the system does not list them.

    As long as they stay the same, so do the numbers; to list them costs microseconds.
    """
    with suppress(OSError):
        return tuple(sorted(os.listdir(PCI_ADDRESSES)))
    return ("WSL2",) if procfs.is_wsl() else None  # Windows has the GPUs, and keeps their numbers


def refresh(owner: Owner) -> "Comparison":
    """Correct the numbers of the held devices, and release lost devices.

    Once CUDA has started, nothing is released, because the process continues to use its devices. A
    driver that does not start changes nothing.

    """
    held = owner.held
    if held is None:
        return Comparison()
    found: dict[Device, Device | DeviceError] = {}
    try:
        with Nvml(DRIVER_LIMIT_S) as gpus:
            gpus.count()
            for device in held.devices:
                found[device] = _look(gpus, device)
    except DriverError:
        return Comparison(held.devices)
    seen, is_late = cuda_environment.cuda_uuids(), cuda_environment.cuda_started()
    change = compare(held.devices, found, seen, is_late=is_late)
    if change.devices != held.devices:
        _hold(owner, held, change.devices)
    return change


class Comparison(NamedTuple):
    """The outcome of a comparison.

    Attributes:
        devices: The devices to hold from now on, in their previous order.
        changes: Notices about new numbers and lost devices.
        faults: Notices about devices that can't be used now.
    """

    devices: tuple[Device, ...] = ()
    changes: Sequence[str] = ()
    faults: Sequence[str] = ()

    @property
    def notices(self) -> list[str]:
        """Return all notices."""
        return [*self.changes, *self.faults]


def compare(
    held: Sequence[Device],
    found: Mapping[Device, Device | DeviceError],
    seen: Sequence[str],
    *,
    is_late: bool,
) -> Comparison:
    """Decide which devices to keep, and how they are numbered now.

    Args:
        held: The devices as they were reserved.
        found: Each of them as the driver describes it now, or the error of its reading.
        seen: Bare UUIDs of the devices that CUDA sees in this process.
        is_late: Whether CUDA has started in this process.
    """
    devices: list[Device] = []
    changes: list[str] = []
    faults: list[str] = []
    is_elsewhere = is_late and {*seen} != {names.bare_uuid(device.uuid) for device in held}
    for device in held:
        now = found[device]
        if isinstance(now, Device):
            devices.append(now)
            if now.number != device.number:
                changes.append(notice.renumbered(device, now, is_late=is_elsewhere))
        elif now.is_lost:
            changes.append(notice.lost_device(device, str(now), is_late=is_late))
            devices += [device] if is_late else []
        else:
            faults.append(notice.unusable(device, str(now), is_late=is_late))
            devices.append(device)
    return Comparison(tuple(devices), changes, faults)


def _look(gpus: Nvml, device: Device) -> Device | DeviceError:
    try:
        now = gpus.find(device)
        gpus.usage(now)
    except DeviceError as error:
        return error
    # A link may be slower while nothing runs, which is no other device.
    return now if now.number != device.number else device


def _hold(owner: Owner, held: Holding, devices: tuple[Device, ...]) -> None:
    if devices:
        owner.set_holding(held.on(devices))
    else:
        owner.release_and_hide(End.RELEASED)
