"""Compare the held devices with the devices that the driver currently reports.

A reservation identifies a device by its UUID, but CUDA_VISIBLE_DEVICES contains the number that the
device had when it was reserved. The driver renumbers the GPUs when one is added, removed or bound
to another driver. It can also lose contact with a GPU (Xid 79:
https://docs.nvidia.com/deploy/xid-errors/).
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

# The directory in which NVIDIA's kernel module lists its GPUs by PCI address. NVML numbers the GPUs
# in the order of their PCI addresses.
PCI_ADDRESSES = "/proc/driver/nvidia/gpus"


def pci_addresses() -> tuple[str, ...] | None:
    """Return the PCI addresses of the machine's GPUs, or None if the system does not list them.

    If the addresses have not changed, neither have the GPUs' numbers. Listing the addresses takes
    only microseconds.
    """
    with suppress(OSError):
        return tuple(sorted(os.listdir(PCI_ADDRESSES)))
    return ("WSL2",) if procfs.is_wsl() else None  # under WSL2, the numbers don't change


def refresh(owner: Owner) -> "Comparison":
    """Update the held devices' numbers, and release devices that the driver has lost.

    If CUDA has started, nothing is released, because the process might still be using its devices.
    If the driver can't be used, nothing changes.

    Args:
        owner: The session of this process.
    """
    held = owner.held
    if held is None:
        return Comparison()
    readings: dict[Device, Device | DeviceError] = {}
    try:
        with Nvml(DRIVER_LIMIT_S) as gpus:
            gpus.count()
            for device in held.devices:
                readings[device] = _read(gpus, device)
    except DriverError:
        return Comparison(held.devices)
    seen, is_late = cuda_environment.cuda_uuids(), cuda_environment.cuda_started()
    change = compare(held.devices, readings, seen, is_late=is_late)
    if change.devices != held.devices:
        _hold(owner, held, change.devices)
    return change


class Comparison(NamedTuple):
    """The result of comparing the held devices with the devices that the driver reports.

    Attributes:
        devices: The devices to keep, in their previous order.
        changes: Notices about renumbered and lost devices.
        faults: Notices about devices that currently can't be used.
    """

    devices: tuple[Device, ...] = ()
    changes: Sequence[str] = ()
    faults: Sequence[str] = ()

    @property
    def notices(self) -> list[str]:
        """Return all notices about changes and faults."""
        return [*self.changes, *self.faults]


def compare(
    held: Sequence[Device],
    readings: Mapping[Device, Device | DeviceError],
    seen: Sequence[str],
    *,
    is_late: bool,
) -> Comparison:
    """Determine which of the held devices to keep, and their current numbers.

    Args:
        held: The devices as they were reserved.
        readings: Each device's current description, or the error that occurred while reading it.
        seen: The UUIDs, without prefixes, of the devices that CUDA sees in this process.
        is_late: Whether CUDA has started in this process.
    """
    devices: list[Device] = []
    changes: list[str] = []
    faults: list[str] = []
    sees_others = is_late and {*seen} != {names.bare_uuid(device.uuid) for device in held}
    for device in held:
        reading = readings[device]
        if isinstance(reading, Device):
            devices.append(reading)
            if reading.number != device.number:
                changes.append(notice.renumbered(device, reading, is_late=sees_others))
        elif reading.is_lost:
            changes.append(notice.lost_device(device, str(reading), is_late=is_late))
            devices += [device] if is_late else []
        else:
            faults.append(notice.unusable(device, str(reading), is_late=is_late))
            devices.append(device)
    return Comparison(tuple(devices), changes, faults)


def _read(gpus: Nvml, device: Device) -> Device | DeviceError:
    try:
        current = gpus.find(device)
        gpus.usage(current)
    except DeviceError as error:
        return error
    # Compare only the numbers, because other fields, such as the link speed, vary with the load.
    return current if current.number != device.number else device


def _hold(owner: Owner, held: Holding, devices: tuple[Device, ...]) -> None:
    if devices:
        owner.set_holding(held.on(devices))
    else:
        owner.release_and_hide(End.RELEASED)
