"""What is asked for, and what is said while somebody waits for it and afterwards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reserve_gpu.device import Value
from reserve_gpu.names import gpu_index
from reserve_gpu.text import duration, gib, labels, listed, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.device import Device, Refusal, Request


class Wait(Value):
    """How a wait stands. place: in the line, 1 is next. refusals: why no device can be had yet."""

    request: Request
    place: int
    waited_s: float
    refusals: tuple[Refusal, ...]
    limit_s: float = math.inf


def waiting(wait: Wait) -> list[str]:
    """What is awaited, the place in line and for how long; then a line for each device."""
    return [_awaited(wait), *(f"{r.label}: {r.reason}" for r in _in_the_way(wait))]


def waiting_briefly(wait: Wait) -> str:
    """The same in one row: of each device only who has it."""
    devices = ", ".join(f"{r.label} {_has(r)}" for r in _in_the_way(wait))
    return f"{_awaited(wait)} {devices}"


def one_line(lines: Sequence[str]) -> str:
    """What stands in several lines in one: the headline, then the others."""
    first, *others = lines
    return f"{first} {'; '.join(others)}".rstrip()


def waited(limit_s: float) -> str:
    """What an error says first after a wait that ran out."""
    return f"Waited for {_limit(limit_s)}. " if limit_s else ""


def asked(request: Request) -> str:
    """What is asked for: `a GPU`, `GPU0 and GPU1:0`, `2 GPUs of 16 GiB or more, not 3`."""
    if request.devices:
        what = listed([_label(name) for name in request.devices])
    else:
        what = "a GPU" if request.count == 1 else f"{request.count} GPUs"
    if request.min_memory_mib:
        what += f" of {gib(request.min_memory_mib).replace('.0 ', ' ')} or more"
    if request.model:
        what += f" with {shown(request.model)!r} in the name"
    if request.exclude:
        what += f", not {listed([_label(name) for name in request.exclude])}"
    return f"{what}, also shared" if request.share else what


def interrupted(held: Sequence[Device]) -> str:
    """What is said when a wait was interrupted."""
    if held:
        return f"Stopped waiting. This kernel keeps {labels(held)}."
    return "Stopped waiting; nothing is reserved. CUDA_VISIBLE_DEVICES = ''"


def _label(name: str) -> str:
    """What a name that somebody typed is shown as: `GPU2` for `2`, `gpu2`, others as they are."""
    return name if gpu_index(name) is None else f"GPU{name.lower().removeprefix('gpu')}"


def _awaited(wait: Wait) -> str:
    place = "next in line" if wait.place == 1 else f"number {wait.place} in line"
    limit = "" if math.isinf(wait.limit_s) else f" ({_limit(wait.limit_s)} at most)"
    return f"Waiting for {asked(wait.request)}, {place}, for {duration(wait.waited_s)}{limit}."


def _limit(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{seconds:g} s"


def _in_the_way(wait: Wait) -> list[Refusal]:
    return [refusal for refusal in wait.refusals if refusal.state != "unfit"]


def _has(refusal: Refusal) -> str:
    """Who has a device, in a word."""
    user = refusal.holder and refusal.holder.user
    return shown(user) if user and refusal.state == "reserved" else refusal.state
