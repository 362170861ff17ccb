"""What the extension asks for beside a reservation: before and after a cell, and at a restart."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.errors import DriverError, ReserveGPUError
from reserve_gpu.render.notices import texts
from reserve_gpu.reservation.activity import DRIVER_LIMIT_S
from reserve_gpu.reservation.feature import Leaving
from reserve_gpu.reservation.session import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device, Process

LEAVE_LIMIT_S = 2.0  # a client kills a kernel that does not end within 5 s


def leave_to_restart() -> None:
    """Leave what this kernel holds to the next one, which comes as this one restarts.

    Raises what keeps it from that.
    """
    session().run_within(LEAVE_LIMIT_S, session().leave_as, Leaving.RESTART)


def begin_cell() -> list[str]:
    """Return the lines to print before a cell, mostly none."""
    this_session = session()
    lines = [line for feature in this_session.features for line in feature.cell_begins()]
    with suppress(ReserveGPUError):  # %reserve_gpu will say so
        lines += texts(this_session.begin_cell())
    return lines


def end_cell() -> list[str]:
    """Let others see that a cell of this kernel has ended; returns lines to show, mostly none."""
    this_session = session()
    notices = this_session.end_cell()
    lines = texts(notices) if notices else []
    if (held := this_session.held) and not this_session.is_busy:
        look = cache(partial(_processes, held.devices))  # one look for all
        lines += [line for each in this_session.features for line in each.cell_ended(look)]
    return lines


def _processes(devices: Sequence[Device]) -> dict[Device, list[Process]]:
    """Return what is on each device that is held, where whose it is can be seen."""
    with suppress(DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        if gpus.sees_all:  # else a pid may be another process's in our PID namespace
            return {device: gpus.processes(device) for device in devices}
    return {}
