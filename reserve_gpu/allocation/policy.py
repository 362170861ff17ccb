"""Does it fit, is it to be taken, which is best, can it ever be had? Pure functions of values."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from reserve_gpu.gpus import names, usage
from reserve_gpu.model.devices import STUCK, Device, Fault, State, Unfit, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.requests import Request


SEVERAL_INSTANCES_SINCE = 570  # driver, with CUDA 12.8

LOOK_S = 1.0  # between two looks at devices about which only the driver can tell
QUIET_S = 5.0  # where all are reserved: the kernel's list of locks tells of a change
LIVELY_LOOK_S = 0.25  # after something has changed: so many who wait don't keep each other busy
TURN_S = 0.02  # about as long as a look takes
LIVELY_S = 2.0  # for so long: a GPU may be in use a little longer than it is reserved


def unfit(device: Device | Fault, request: Request, driver: str | None = None) -> Unfit | None:
    """Return why the device can never be what is asked for, None if it can.

    driver: its version, which matters for who asks for several MIG instances.
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


def is_to_be_taken(request: Request, state: State, reading: Usage) -> bool:
    """Tell whether to take a device that nobody else has reserved for themselves or waits for.

    state: of its use.
    A name says that the person knows better; it can't help where CUDA would let nobody on. For a
    part what others use is counted, so it need not be idle.
    """
    if state is State.IDLE:
        return True
    is_part = request.terms.memory_limit_mib is not None
    is_expected = bool(request.devices) or (is_part and state is State.BUSY)
    return is_expected and usage.is_usable(reading)


def first_will_do(request: Request) -> bool:
    """Tell whether the first free device is as good as any; else all have to be seen."""
    return request.needed == 1 and not request.devices and request.terms.memory_limit_mib is None


def choose(
    devices: Sequence[Device],
    request: Request,
    rank: Mapping[str, tuple[int, float]],
    link: Callable[[Device, Device], int],
) -> list[Device] | None:
    """Return the best of those that can be had, in their order, None if they are too few.

    rank: by UUID; of parts the least is the best one.
    link: how far two devices are from each other; 0 is closest.
    """
    count = request.needed
    if request.devices:
        return list(devices) if len(devices) == count else None
    if count > 1:  # CUDA gives a process whole GPUs or MIG instances, not both
        whole = [device for device in devices if device.instance is None]
        instances = [device for device in devices if device.instance is not None]
        devices = whole if len(whole) >= count else instances
    if len(devices) < count:
        return None
    if request.terms.memory_limit_mib is not None:
        return sorted(devices, key=lambda device: rank[device.uuid])[:count]
    # A GPU with a screen is tried last, but CUDA numbers all in PCI bus order.
    return sorted(closest(devices, count, link), key=lambda d: (d.index, d.instance or 0))


def closest(
    devices: Sequence[Device], count: int, link: Callable[[Device, Device], int]
) -> list[Device]:
    """Return the best connected devices; the first ones where all are alike.

    Grown from each device in turn by what is closest to those chosen so far.
    """
    distance = {(a, b): link(a, b) for a, b in combinations(devices, 2)}
    distance |= {(b, a): cost for (a, b), cost in distance.items()}

    def grown(start: Device) -> list[Device]:
        chosen = [start]
        while len(chosen) < count:
            left = (device for device in devices if device not in chosen)
            chosen.append(min(left, key=lambda d: sum(distance[d, other] for other in chosen)))
        return chosen

    groups = map(grown, devices)
    best = min(groups, key=lambda group: sum(distance[pair] for pair in combinations(group, 2)))
    return [device for device in devices if device in best]


def kept(held: Sequence[Device], request: Request) -> list[Device] | None:
    """Return the held devices that are what is asked for, None where they are not.

    Who names none and no number is content with all of them. The order is that of the names.
    """
    fitting = [device for device in held if not unfit(device, request)]
    if request.devices:
        meant = [names.matching(name, fitting) for name in request.devices]
        devices = [matches[0] for matches in meant if len(matches) == 1]
        is_complete = len(devices) == len(meant) and len(set(devices)) == len(devices)
        return devices if is_complete else None
    if request.count is None:
        return fitting or None
    return fitting[: request.count] if len(fitting) >= request.count else None


def is_enough(held_mib: float | None, wanted_mib: float | None) -> bool:
    """Tell whether the held part is as large as the wanted one; None stands for no part."""
    if held_mib is None or wanted_mib is None:
        return held_mib is wanted_mib
    return wanted_mib <= held_mib


def reclaim(request: Request, seen: Sequence[Device]) -> Request | None:
    """Return the request by the names of the devices that CUDA sees, None if it asks for others.

    Once CUDA has started it sees these and no others, so nothing else can be reserved any more.
    seen: in CUDA's order.
    """
    is_another_number = not request.devices and request.needed != len(seen)
    if not seen or is_another_number or kept(seen, request) != list(seen):
        return None
    numbers = tuple(device.number for device in seen)
    return request._replace(devices=numbers, count=None)


def is_impossible(rows: Sequence[DeviceStatus], request: Request) -> bool:
    """Tell whether no state of this machine could satisfy the request.

    rows: of all devices that this process may use. What can't be read may come back, but nobody
    knows that it would do where all the others never will.
    """
    if not rows:
        return False
    devices = [row.device for row in rows if row.state is not State.UNFIT]
    if len(devices) < len(rows) and all(isinstance(device, Fault) for device in devices):
        return True
    instances = sum(device.instance is not None for device in devices)
    return max(instances, len(devices) - instances) < request.needed


def may_come_free(rows: Sequence[DeviceStatus], request: Request) -> bool:
    """Tell whether it makes sense to wait: what is drained does not count."""
    there = [row for row in rows if row.state is not State.DRAINED]
    return bool(there) and not is_impossible(there, request)


def is_only_awaited(rows: Sequence[DeviceStatus], request: Request) -> bool:
    """Return whether enough devices are free, but waiters come first for some of them."""
    awaited = sum(row.state is State.AWAITED for row in rows)
    return awaited > 0 and awaited + sum(row.would_be_taken for row in rows) >= request.needed


def wanted(rows: Sequence[DeviceStatus]) -> list[str]:
    """Return the UUIDs of the devices that a waiter would take if they were free.

    Devices that a rule keeps from this user for now are left out, so that others can have them.
    """
    out = (State.UNFIT, State.DRAINED, State.LIMITED)
    devices = [row.device for row in rows if row.state not in out]
    return [device.uuid for device in devices if isinstance(device, Device)]


def is_above(rows: Sequence[DeviceStatus], ancestors: Collection[int]) -> bool:
    """Tell whether ancestors of this process have reserved all that would do.

    To wait for them would be to wait for one's own end. ancestors: their pids.
    """
    fitting = [row for row in rows if row.state is not State.UNFIT]
    return bool(fitting) and all(
        row.state is State.RESERVED and any(h.listed_pid in ancestors for h in row.holders)
        for row in fitting
    )


def turn_s(ahead: int) -> float:
    """Return the seconds after which a waiter looks when something has changed.

    ahead: how many come before it in the queue.
    """
    return min(ahead * TURN_S, LIVELY_LOOK_S)


def next_look_s(rows: Sequence[DeviceStatus], *, is_lively: bool, is_told: bool) -> float:
    """Return the seconds until a waiter looks again.

    is_lively: something has changed just now. is_told: the kernel's list of locks tells of changes.
    """
    if is_lively:
        return LIVELY_LOOK_S
    # No list tells of use that ends, nor that somebody ahead in the queue is stopped.
    untold = {State.BUSY, State.FULL, State.UNKNOWN, State.AWAITED, *STUCK} - {State.DRAINED}
    states = {row.state for row in rows if not row.would_be_taken}
    return QUIET_S if is_told and states.isdisjoint(untold) else LOOK_S
