"""How the machine stands: every device, what uses it, who has reserved it, and who waits.

Only looks: it takes no device's lock, and what can't be read is a row that says so.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from reserve_gpu import choosing, cuda, line, loading, myself, processes, settings
from reserve_gpu.bindings import DeviceError
from reserve_gpu.device import Device, Fault, Holder, Row, State, Value
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.files import file_name
from reserve_gpu.holding import own
from reserve_gpu.locks import MUTEX, LockDirectory
from reserve_gpu.nvml import Nvml
from reserve_gpu.table import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reserve_gpu.device import Process, Usage
    from reserve_gpu.line import Ticket

MUTEX_LIMIT_S = 0.5
# Where processes can't be seen: with less in use than this there is none. A CUDA context of a
# program that computes nothing takes some hundred.
CONTEXT_MIB = 64.0
LOOKS, LOOK_AGAIN_S = 3, 0.005  # at a lock whose holder has not written its record yet


class Locks(Value):
    """What the lock directory tells.

    holders: by the label of their device. faults: why it can't be known of a device, by label.
    problem: why nothing, or not all, is known. is_complete: who is not named holds nothing.
    """

    holders: Mapping[str, tuple[Holder, ...]]
    faults: Mapping[str, str]
    waiting: tuple[Ticket, ...] = ()
    problem: str | None = None
    is_complete: bool = True


def status() -> Status:
    """Look at every device of this machine that the driver shows.

    Raises DriverError where there is no driver. Where the lock directory can't be used the devices
    are there all the same, and `problem` says why nothing is known of reservations.
    """
    with loading.definitions():  # which takes longer than the look, where it is the first one
        return _looked()


def _looked() -> Status:
    idle_mib = settings.idle_mib()
    with Nvml() as nvml:
        devices = list(nvml.walk())
        locks = _locks(devices)
        rows = tuple(_row(nvml, one, locks, idle_mib) for one in devices)
    return Status(
        rows,
        locks.waiting,
        locks.problem,
        time=time.time(),
        host=socket.gethostname(),
        limit=own().outside_environment()[cuda.VISIBLE],
    )


def _locks(devices: Sequence[Device | Fault]) -> Locks:
    """Who holds which device, and who waits; where others' locks are seen none is taken for it."""
    try:
        with LockDirectory() as directory:
            if myself.sees_all_locks():
                return _seen(directory, devices, lambda name: _settled(directory, name))
            try:
                with directory.mutex(MUTEX_LIMIT_S):
                    return _seen(directory, devices, directory.holder)
            except MutexHeldError as error:
                seen = _seen(directory, devices, directory.holders.peek)
                return seen.replace(problem=str(error), is_complete=False)
    except LockError as error:
        return Locks({}, {}, problem=str(error), is_complete=False)


def _settled(directory: LockDirectory, name: str) -> Holder | None:
    """Who has the file locked by the kernel's list, less who has just locked it to look at it.

    Such a one has the mutex too, and has not written its record. Who shares, or is in another PID
    namespace, never agrees with the record.
    """
    for attempt in range(LOOKS):
        if attempt:
            time.sleep(LOOK_AGAIN_S)
        holder = directory.holders.peek(name)
        if holder is None or holder.confirmed:
            return holder
    return None if holder and holder.pid in directory.holders.pids(MUTEX) else holder


def _seen(
    directory: LockDirectory,
    devices: Sequence[Device | Fault],
    look: Callable[[str], Holder | None],
) -> Locks:
    holders: dict[str, tuple[Holder, ...]] = {}
    faults: dict[str, str] = {}
    for one in devices:
        if isinstance(one, Device):
            names = [file_name(one.uuid), file_name(one.uuid, shared=True)]
            try:
                found = [holder for name in names for holder in _holders(directory, name, look)]
                holders[one.label] = tuple(found)
            except LockError as error:
                faults[one.label] = str(error)
    waiting = tuple(
        ticket.replace(holder=processes.with_user(ticket.holder))
        for ticket in line.tickets(directory, look)
    )
    return Locks(holders, faults, waiting)


def _holders(
    directory: LockDirectory, name: str, look: Callable[[str], Holder | None]
) -> list[Holder]:
    """All who hold the file of that name, together if they share it."""
    if (first := look(name)) is None:
        return []
    others = [pid for pid in directory.holders.pids(name) if pid != first.pid]
    if others:  # whose cell it was that ended last can't be told
        first = first.replace(last_cell=None)
    return [processes.with_user(h) for h in (first, *(Holder(pid=p, seen=True) for p in others))]


def _row(nvml: Nvml, one: Device | Fault, locks: Locks, idle_mib: float | None) -> Row:
    if isinstance(one, Fault):
        return Row(one.label, State.BROKEN, reason=one.reason)
    fault = locks.faults.get(one.label)
    holders = tuple(sorted(locks.holders.get(one.label, ()), key=_is_another))
    row = Row(
        one.label,
        State.BROKEN,
        device=one,
        holders=holders,
        is_mine=bool(holders) and not _is_another(holders[0]),
        next_in_line=_next_in_line(one, locks.waiting),
    )
    try:
        usage = nvml.usage(one)
        found = nvml.processes(one)
    except DeviceError as error:
        return row.replace(reason=str(error))
    state, reason = choosing.judge(usage, idle_mib)
    if state == State.IDLE:
        state = State.FREE
        if fault or not locks.is_complete:
            state, reason = State.UNKNOWN, fault or "whether it is reserved can't be seen now"
    used = _attributed(found, holders) if nvml.sees_all else found
    return row.replace(
        state=State.RESERVED if holders else state,
        used_mib=usage.used_mib,
        utilisation=nvml.utilisation(one),
        processes=tuple(used),
        reason=reason,
        is_unused=_is_unused(used, usage) if holders else False,
        is_unreserved_use=_is_unreserved_use(used, state, holders),
    )


def _is_another(holder: Holder) -> bool:
    return not (holder.seen and holder.pid == os.getpid())


def _next_in_line(device: Device, waiting: Sequence[Ticket]) -> int | None:
    places = (place for place, t in enumerate(waiting, 1) if device.uuid in t.wants)
    return next(places, None)


def _attributed(found: Sequence[Process], holders: Sequence[Holder]) -> list[Process]:
    """The processes with what can be seen of them; each belongs to a holder or it does not."""
    pids = {holder.pid for holder in holders}
    seen = all(holder.seen for holder in holders)
    return [
        processes.identified(process).replace(
            has_reserved=_is_below(process.pid, pids) if seen else None
        )
        for process in found
    ]


def _is_below(pid: int, holders: Collection[int | None]) -> bool:
    """Whether the process is one of the holders, or descends from one: that is slow to find out."""
    if not holders or pid in holders:
        return bool(holders)
    return not processes.lineage(pid).isdisjoint(holders)


def _is_unused(found: Sequence[Process], usage: Usage) -> bool | None:
    """Whether no process of the holders' is on a reserved device, None if that can't be seen."""
    count = (usage.compute or 0) + (usage.mps or 0)
    if any(process.has_reserved for process in found):
        return False
    if not usage.sees_all or usage.compute is None:
        is_empty = usage.reserve_known and usage.used_mib is not None and not count
        return True if is_empty and (usage.used_mib or 0) < CONTEXT_MIB else None
    if len(found) < count or any(process.has_reserved is None for process in found):
        return None
    return True


def _is_unreserved_use(
    found: Sequence[Process], state: str, holders: Sequence[Holder]
) -> bool | None:
    """Whether somebody uses the device who has not reserved it."""
    if not holders:
        return state == State.BUSY
    if any(process.has_reserved is False for process in found):
        return True
    return None if any(process.has_reserved is None for process in found) else False
