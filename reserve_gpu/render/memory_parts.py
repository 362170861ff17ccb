"""Messages about parts of a GPU: which parts are available, and why a request was refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reserve_gpu.model.devices import MIB, Device, State
from reserve_gpu.model.requests import UNITS, Request, Size
from reserve_gpu.render import phrases
from reserve_gpu.render.phrases import TYPED, Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.queue import Ticket
    from reserve_gpu.render.frontends import Frontend

# The smallest suggested size in MiB. The CUDA context alone would take up most of a smaller part.
LEAST_MIB = 1024.0


def offer(
    rows: Sequence[DeviceStatus], request: Request, frontend: Frontend, ahead: Sequence[Ticket]
) -> Line:
    """Suggest a command that reserves part of a shared device instead of a whole one.

    For example, `35.2 GiB of GPU6 is available now: %reserve_gpu --memory 30GB`. The line is empty
    if too little memory is available, or if a part is not what the request needs.

    Args:
        rows: The devices that match the request.
        request: A request for a whole device.
        frontend: The frontend in which to run the command.
        ahead: The queue. Devices whose memory a waiter needs are not considered.
    """
    if request.needed > 1 or request.terms.size or any(row.is_mine for row in rows):
        return ()
    shared = [
        row
        for row in rows
        if row.state is State.RESERVED and row.holders and not _needs_part(row, ahead)
    ]
    roomiest = max(shared, key=lambda row: row.promisable_mib or 0.0, default=None)
    most_mib = roomiest.promisable_mib or 0.0 if roomiest else 0.0
    size = Size(_round_gb(most_mib) * UNITS["GB"] / MIB, "GB")
    if roomiest is None or size.mib < LEAST_MIB or size.mib < (request.min_memory_mib or 0.0):
        return ()
    part = request._replace(terms=request.terms._replace(size=size))
    text = f"{phrases.room(most_mib)} of {roomiest.label} is available now: "
    return text, (frontend.typed(part), TYPED)


def _needs_part(row: DeviceStatus, ahead: Sequence[Ticket]) -> bool:
    """Return whether a waiter could use part of a shared device."""
    uuid = row.device.uuid if isinstance(row.device, Device) else ""
    return any(each.memory_limit_mib is not None and each.could_use(uuid) for each in ahead)


def _round_gb(mib: float) -> int:
    """Return a size in GB, rounded down to a whole number, or to a multiple of 10 from 20 on."""
    gb = int(mib * MIB / UNITS["GB"])
    return gb - gb % 10 if gb >= 20 else gb


def no_room(request: Request, size: Size, rows: Sequence[DeviceStatus]) -> str:
    """Explain that too few devices have room for the requested part.

    For example, `No GPU has room for 9.3 GiB: the most is 6.2 GiB on GPU2.` The explanation is
    empty if no device is full.

    Args:
        request: The refused request.
        size: The requested size of each part.
        rows: The devices that match the request.
    """
    full = [row for row in rows if row.state is State.FULL]
    if not full:
        return ""
    part = phrases.part(size)
    if request.needed > 1:
        enough, total = sum(row.would_be_taken for row in rows), len(rows)
        have = f"{enough or 'none'} of {total} {'do' if enough > 1 else 'does'}"
        return (
            f"Not enough GPU devices have room for {part}: {have}, but {request.needed} are needed."
        )
    roomiest = max(full, key=lambda row: row.promisable_mib or 0.0)
    room = phrases.room(roomiest.promisable_mib or 0.0)
    if request.devices:
        return f"{roomiest.label} has no room for {part}, only for {room}."
    return f"No GPU has room for {part}: the most is {room} on {roomiest.label}."


def smaller(request: Request, size: Size, rows: Sequence[DeviceStatus]) -> Request | None:
    """Return a request for the largest available parts, or None if they are too small.

    Args:
        request: The refused request.
        size: The requested size of each part.
        rows: The devices that match the request.
    """
    most_mib = 0.0
    for is_whole in (True, False):  # CUDA gives a process whole GPUs or MIG instances, not both
        sizes = sorted(
            (_promisable_mib(row, size.mib) for row in rows
             if (row.device.instance is None) is is_whole),
            reverse=True,
        )  # fmt: skip
        if len(sizes) >= request.needed:
            most_mib = max(most_mib, sizes[request.needed - 1])
    memory_limit_mib = phrases.rounded_down(most_mib)
    if most_mib < LEAST_MIB or not 0 < memory_limit_mib < (size.mib or math.inf):
        return None
    return request._replace(terms=request.terms._replace(size=Size(memory_limit_mib)))


def _promisable_mib(row: DeviceStatus, memory_limit_mib: float) -> float:
    if row.would_be_taken:
        return max(memory_limit_mib, row.promisable_mib or 0.0)
    return row.promisable_mib or 0.0 if row.state is State.FULL else 0.0
