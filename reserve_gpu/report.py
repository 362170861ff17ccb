"""What people read: built here once, from plain values."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from reserve_gpu.choosing import gib
from reserve_gpu.names import gpu_index, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.device import Device, Holder, Process, Refusal, Request, Wait

LISTED_PROCESSES = 3


def reserved(devices: Sequence[Device], environ: Mapping[str, str]) -> str:
    """What a reservation prints: the devices, then the variables."""
    lines = [f"Reserving {device.label}: {_described(device)}" for device in devices]
    return "\n".join([*lines, *variables(environ)])


def variables(environ: Mapping[str, str | None]) -> list[str]:
    """One line for each variable: `CUDA_VISIBLE_DEVICES = '2'`."""
    return [f"{name} = {value!r}" for name, value in sorted(environ.items()) if value is not None]


def released(devices: Sequence[Device], environ: Mapping[str, str | None], *, started: bool) -> str:
    """What a release prints. started: CUDA runs in this process, so device memory stays in use."""
    lines = [f"Released {labels(devices)}." if devices else "This kernel holds no GPU."]
    if started and devices:
        lines.append("CUDA still runs in this kernel: restart it to free the GPU's memory as well.")
    lines += [
        f"{name} is not set" if value is None else f"{name} = {value!r}"
        for name, value in sorted(environ.items())
    ]
    return "\n".join(lines)


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


def private(path: str) -> str:
    """What someone in a container of its own ought to know."""
    return (
        f"this container sees only the reservations made inside of it (in {path}). To share them "
        "with the whole machine, mount one directory into all containers and set "
        "RESERVE_GPU_LOCK_DIR to it."
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


def holder(who: Holder, what: str = "reserved") -> str:
    """`reserved by alice, train.ipynb (pid 4321) for 2 h 10 min`, as far as it is known."""
    parts = [f"{what} by {shown(who.user or 'somebody')}"]
    if who.notebook:
        parts.append(f", {shown(who.notebook)}")
    place = " of another container" if who.elsewhere else ""
    if who.pid:
        parts.append(f" (pid {who.pid}{place})")
    if who.since:
        parts.append(f" for {duration(max(0.0, time.time() - who.since))}")
    if who.note:
        parts.append(f": {shown(who.note)}")
    if not who.confirmed:
        parts.append(" [unconfirmed]")
    return "".join(parts)


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


def going_on(held: Sequence[Device], visible: str | None = None) -> str:
    """How a kernel goes on that got no GPU, or not the one that it asked for.

    visible: the CUDA_VISIBLE_DEVICES that it goes on with.
    """
    if held:
        return f"Going on with {labels(held)}, as before."
    if visible:
        return f"Going on with CUDA_VISIBLE_DEVICES = {shown(visible)!r}, as before."
    return "Going on without a GPU."


def busy(reason: str, processes: Sequence[Process]) -> str:
    """`busy, bob: python (pid 9876) 10.2 GiB`, or the bare reason where no process can be named."""
    return f"busy, {users(processes) if processes else reason}"


def users(processes: Sequence[Process]) -> str:
    """`bob: python (pid 9876) 10.2 GiB`, for the first few of them."""
    named = [_process(process) for process in processes[:LISTED_PROCESSES]]
    if more := len(processes) - len(named):
        named.append(f"{more} more")
    return "; ".join(named)


def labels(devices: Sequence[Device | Refusal]) -> str:
    """`GPU1`, `GPU1 and GPU3`, `GPU0, GPU1 and GPU3`."""
    return listed([device.label for device in devices])


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `2 h 10 min`, `2 h`, `3 d 4 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h".removesuffix(" 0 h")
    if hours:
        return f"{hours} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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


def _described(device: Device) -> str:
    """`0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)`, less what is not reported."""
    parts = [
        device.bus_id,
        device.link_width and f"{device.link_width}x",
        device.name,
        device.vbios and f"(VBIOS {device.vbios})",
    ]
    return " ".join(part for part in parts if part)


def _process(process: Process) -> str:
    user = f"{shown(process.user)}: " if process.user else ""
    memory = "" if process.memory_mib is None else gib(process.memory_mib)
    if not process.command:
        return f"{user}pid {process.pid}{', ' if memory else ''}{memory}"
    return f"{user}{shown(process.command, 40)} (pid {process.pid}) {memory}".rstrip()


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
