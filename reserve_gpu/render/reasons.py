"""Say why a device is in its state, and what to do if none can come free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reserve_gpu.gpus.usage import is_rendered_on, is_usable
from reserve_gpu.model.devices import STUCK, ComputeMode, Device, Fault, State, Unfit
from reserve_gpu.model.errors import REASON_LIMIT
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.phrases import TYPED, Line, gib, named, room, rounded_down, users
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus


# What to do where no device can come free by itself.
TROUBLE = "Waiting alone won't help: "
LOOK = "look at what nvidia-smi says, and "  # not for what is only drained
LOST = " (a GPU that is lost needs a reset or a reboot)"
AWAITS_RESET = "some of its memory has failed, which the next reset of the GPU repairs"
UNREAD = "neither its processes nor its memory can be read"
HOSTS_MEMORY = "its memory is the host's, and not all that processes hold of it can be seen"
# By the compute mode of a device, what it means for those who would use it.
MODES = {
    ComputeMode.PROHIBITED: "compute mode is prohibited: nobody can use it",
    ComputeMode.EXCLUSIVE_PROCESS: "compute mode is exclusive: one process at a time",
}


def reason(row: DeviceStatus) -> str:
    """Return a remark on a device beside its state, its processes and its mode; may be empty."""
    if row.would_be_taken and row.state is State.BUSY:
        return "you would get it, as you named it"
    if row.unfit:
        return _unfit(row.device, row.unfit)
    if row.rule and row.state is State.DRAINED:  # of what is limited all is said above the devices
        return f"by {named(row.rule)}"
    use = row.use_state or row.state
    is_said = use is State.PROHIBITED or (use is State.BUSY and row.processes)
    return "" if is_said and not row.reason else sanitize(cause(row), REASON_LIMIT)


def cause(row: DeviceStatus) -> str:
    """Return why a device can't be used or asked, or what in its readings makes it busy."""
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
    if usage.compute:
        return f"{usage.compute} compute process{'' if usage.compute == 1 else 'es'}"
    if usage.mps:
        return f"{usage.mps} MPS client{'' if usage.mps == 1 else 's'}"
    if is_rendered_on(usage):
        return f"{gib(usage.graphics_mib)} in use by graphics processes"
    if usage.unexplained_mib is not None:
        hidden = " (Windows, perhaps)" if usage.is_wsl else " (perhaps outside of this container)"
        whose = "" if usage.sees_all else hidden
        return f"{gib(usage.unexplained_mib)} in use by no visible process{whose}"
    return ""


def use(row: DeviceStatus) -> str:
    """Return `busy, bob, python (pid 9876)`, or `busy, 2 compute processes` without names."""
    if row.use_state is State.UNKNOWN:
        return f"unknown: {cause(row)}"
    if row.use_state is not State.BUSY:
        return cause(row)
    is_closed = row.usage is not None and not is_usable(row.usage)
    busy = "busy in exclusive mode (one process at a time)" if is_closed else "busy"
    return ", ".join(filter(None, [busy, users(row.processes) or cause(row)]))


def promisable(row: DeviceStatus) -> str:
    """Return `34.2 GiB can still be promised` of a device, or why nothing can."""
    mib = row.promisable_mib or 0.0
    if not rounded_down(mib):
        return "nothing can be promised"
    if row.is_mine and row.state is State.FULL:
        return f"your part can grow to {room(mib)}"
    return f"{room(mib)} can still be promised"


def unseen(rows: Sequence[DeviceStatus]) -> list[Line]:
    """Return what to do where it can't be seen whether a device is in use, or by whom."""
    lines: list[Line] = []
    if dark := next((r.label for r in rows if is_dark(r) and not (r.reason or r.holders)), None):
        lines.append((f"Make sure that nobody uses {dark}. Then reserve all of it by number.",))
    usage = next((row.usage for row in rows if is_nobodys(row)), None)
    if usage and usage.is_wsl:
        enough = f"{settings.IDLE_MEMORY}={math.ceil((usage.used_mib or 0.0) / 1024 + 0.5)}GiB"
        lines.append(("If that is Windows alone, set in the environment: ", (enough, TYPED)))
    elif usage and usage.sees_all:
        lines.append(("As root, see who may keep that memory: ", ("fuser -v /dev/nvidia*", TYPED)))
    zombies = [p for row in rows for p in row.processes if p.zombie_of][:1]
    lines += [(f"{users([p])} goes when {sanitize(p.zombie_of or '')} ends.",) for p in zombies]
    return lines


def is_dark(row: DeviceStatus) -> bool:
    """Tell whether it can't be seen if a device is in use, and no wait will tell."""
    return row.state is State.UNKNOWN and not (row.usage and row.usage.compute)


def is_nobodys(row: DeviceStatus) -> bool:
    """Tell whether a device is busy by memory that no visible process has."""
    usage = row.usage if row.state is State.BUSY and not row.processes else None
    if usage is None or usage.compute or usage.mps or is_rendered_on(usage):
        return False
    return bool(usage.unexplained_mib)


def is_trouble(states: Sequence[State], needed: int = 1) -> bool:
    """Tell whether too few of the devices in these states can come free unless one is mended."""
    stuck = sum(state in STUCK for state in states)
    return stuck > 0 and len(states) - stuck < needed


def trouble(states: Sequence[State]) -> str:
    """Return what to do if no device can come free by itself."""
    look = LOOK if any(state in STUCK and state is not State.DRAINED for state in states) else ""
    return f"{TROUBLE}{look}ask the administrator{LOST if State.BROKEN in states else ''}."


def _unfit(device: Device | Fault, unfit: Unfit) -> str:
    if isinstance(device, Fault):
        return f"can't be read: {sanitize(device.reason, REASON_LIMIT)}"
    if unfit is Unfit.MODEL:
        return f"is a {sanitize(device.name) if device.name else 'GPU without a name'}"
    if unfit is Unfit.MEMORY:
        return f"has {gib(device.memory_mib or 0)}"
    if unfit is Unfit.PART:
        return f"has {gib(device.usable_mib or 0)} to share"
    if unfit is Unfit.MEMORY_UNKNOWN:
        return "does not say how much memory it has"
    return "is a MIG instance; with this driver a process can use only one"
