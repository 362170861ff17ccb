"""What the readings mean: is a device idle, does it fit, and does what we hold do?

Pure functions of plain values: no driver, no files, no environment.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from reserve_gpu.device import Request, State
from reserve_gpu.errors import RequestError
from reserve_gpu.text import gib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.device import Device, Usage
    from reserve_gpu.names import DeviceNames

DEFAULT_IDLE_MIB = 1024.0
DEFAULT_IDLE_FRACTION = 0.05
# Without the second version of the memory reading, the driver's own reserve counts as used: 100 to
# 600 MB on an idle card (https://github.com/wookayin/gpustat/issues/141).
DRIVER_RESERVE_MIB = 640.0


def request(  # noqa: PLR0913 - these are reserve()'s
    devices: DeviceNames | None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    exclude: DeviceNames | None = (),
    share: bool = False,
    note: str | None = None,
) -> Request:
    """The request that these arguments make. Raises RequestError where they make none."""
    named, excluded = _named(devices), _named(exclude)
    if devices is not None and not named:
        raise RequestError("No GPU is named. Leave the name out to get the first free one.")
    if count is not None and (type(count) is not int or count < 1):
        raise RequestError(f"The number of GPUs must be 1 or more, not {count!r}.")
    if named and count is not None and count != len(named):
        raise RequestError(
            f"{len(named)} named and {count} asked for: give the names or the number."
        )
    for what, text in (("name", name), ("note", note)):
        if text is not None and not isinstance(text, str):
            raise RequestError(f"The {what} must be a text, not {text!r}.")
    return Request(
        devices=named,
        count=len(named) or count or 1,
        min_memory_mib=_size(min_memory),
        model=name or "",
        exclude=excluded,
        share=share,
        note=note,
    )


def unfit(device: Device, wanted: Request) -> str | None:
    """Why the device can never satisfy the request, None if it can."""
    if wanted.model.lower() not in (device.name or "").lower():
        return f"is a {device.name or 'GPU without a name'}"
    if not wanted.min_memory_mib:
        return None
    if device.memory_mib is None:
        return "does not say how much memory it has"
    if device.memory_mib < wanted.min_memory_mib:
        return f"has {gib(device.memory_mib)}"
    return None


def closest(
    free: Sequence[Device], count: int, link: Callable[[Device, Device], int]
) -> list[Device]:
    """Of the free devices, count that are well connected; the first ones where all are alike.

    Grown from each device in turn by what is closest to those chosen so far.
    link: how far two devices are from each other; 0 is closest.
    """
    far = {(a, b): link(a, b) for a, b in combinations(free, 2)}
    far |= {(b, a): cost for (a, b), cost in far.items()}
    best: tuple[int, list[Device]] | None = None
    for start in free:
        chosen, cost = [start], 0
        while len(chosen) < count:
            left = (d for d in free if d not in chosen)
            nearest = min(left, key=lambda d: sum(far[d, other] for other in chosen))
            cost += sum(far[nearest, other] for other in chosen)
            chosen.append(nearest)
        if best is None or cost < best[0]:
            best = cost, chosen
    return [device for device in free if best and device in best[1]]


def first_will_do(wanted: Request) -> bool:
    """Whether the first free device is as good as any; else all have to be seen to choose."""
    return wanted.count == 1 and not wanted.devices and not wanted.share


def judge(usage: Usage, configured_mib: float | None = None) -> tuple[str, str]:
    """Whether the device is idle, and if not, why, in words that follow "GPU0: ".

    Idle takes no sign of use and at least one reading that can be trusted.
    configured_mib: memory in use up to which it is idle, None for the default.
    """
    if usage.mode == "prohibited":
        return State.BUSY, "compute mode is prohibited"
    if usage.compute:
        return State.BUSY, _counted(usage.compute, "compute process", "compute processes")
    if usage.mps:
        return State.BUSY, _counted(usage.mps, "MPS client", "MPS clients")
    if usage.used_mib is not None:
        unexplained = usage.used_mib - usage.graphics_mib
        if unexplained > idle_limit_mib(usage, configured_mib):
            return State.BUSY, f"{gib(unexplained)} in use by no process that can be seen"
        return State.IDLE, ""
    if usage.compute is None or not usage.sees_all:
        return State.UNKNOWN, "neither its processes nor its memory can be read"
    return State.IDLE, ""


def idle_limit_mib(usage: Usage, configured_mib: float | None = None) -> float:
    """Device memory in MiB up to which a device without compute processes counts as idle."""
    if configured_mib is not None:
        return configured_mib
    limit = DEFAULT_IDLE_MIB
    if usage.total_mib:
        limit = min(limit, usage.total_mib * DEFAULT_IDLE_FRACTION)
    return limit if usage.reserve_known else max(limit, DRIVER_RESERVE_MIB)


def used_mib(usage: Usage) -> float:
    """Memory in use in MiB, infinite where it is not reported: least is best."""
    return float("inf") if usage.used_mib is None else usage.used_mib


def usable(usage: Usage) -> bool:
    """Whether CUDA would let one more process onto the device."""
    others = (usage.compute or 0) + (usage.mps or 0)
    return usage.mode != "prohibited" and not (usage.mode == "exclusive process" and others)


def satisfies(held: Sequence[Device], wanted: Request, *, shared: bool = False) -> bool:
    """Whether what is held is what is asked for: those named, in that order, or enough of them.

    shared: others may have it too, which is no answer to who did not ask for that.
    """
    if shared and not wanted.share:
        return False
    if any(unfit(d, wanted) for d in held):
        return False
    if wanted.devices or wanted.exclude:
        from reserve_gpu import names

        if any(names.is_one_of(d, wanted.exclude) for d in held):
            return False
        if wanted.devices:
            meant = [names.matching(name, held) for name in wanted.devices]
            return meant == [[device] for device in held]
    return len(held) >= wanted.count


def _named(devices: DeviceNames | None) -> tuple[str, ...]:
    if devices is None or devices == ():
        return ()  # most requests name none, and need not know how that is done
    from reserve_gpu import names

    return names.parse(devices)


def _size(text: float | str | None) -> float:
    if text is None:
        return 0.0
    from reserve_gpu import quantities

    return quantities.parse_size(text)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
