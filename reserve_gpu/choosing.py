"""What the readings mean: is a device idle, and does what we hold already do?

Pure functions of plain values: no driver, no files, no environment.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reserve_gpu import names
from reserve_gpu.device import Request, State
from reserve_gpu.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reserve_gpu.device import Device, Usage

DEFAULT_IDLE_MIB = 1024.0
DEFAULT_IDLE_FRACTION = 0.05
# Without the second version of the memory reading, the driver's own reserve counts as used: 100 to
# 600 MB on an idle card (https://github.com/wookayin/gpustat/issues/141).
DRIVER_RESERVE_MIB = 640.0

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE | re.ASCII)
_BYTES = {"k": (10**3, 2**10), "m": (10**6, 2**20), "g": (10**9, 2**30), "t": (10**12, 2**40)}


def request(devices: str | int | Iterable[str | int] | None, count: int) -> Request:
    """The request that these arguments make. Raises RequestError where they make none."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise RequestError(f"The number of GPUs must be 1 or more, not {count!r}.")
    named = () if devices is None else names.parse(devices)
    if devices is not None and not named:
        raise RequestError("No GPU is named. Leave it out to get the first free one.")
    return Request(named, len(named) or count)


def judge(usage: Usage, configured_mib: float | None = None) -> tuple[State, str]:
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


def usable(usage: Usage) -> bool:
    """Whether CUDA would let one more process onto the device."""
    others = (usage.compute or 0) + (usage.mps or 0)
    return usage.mode != "prohibited" and not (usage.mode == "exclusive process" and others)


def satisfies(held: Sequence[Device], wanted: Request) -> bool:
    """Whether what is held is what is asked for: those named, in that order, or at least so many."""
    if not wanted.devices:
        return len(held) >= wanted.count
    return [names.matching(name, held) for name in wanted.devices] == [[device] for device in held]


def parse_size(text: str | float) -> float:
    """A size of memory in MiB: `16GB`, `16GiB`, `16000` (MiB). Raises RequestError."""
    match = _SIZE.fullmatch(str(text).strip())
    if not match:
        raise RequestError(f"{names.shown(str(text))!r} is no size. Give 16GB, 16GiB or 16000 (MiB).")
    number, prefix, unit = float(match[1]), match[2].lower(), (match[3] or "").lower()
    if not prefix:
        if unit:
            raise RequestError(f"{names.shown(str(text))!r} is no size. Give 16GB, 16GiB or 16000 (MiB).")
        return number
    return number * _BYTES[prefix][unit == "ib"] / 2**20


def gib(mib: float) -> str:
    """Memory for people: `10.2 GiB`, below one `512 MiB`."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
