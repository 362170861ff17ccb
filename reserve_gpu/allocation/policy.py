"""The allocation policy, as pure functions that decide which devices to take."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from reserve_gpu.gpus import names, usage
from reserve_gpu.model.devices import STUCK, Device, Fault, State, Unfit, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.requests import Request


# The first driver version that lets a process use several MIG instances (CUDA 12.8).
SEVERAL_INSTANCES_SINCE = 570

LOOK_S = 1.0  # seconds between checks when only the driver can reveal a change
QUIET_S = 5.0  # seconds between checks when the Linux kernel's lock list shows every change
LIVELY_LOOK_S = 0.25  # seconds between checks after a change; limits the load from many waiters
TURN_S = 0.02  # approximate duration of a check, in seconds
LIVELY_S = 2.0  # seconds of frequent checks after a change, as a released GPU can briefly stay busy


def unfit(device: Device | Fault, request: Request, driver: str | None = None) -> Unfit | None:
    """Return why a device can never satisfy the request, or None if it can.

    Args:
        device: The device.
        request: The request.
        driver: The driver version, which matters if the request is for several MIG instances.
    """
    if isinstance(device, Fault):
        return Unfit.UNREADABLE if request.model or request.min_memory_mib else None
    if request.model.lower() not in (device.name or "").lower():
        return Unfit.MODEL
    if request.min_memory_mib and device.memory_mib is None:
        return Unfit.MEMORY_UNKNOWN
    if device.memory_mib is not None and device.memory_mib < request.min_memory_mib:
        return Unfit.MEMORY
    if request.terms.memory_limit_mib is not None:
        if device.usable_mib is None:
            return Unfit.MEMORY_UNKNOWN
        if request.terms.memory_limit_mib > device.usable_mib:
            return Unfit.PART
    if device.instance is not None and request.needed > 1:
        major = (driver or "").partition(".")[0]
        if major.isdecimal() and int(major) < SEVERAL_INSTANCES_SINCE:
            return Unfit.SECOND_INSTANCE
    return None


def should_take(request: Request, state: State, reading: Usage) -> bool:
    """Return whether to take a device that no other process has reserved or is waiting for.

    A device that the user has named does not have to be idle, but CUDA must still accept processes
    on it. A device does not have to be idle for a partial reservation either, because other
    processes' memory use is taken into account.

    Args:
        request: The request.
        state: The device's state, derived from its use.
        reading: The device's use, as read from NVML.
    """
    if state is State.IDLE:
        return True
    is_part = request.terms.memory_limit_mib is not None
    is_expected = bool(request.devices) or (is_part and state is State.BUSY)
    return is_expected and usage.is_usable(reading)


def first_will_do(request: Request) -> bool:
    """Return whether the first free device is as good as any other free device."""
    return request.needed == 1 and not request.devices and request.terms.memory_limit_mib is None


def choose(
    devices: Sequence[Device],
    request: Request,
    rank: Mapping[str, tuple[int, float]],
    link: Callable[[Device, Device], int],
) -> list[Device] | None:
    """Return the best available devices in their final order, or None if there are too few.

    Args:
        devices: The available devices, which are locked.
        request: The request.
        rank: Each device's rank, keyed by UUID. It is used only for partial reservations, and the
            lowest rank is best.
        link: A function that returns the distance between two devices; 0 is closest.
    """
    count = request.needed
    if request.devices:
        return list(devices) if len(devices) == count else None
    if count > 1:  # a process can use either whole GPUs or MIG instances, but not both
        whole_gpus = [device for device in devices if device.instance is None]
        instances = [device for device in devices if device.instance is not None]
        devices = whole_gpus if len(whole_gpus) >= count else instances
    if len(devices) < count:
        return None
    if request.terms.memory_limit_mib is not None:
        return sorted(devices, key=lambda device: rank[device.uuid])[:count]
    # GPUs with a display are tried last, but CUDA numbers all GPUs in PCI bus order.
    return sorted(closest(devices, count, link), key=lambda d: (d.index, d.instance or 0))


def closest(
    devices: Sequence[Device], count: int, link: Callable[[Device, Device], int]
) -> list[Device]:
    """Return the best-connected devices, or the first ones if all are equally well connected.

    For each device, a group is built by repeatedly adding the device that is closest to the group.
    The group with the smallest total distance wins.

    Args:
        devices: The available devices.
        count: The number of devices to return.
        link: A function that returns the distance between two devices; 0 is closest.
    """
    distance = {(a, b): link(a, b) for a, b in combinations(devices, 2)}
    distance |= {(b, a): cost for (a, b), cost in distance.items()}

    def grow(start: Device) -> list[Device]:
        chosen = [start]
        while len(chosen) < count:
            remaining = (device for device in devices if device not in chosen)
            chosen.append(min(remaining, key=lambda d: sum(distance[d, each] for each in chosen)))
        return chosen

    groups = map(grow, devices)
    best = min(groups, key=lambda group: sum(distance[pair] for pair in combinations(group, 2)))
    return [device for device in devices if device in best]


def matching_held(held: Sequence[Device], request: Request) -> list[Device] | None:
    """Return the held devices that satisfy the request, or None if there are not enough.

    If the request specifies neither names nor a number, all suitable held devices are returned. If
    the request names devices, they are returned in the order of the names.

    Args:
        held: The devices that this process holds.
        request: The request.
    """
    fitting = [device for device in held if not unfit(device, request)]
    if request.devices:
        matches = [names.matching(name, fitting) for name in request.devices]
        devices = [match[0] for match in matches if len(match) == 1]
        is_complete = len(devices) == len(matches) and len(set(devices)) == len(devices)
        return devices if is_complete else None
    if request.count is None:
        return fitting or None
    return fitting[: request.count] if len(fitting) >= request.count else None


def is_enough(held_mib: float | None, wanted_mib: float | None) -> bool:
    """Return whether the held part of a GPU is at least as large as the requested part.

    Args:
        held_mib: The size of the held part in MiB, or None for the whole GPU.
        wanted_mib: The size of the requested part in MiB, or None for the whole GPU.
    """
    if held_mib is None or wanted_mib is None:
        return held_mib is wanted_mib
    return wanted_mib <= held_mib


def reclaim(request: Request, seen: Sequence[Device]) -> Request | None:
    """Limit a request to the devices that CUDA sees, or return None if they don't satisfy it.

    Once CUDA has started, it can't use any other devices, so no other device can be reserved.

    Args:
        request: The request.
        seen: The devices that CUDA sees, in CUDA's order.
    """
    is_another_number = not request.devices and request.needed != len(seen)
    if not seen or is_another_number or matching_held(seen, request) != list(seen):
        return None
    numbers = tuple(device.number for device in seen)
    return request._replace(devices=numbers, count=None)


def is_impossible(rows: Sequence[DeviceStatus], request: Request) -> bool:
    """Return whether the request can never be satisfied on this machine.

    A device that can't be read might become readable later. However, if none of the readable
    devices is suitable, the unreadable devices are assumed to be unsuitable as well.

    Args:
        rows: The states of all devices that this process may use.
        request: The request.
    """
    if not rows:
        return False
    devices = [row.device for row in rows if row.state is not State.UNFIT]
    if len(devices) < len(rows) and all(isinstance(device, Fault) for device in devices):
        return True
    instances = sum(device.instance is not None for device in devices)
    return max(instances, len(devices) - instances) < request.needed


def may_come_free(rows: Sequence[DeviceStatus], request: Request) -> bool:
    """Return whether waiting can succeed, ignoring drained devices."""
    available = [row for row in rows if row.state is not State.DRAINED]
    return bool(available) and not is_impossible(available, request)


def is_only_awaited(rows: Sequence[DeviceStatus], request: Request) -> bool:
    """Return whether the request fails only because free devices are offered to waiters first."""
    awaited = sum(row.state is State.AWAITED for row in rows)
    return awaited > 0 and awaited + sum(row.would_be_taken for row in rows) >= request.needed


def wanted_uuids(rows: Sequence[DeviceStatus]) -> list[str]:
    """Return the UUIDs of the devices that this process would take if they were free.

    Devices that a rule currently denies to this user are left out, so that other waiters can take
    them.
    """
    excluded = (State.UNFIT, State.DRAINED, State.LIMITED)
    devices = [row.device for row in rows if row.state not in excluded]
    return [device.uuid for device in devices if isinstance(device, Device)]


def is_above(rows: Sequence[DeviceStatus], ancestors: Collection[int]) -> bool:
    """Return whether ancestors of this process have reserved all suitable devices.

    Waiting for these devices would never end, because the ancestors are waiting for this process.

    Args:
        rows: The states of all devices that this process may use.
        ancestors: The PIDs of the ancestors.
    """
    fitting = [row for row in rows if row.state is not State.UNFIT]
    return bool(fitting) and all(
        row.state is State.RESERVED and any(h.listed_pid in ancestors for h in row.holders)
        for row in fitting
    )


def turn_s(ahead: int) -> float:
    """Return the delay in seconds between a lock change and a waiter's next check.

    Waiters further back in the queue wait longer, so that the first waiter gets the mutex
    immediately.

    Args:
        ahead: The number of waiters ahead in the queue.
    """
    return min(ahead * TURN_S, LIVELY_LOOK_S)


def next_check_s(rows: Sequence[DeviceStatus], *, is_lively: bool, is_told: bool) -> float:
    """Return the number of seconds until a waiter should check the devices again.

    Args:
        rows: The states of all devices that this process may use.
        is_lively: Whether a lock has just changed.
        is_told: Whether the Linux kernel's lock list shows every lock change.
    """
    if is_lively:
        return LIVELY_LOOK_S
    # The lock list does not show that a device has become idle, or that a waiter ahead has stopped
    # responding.
    unlisted = {State.BUSY, State.FULL, State.UNKNOWN, State.AWAITED, *STUCK} - {State.DRAINED}
    states = {row.state for row in rows if not row.would_be_taken}
    return QUIET_S if is_told and states.isdisjoint(unlisted) else LOOK_S
