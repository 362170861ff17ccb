"""Messages about parts of a GPU: which parts are available, and why a request was refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reserve_gpu.model.devices import State
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.render import phrases
from reserve_gpu.render.phrases import TYPED, Line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.render.frontends import Frontend

OFFERED_MIB = 10240.0  # the suggested size in MiB, which is enough for most notebooks
# The smallest suggested size in MiB. The CUDA context alone would take up most of a smaller part.
LEAST_MIB = 1024.0


def offer(rows: Sequence[DeviceStatus], frontend: Frontend) -> Line:
    """Suggest a command that reserves part of a shared device.

    Devices with waiters are not considered. The line is empty if too little memory is available.
    """
    sizes = [
        row.promisable_mib or 0.0
        for row in rows
        if row.state is State.RESERVED and row.holders and not row.awaited_by
    ]
    most_mib = max(sizes, default=0.0)
    if most_mib < LEAST_MIB:
        return ()
    memory_limit_mib = min(OFFERED_MIB, phrases.rounded_down(most_mib))
    part = Request(terms=ReservationTerms(Size(memory_limit_mib)))
    return "Get a part of a GPU with ", (frontend.typed(part), TYPED)


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
