"""Explain the state of a device, and suggest what to do if waiting won't help."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from reserve_gpu.gpus.usage import is_rendered_on, is_usable
from reserve_gpu.model.devices import STUCK, ComputeMode, Device, Fault, State, Unfit
from reserve_gpu.model.errors import REASON_LIMIT, shell_line
from reserve_gpu.model.requests import Request
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations
from reserve_gpu.render.phrases import (
    NOTEBOOK_LIMIT,
    TYPED,
    Line,
    gib,
    name_of,
    named,
    ranges,
    room,
    rounded_down,
    user_of,
    users,
)
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Process, Usage
    from reserve_gpu.model.holders import DeviceStatus, LastHolder
    from reserve_gpu.render.frontends import Frontend


# Parts of the hint about devices that only an administrator can make available.
TROUBLE = "Waiting alone won't help: "
LOOK = "check the output of nvidia-smi, and "  # left out if all unavailable devices are drained
LOST = " (a lost GPU needs a reset or a reboot)"
AWAITS_RESET = "some of its memory has failed; the next reset of the GPU will repair it"
UNREAD = "neither its processes nor its memory can be read"
HOSTS_MEMORY = "it shares the host's memory, and some of its usage can't be read"
MOST_ENDED = 16  # maximum number of processes in a suggested command
# Explanations of the compute modes for users.
MODES = {
    ComputeMode.PROHIBITED: "its compute mode is prohibited: no process can use this GPU",
    ComputeMode.EXCLUSIVE_PROCESS: "compute mode is exclusive: one process at a time",
}


def reason(row: DeviceStatus) -> str:
    """Return a remark about a device.

    The remark is empty if the device's state, processes and compute mode already explain it.
    """
    if row.would_be_taken and row.state is State.BUSY:
        return "you would get it because you named it"
    if row.unfit:
        return _unfit(row.device, row.unfit)
    if row.rule and row.state is State.DRAINED:  # the headline explains any other rule
        return f"by {named(row.rule)}"
    use = row.use_state or row.state
    is_explained = use is State.PROHIBITED or (use is State.BUSY and row.processes)
    is_explained = is_explained and not (row.reason or row.last_holder)
    return "" if is_explained else sanitize(cause(row), REASON_LIMIT)


def cause(row: DeviceStatus) -> str:
    """Explain why a device is busy, can't be used, or can't be read."""
    use, usage = row.use_state or row.state, row.usage
    if row.reason:
        return row.reason
    if use is State.PROHIBITED:
        return MODES[ComputeMode.PROHIBITED]
    if use is State.UNKNOWN:
        return HOSTS_MEMORY if usage and usage.has_host_memory else UNREAD
    if usage is None or use not in (State.BUSY, State.IDLE, State.FREE):
        return ""
    if use is not State.BUSY:
        return AWAITS_RESET if usage.awaits_reset else ""
    text = _cause_of_use(row, usage)
    if last := row.last_holder:
        return f"{_last_held(last)}; {_sign_of_freeing(last) or text}"
    return text


def _cause_of_use(row: DeviceStatus, usage: Usage) -> str:
    """Explain why a device is busy."""
    if usage.compute:
        return f"{usage.compute} compute process{'' if usage.compute == 1 else 'es'}"
    if usage.mps:
        return f"{usage.mps} MPS client{'' if usage.mps == 1 else 's'}"
    if is_rendered_on(usage):
        return f"{gib(usage.graphics_mib)} in use by graphics processes"
    # The memory can be managed memory of a holder's process, whose size leaves it out.
    is_holders = True in {process.has_reserved for process in row.background}
    if usage.unexplained_mib is None or is_holders:
        return ""
    guess = " (perhaps by Windows)" if usage.is_wsl else " (perhaps outside this container)"
    origin = "" if usage.sees_all else guess
    return f"{gib(usage.unexplained_mib)} in use by no visible process{origin}"


def _last_held(last: LastHolder) -> str:
    """Return `released 3 s ago by alice, train.ipynb (pid 4321)`, or that the holder has ended."""
    holder = f"{user_of(last.holder)}, {name_of(last.holder)}"
    if last.released_s is None:
        return f"last held by {holder}, which has ended"
    return f"released {durations.duration(last.released_s)} ago by {holder}"


def _sign_of_freeing(last: LastHolder) -> str:
    """Return the sign that the last holder's memory is being freed, or an empty string."""
    if last.is_falling:
        return "its memory is still being freed"
    return "the driver still lists it" if last.is_listed else ""


def use(row: DeviceStatus) -> str:
    """Describe a device's use, such as `busy, bob, python (pid 9876)`.

    If the processes are unknown, the result is `busy, 2 compute processes`, for example. If the
    device is not busy, the result is the reason why it can't be used or read.
    """
    if row.use_state is State.UNKNOWN:
        return f"unknown: {cause(row)}"
    if row.use_state is not State.BUSY:
        return cause(row)
    is_closed = row.usage is not None and not is_usable(row.usage)
    busy = "busy in exclusive mode (one process at a time)" if is_closed else "busy"
    return ", ".join(filter(None, [busy, users(row.processes) or cause(row)]))


def promisable(row: DeviceStatus) -> str:
    """Describe the memory still available for partial reservations.

    For example, `34.2 GiB still available`.
    """
    mib = row.promisable_mib or 0.0
    if not rounded_down(mib):
        return "no memory available"
    if row.is_mine and row.state is State.FULL:
        return f"your part can grow to {room(mib)}"
    return f"{room(mib)} still available"


def unseen(
    rows: Sequence[DeviceStatus], frontend: Frontend | None = None, user: str | None = None
) -> list[Line]:
    """Return hints about devices whose use can't be read or whose users can't be seen.

    Args:
        rows: The devices.
        frontend: The frontend in which to run the suggested command. A program gets no command.
        user: The user who reads the hints.
    """
    lines: list[Line] = []
    if dark := next((r for r in rows if is_dark(r) and not (r.reason or r.holders)), None):
        text = f"{dark.label}'s usage can't be read. If you know it is unused"
        if frontend is None or frontend.is_for_program:
            lines.append((f"{text}, reserve all of it by number.",))
        else:
            command = frontend.typed(Request((dark.device.number,)))
            lines.append((f"{text}: ", (command, TYPED)))
    if frontend:  # a waiter has nothing to do
        lines += _soon_free(rows)
    is_person = frontend is not None and not frontend.is_for_program
    for row in rows:
        lines += _left_over(row, user if is_person else None)
    usage = next((row.usage for row in rows if is_nobodys(row)), None)
    if usage and usage.is_wsl:
        setting = f"{settings.IDLE_MEMORY}={math.ceil((usage.used_mib or 0.0) / 1024 + 0.5)}GiB"
        hint = "If only Windows uses that memory, set in the environment: "
        lines.append((hint, (setting, TYPED)))
    elif usage and usage.sees_all:
        hint = "As root, find the processes that may hold that memory: "
        lines.append((hint, ("fuser -v /dev/nvidia*", TYPED)))
    zombies = [p for row in rows for p in row.processes if p.zombie_of][:1]
    lines += [
        (f"{users([p])} will go away when {sanitize(p.zombie_of or '')} ends.",) for p in zombies
    ]
    return lines


def _soon_free(rows: Sequence[DeviceStatus]) -> list[Line]:
    """Return lines about devices whose last holders' memory the driver might still be freeing."""
    soon = [row for row in rows if row.last_holder and row.last_holder.is_recent]
    others = [row for row in rows if row.last_holder and not row.last_holder.is_recent]
    lines: list[Line] = []
    if soon:
        lines.append((f"{ranges(soon)} should be free in a few seconds: try again.",))
    if others:
        lines.append(
            (f"If the last holder of {ranges(others)} has just ended, try again in a few seconds.",)
        )
    return lines


def _left_over(row: DeviceStatus, user: str | None) -> list[Line]:
    """Return lines about processes that outlived a holder of a device, or have opened the device.

    Args:
        row: The device.
        user: The user who can end processes, or None if a program reads the lines, because a
            program might end the wrong process.
    """
    lines: list[Line] = []
    groups: dict[tuple[str, str | None], list[Process]] = {}
    for process in row.processes:
        if process.left_by:
            groups.setdefault((process.left_by, process.user), []).append(process)
    for (name, owner), processes in groups.items():
        text = f"{row.label}: left over from {sanitize(name, NOTEBOOK_LIMIT)}: {users(processes)}"
        if (started := processes[0].started) is not None:
            text += f", started at {durations.moment(started, time.time())}"
        line: Line = (f"{text}.",)
        if user is not None and owner == user:
            target = "it" if len(processes) == 1 else "them"
            pids = [str(process.pid) for process in processes[:MOST_ENDED]]
            kill = shell_line(" ".join(["kill", *pids]))
            line = (*line, f" To end {target}: ", (kill, TYPED))
        lines.append(line)
    if row.openers:
        noun, have = ("process", "has") if len(row.openers) == 1 else ("processes", "have")
        named_openers = users([process._replace(user=None) for process in row.openers])
        lines.append((f"Your {noun} {named_openers} {have} opened {row.label}.",))
    return lines


def is_dark(row: DeviceStatus) -> bool:
    """Return whether a device's use can't be read. Waiting for such a device might never end."""
    return row.state is State.UNKNOWN and not (row.usage and row.usage.compute)


def is_nobodys(row: DeviceStatus) -> bool:
    """Return whether a device is busy because of memory that no visible process is using."""
    usage = row.usage if row.state is State.BUSY else None
    if usage is None or is_rendered_on(usage) or (row.last_holder and row.last_holder.is_falling):
        return False
    ended = [process for process in row.processes if process.has_ended]
    if len(ended) < max(len(row.processes), (usage.compute or 0) + (usage.mps or 0)):
        return False
    return bool(usage.unexplained_mib)


def is_trouble(states: Sequence[State], needed: int = 1) -> bool:
    """Return whether a request needs devices that only an administrator can make available.

    Args:
        states: The states of the devices that match the request.
        needed: The number of devices that the request needs.
    """
    stuck = sum(state in STUCK for state in states)
    return stuck > 0 and len(states) - stuck < needed


def trouble(states: Sequence[State]) -> str:
    """Return the hint about devices that only an administrator can make available."""
    look = LOOK if any(state in STUCK and state is not State.DRAINED for state in states) else ""
    return f"{TROUBLE}{look}ask the administrator{LOST if State.BROKEN in states else ''}."


def _unfit(device: Device | Fault, unfit: Unfit) -> str:
    if isinstance(device, Fault):
        return f"can't be read: {sanitize(device.reason, REASON_LIMIT)}"
    if unfit is Unfit.MODEL:
        return f"is called {sanitize(device.name)}" if device.name else "has no name"
    if unfit is Unfit.MEMORY:
        return f"has {gib(device.memory_mib or 0)}"
    if unfit is Unfit.PART:
        return f"has {gib(device.usable_mib or 0)} to share"
    if unfit is Unfit.MEMORY_UNKNOWN:
        return "does not report its memory size"
    return "is a MIG instance; with this driver, a process can use only one"
