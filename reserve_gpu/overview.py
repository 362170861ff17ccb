"""How the machine stands: every device, what uses it, who has reserved it, and who waits.

Only looks: it takes no device's lock, and what can't be read is a row that says so.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import choosing, line, processes, records, settings
from reserve_gpu.bindings import DeviceError
from reserve_gpu.device import Device, Fault, Holder, Row, State, Ticket
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.locks import LockDirectory, file_name
from reserve_gpu.nvml import Nvml
from reserve_gpu.table import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MUTEX_LIMIT_S = 0.5


def status() -> Status:
    """Look at every device of this machine that the driver shows.

    Raises DriverError where there is no driver. Where the lock directory can't be used the devices
    are there all the same, and `problem` says why nothing is known of reservations.
    """
    idle_mib = settings.idle_mib()
    with Nvml() as nvml:
        devices = list(nvml.walk())
        holders, waiting, problem = _locks(devices)
        rows = tuple(_row(nvml, one, holders.get(one.label), idle_mib) for one in devices)
        return Status(rows, tuple(waiting), problem)


def _locks(
    devices: Sequence[Device | Fault],
) -> tuple[dict[str, Holder], list[Ticket], str | None]:
    """Who holds which device, by label, and who waits; a problem where that can't be known."""
    try:
        with LockDirectory() as directory:
            try:
                with directory.mutex(MUTEX_LIMIT_S):
                    return _holders(devices, directory.holder), line.tickets(directory), None
            except MutexHeldError as error:
                return _holders(devices, directory.peek), [], str(error)
    except LockError as error:
        return {}, [], str(error)


def _holders(
    devices: Sequence[Device | Fault], look: Callable[[str], Holder | None]
) -> dict[str, Holder]:
    found = {}
    for one in devices:
        if isinstance(one, Device):
            for name in (file_name(one.uuid), file_name(one.uuid, shared=True)):
                with suppress(LockError):  # a file that is none of ours: nobody can hold it
                    if one.label not in found and (holder := look(name)):
                        found[one.label] = records.with_user(holder)
    return found


def _row(nvml: Nvml, one: Device | Fault, holder: Holder | None, idle_mib: float | None) -> Row:
    if isinstance(one, Fault):
        return Row(one.label, "broken", reason=one.reason)
    try:
        usage = nvml.usage(one)
        found = nvml.processes(one)
    except DeviceError as error:
        return Row(one.label, "broken", device=one, holder=holder, reason=str(error))
    if nvml.sees_all:
        found = [processes.identified(process) for process in found]
    state, reason = choosing.judge(usage, idle_mib)
    word = {State.IDLE: "free"}.get(state, state)
    return Row(
        one.label,
        "reserved" if holder else word,
        device=one,
        used_mib=usage.used_mib,
        utilisation=nvml.utilisation(one),
        processes=tuple(found),
        holder=holder,
        reason=reason,
        is_mine=holder is not None and holder.seen and holder.pid == os.getpid(),
        is_unused=holder is not None and state == State.IDLE,
        is_unreserved_use=holder is None and state == State.BUSY,
    )
