"""Why a device was not taken, in words, and what to do where none can come free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.errors import REASON_LIMIT, shown
from reserve_gpu.gpus.usage import is_usable
from reserve_gpu.model import STUCK, ComputeMode, Fault, Holder, State, Unfit
from reserve_gpu.report.words import (
    NAMED_SHARERS,
    gib,
    holder,
    listed,
    named,
    promise,
    rounded_down,
    size,
    users,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model import Device, Process, Refusal, Usage

# What to do where no device can come free by itself.
TROUBLE = "Waiting alone won't help: "
LOOK = "look at what nvidia-smi says, and "  # not for what is only drained
LOST = " (a GPU that is lost needs a reset or a reboot)"
# By the compute mode of a device, what it means for those who would use it.
MODES = {
    ComputeMode.PROHIBITED: "compute mode is prohibited: nobody can use it",
    ComputeMode.EXCLUSIVE_PROCESS: "compute mode is exclusive: one process at a time",
}


def cause(state: State, usage: Usage | None) -> str:
    """What in the readings makes the device busy, prohibited or unknown; empty for other states."""
    if state is State.PROHIBITED:
        return MODES[ComputeMode.PROHIBITED]
    if state is State.UNKNOWN:
        return "neither its processes nor its memory can be read"
    if state is not State.BUSY or usage is None:
        return ""
    if usage.compute:
        return f"{usage.compute} compute process{'' if usage.compute == 1 else 'es'}"
    if usage.mps:
        return f"{usage.mps} MPS client{'' if usage.mps == 1 else 's'}"
    if usage.unexplained_mib is not None:
        return f"{gib(usage.unexplained_mib)} in use by no process that can be seen"
    return ""


def use(state: State, usage: Usage | None, processes: Sequence[Process] = ()) -> str:
    """`busy, bob, python (pid 9876)`, or `busy, 2 compute processes` without names."""
    if state is State.PROHIBITED:
        return cause(state, usage)
    if state is not State.BUSY:
        return ": ".join(filter(None, [state.value, cause(state, usage)]))
    is_closed = usage is not None and not is_usable(usage)
    busy = "busy in exclusive mode (one process at a time)" if is_closed else "busy"
    return ", ".join(filter(None, [busy, users(processes) or cause(state, usage)]))


def refusal(refusal: Refusal, unit: str = "GiB") -> str:
    """Why the device was not taken, in words that follow `GPU0: `. unit: of parts of it."""
    return "; ".join(filter(None, [_obstacle(refusal, unit), would_be(refusal)]))


def full(refusal: Refusal, unit: str) -> str:
    """`has room for 6.2 GB; alice 40 GB, bob 30 GB`: what is left, and who has the rest."""
    left_mib = rounded_down(refusal.room_mib or 0.0, unit)
    parts = [
        f"{shown(holder.user or 'somebody')} {promise(holder)}"
        for holder in refusal.sharers[:NAMED_SHARERS]
    ]
    if more := len(refusal.sharers) - len(parts):
        parts.append(f"{more} more")
    left = f"has room for {size(left_mib, unit)}" if left_mib else "has no room"
    return "; ".join(filter(None, [left, ", ".join(parts)]))


def promisable(mib: float, sharers: Sequence[Holder], unit: str) -> str:
    """`34.2 GiB can still be promised` of a device, or why nothing can."""
    if left_mib := rounded_down(mib, unit):
        return f"{size(left_mib, unit)} can still be promised"
    people = [holder.user or "somebody" for holder in sharers if holder.part_mib is None]
    names = [shown(name) for name in dict.fromkeys(people)][:NAMED_SHARERS]
    return f"nothing can be promised{f': {listed(names)} gave no size' if names else ''}"


def would_be(refusal: Refusal) -> str:
    """What would become of a device that others have or use, were there enough; else empty."""
    if not refusal.would_be_taken or refusal.state is State.FREE:
        return ""
    if refusal.state is State.RESERVED:
        return "it would be shared"
    return "it would be taken all the same, as it was named"


def _obstacle(refusal: Refusal, unit: str) -> str:
    """What speaks against taking the device."""
    device, state = refusal.device, refusal.state
    if isinstance(device, Fault):
        return f"can't be read: {_fault(refusal)}" if refusal.unfit else _fault(refusal)
    if refusal.unfit is not None:
        return _unfit(device, refusal.unfit)
    if state is State.RESERVED:
        return holder(refusal.holder or Holder())
    if state is State.FULL:
        return full(refusal, unit)
    if state is State.AWAITED:
        awaited = holder(refusal.holder or Holder(), "awaited")
        return "; ".join(filter(None, [_use_beside(refusal), awaited]))
    if refusal.fault:
        kind = "can't be read" if state in STUCK else state.value
        return f"{kind}: {_fault(refusal)}"
    return use(state, refusal.usage, refusal.processes or ())


def detail(refusal: Refusal) -> str:
    """What there is to be said beside the state of a device that nobody has."""
    if isinstance(refusal.device, Fault) or refusal.fault:
        return _fault(refusal)
    if refusal.unfit is not None:
        return _unfit(refusal.device, refusal.unfit)
    if refusal.rule is not None:
        return by_rule(refusal)
    return cause(refusal.state, refusal.usage)


def by_rule(refusal: Refusal) -> str:
    """What is said beside a device that an administrator's rule keeps from who asks.

    Of one that is limited all is said above the devices.
    """
    rule = refusal.rule
    return f"by {named(rule)}" if rule and refusal.state is State.DRAINED else ""


def is_trouble(states: Sequence[State], needed: int = 1) -> bool:
    """Whether too few of the devices in these states can come free unless somebody mends one."""
    stuck = sum(state in STUCK for state in states)
    return stuck > 0 and len(states) - stuck < needed


def trouble(states: Sequence[State]) -> str:
    """What to do where no device can come free by itself."""
    look = LOOK if any(state in STUCK and state is not State.DRAINED for state in states) else ""
    return f"{TROUBLE}{look}ask the administrator{LOST if State.BROKEN in states else ''}."


def _use_beside(refusal: Refusal) -> str:
    """What uses a device that others wait for, empty if nothing does."""
    if refusal.fault:
        return f"can't be read: {_fault(refusal)}"
    if refusal.use in (None, State.IDLE):
        return ""
    return use(refusal.use, refusal.usage, refusal.processes or ())


def _fault(refusal: Refusal) -> str:
    """Why the device can't be used or asked, as the driver or the system says; empty if it can."""
    own = refusal.device.reason if isinstance(refusal.device, Fault) else ""
    return shown(refusal.fault or own, REASON_LIMIT)


def _unfit(device: Device, unfit: Unfit) -> str:
    if unfit is Unfit.MODEL:
        return f"is a {shown(device.name) if device.name else 'GPU without a name'}"
    if unfit is Unfit.MEMORY:
        return f"has {gib(device.memory_mib or 0)}"
    if unfit is Unfit.PART:
        return f"has {gib(device.usable_mib or 0)} to share"
    if unfit is Unfit.MEMORY_UNKNOWN:
        return "does not say how much memory it has"
    return "is a MIG instance; with this driver a process can use only one"
