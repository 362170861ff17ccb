"""Why there is no reservation, or another one than was asked for, and what can be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.text import labels, shown, variables
from reserve_gpu.who import holder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.device import Device, Holder, Refusal


def nothing_free(
    refusals: Sequence[Refusal],
    needed: int,
    kept: Sequence[Device],
    visible: str | None,
    *,
    has_waited: bool = False,
) -> str:
    """Why nothing was reserved, device by device, and what can be done.

    kept: what stays reserved. visible: the CUDA_VISIBLE_DEVICES that was there before, if any.
    """
    lines = [_headline(refusals, needed)]
    lines += [f"  {r.label}: {r.reason}" for r in refusals]
    lines += limit(visible, len(refusals))
    lines += _ways_out(refusals, has_waited=has_waited)
    if kept:
        lines.append(f"This kernel keeps {labels(kept)}; nothing was changed.")
    else:
        lines.append("CUDA_VISIBLE_DEVICES = ''")
    return "\n".join(lines)


def above(refusals: Sequence[Refusal], environ: Mapping[str, str | None]) -> str:
    """Why there is no GPU of its own below a process that has reserved all; its variables stand."""
    held = [r for r in refusals if r.holder]
    head = (
        f"{labels(held)} {_is(len(held))} reserved already, for all that the holder has started, "
        "and so for this process:"
    )
    way = (
        "The variables are set for that: leave out %reserve_gpu here, or be seen as one of those "
        f"who share it with %reserve_gpu {held[0].label[3:]} --share."
    )
    devices = [f"  {r.label}: {r.reason}" for r in refusals]
    return "\n".join([head, *devices, way, *variables(environ)])


def limit(visible: str | None, count: int) -> list[str]:
    """The line about a CUDA_VISIBLE_DEVICES that was there before. count: devices inside of it."""
    if visible is None:
        return []
    inside = {0: "no GPU at all", 1: "that one"}.get(count, "those")
    fence = f"CUDA_VISIBLE_DEVICES={shown(visible)!r}"
    return [f"{fence} was set before: it limits this process to {inside}."]


def too_late(held: Sequence[Device]) -> str:
    """Why nothing can be changed any more in a process that has started CUDA."""
    keeps = f"This kernel keeps {labels(held)}." if held else "Nothing was reserved or changed."
    return (
        "Too late: CUDA has already started in this kernel, and it reads CUDA_VISIBLE_DEVICES only "
        f"when it starts. {keeps} Restart the kernel and run %reserve_gpu before anything that "
        "uses a GPU."
    )


def changed(visible: str | None, held: Sequence[Device], *, is_late: bool) -> str:
    """What is said where somebody changed CUDA_VISIBLE_DEVICES under a reservation."""
    what = (
        "CUDA_VISIBLE_DEVICES was unset" if visible is None else f"it was set to {shown(visible)!r}"
    )
    if is_late:
        return f"{what} since, and CUDA has started; this kernel holds {labels(held)}"
    return f"{what} since; the variables are set for {labels(held)} again"


def lost(device: Device, path: str, who: Holder) -> str:
    """Why a reservation is none any more."""
    return (
        f"Somebody deleted {path}, the lock of {device.label}, and the device is now "
        f"{holder(who)}. Nothing was changed: agree with them, or restart this kernel."
    )


def private(path: str) -> str:
    """What someone in a container of its own ought to know."""
    return (
        f"this container sees only the reservations made inside of it (in {path}). To share them "
        "with the whole machine, mount one directory into all containers and set "
        "RESERVE_GPU_LOCK_DIR to it."
    )


def going_on(held: Sequence[Device], visible: str | None = None) -> str:
    """How a kernel goes on that got no GPU, or not the one that it asked for.

    visible: the CUDA_VISIBLE_DEVICES that it goes on with.
    """
    if held:
        return f"Going on with {labels(held)}, as before."
    if visible:
        return f"Going on with CUDA_VISIBLE_DEVICES = {shown(visible)!r}, as before."
    return "Going on without a GPU."


def _ways_out(refusals: Sequence[Refusal], *, has_waited: bool) -> list[str]:
    first = {r.way: r.label[3:] for r in reversed(refusals)}
    ways = []
    if first.keys() & {"name", "share", "wait"} and not has_waited:
        ways.append("wait in line with %reserve_gpu --wait")
    if label := first.get("share"):
        ways.append(f"share one with %reserve_gpu {label} --share")
    text = ", or ".join(ways)
    lines = [f"{text[0].upper()}{text[1:]}."] if text else []
    if label := first.get("name"):
        lines.append(f"To use GPU{label} all the same, name it: %reserve_gpu {label}")
    return lines


def _headline(refusals: Sequence[Refusal], needed: int) -> str:
    refusals = [r for r in refusals if r.state != "unfit"]
    total = len(refusals)
    if not total:
        return "No free GPU devices."
    free = sum(r.state == "free" for r in refusals)
    if free:
        return (
            f"Not enough free GPU devices: {free} of {total} {_is(free)} free, {needed} are needed."
        )
    in_use = sum(r.state in ("reserved", "busy", "awaited") for r in refusals)
    awaited = " or awaited" if any(r.state == "awaited" for r in refusals) else ""
    parts = [f"{in_use} of {total} {_is(in_use)} in use{awaited}"] if in_use else []
    if rest := total - in_use:
        parts.append(f"{rest} of {total} can't be used")
    return f"No free GPU devices: {', '.join(parts)}."


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
