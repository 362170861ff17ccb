"""What the extension asks for beside a reservation: before and after a cell, and at a restart."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import settings
from reserve_gpu.cells import kernels_file
from reserve_gpu.core.our_session import session
from reserve_gpu.core.request import restart_s
from reserve_gpu.core.reserving import HELD_LIMIT_S
from reserve_gpu.errors import DriverError
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.notices import Unusable
from reserve_gpu.report import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.model import Device, Process

LEAVE_LIMIT_S = 2.0  # a client kills a kernel that does not end within 5 s


def leave_to_restart() -> None:
    """Leave what this kernel holds to the next one, which comes as this one restarts.

    Raises what keeps it from that.
    """
    connection_file, seconds = kernels_file(), restart_s()
    if connection_file and seconds:
        this_session = session()
        leave = this_session.leave_to_restart
        this_session.run_within(LEAVE_LIMIT_S, leave, connection_file, seconds)


def device_faults() -> list[str]:
    """Return a line for each held device that the driver can't use any more.

    A driver that does not start says nothing of a device: CUDA may go on using it.
    """
    lines = []
    with suppress(DriverError), Nvml(HELD_LIMIT_S) as gpus:
        for device in session().devices:
            try:
                gpus.usage(device)
            except DeviceError as error:  # noqa: PERF203 - each device may have one
                lines.append(messages.say(Unusable(device, str(error))))
    return lines


def end_cell() -> list[str]:
    """Let others see that a cell of this kernel has ended; returns lines to show, mostly none."""
    this_session = session()
    notices = this_session.end_cell()
    if this_session.is_look_due:
        began = time.monotonic()
        listed = _processes(this_session.devices)
        notices += this_session.see(listed, took_s=time.monotonic() - began)
    return messages.said(notices)


def tell_waiters(is_watched: Callable[[], bool]) -> str | None:
    """Return what to tell at the end of a cell of those who wait for what lies idle here, if any.

    is_watched: tells whether a person reads it.
    """
    if os.environ.get(settings.TELL_WAITERS) == "0":
        return None
    notice = session().tell_waiters(is_watched)
    return messages.say(notice) if notice else None


def _processes(devices: Sequence[Device]) -> dict[Device, list[Process]]:
    """Return what is on each device, where whose it is can be seen."""
    with suppress(DriverError), Nvml(HELD_LIMIT_S) as gpus:
        if gpus.sees_all:  # else a pid may be another process's in our PID namespace
            return {device: gpus.processes(device) for device in devices}
    return {}
