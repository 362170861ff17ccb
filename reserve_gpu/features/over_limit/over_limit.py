"""After a cell, warn if the process is using more of a device's memory than it has reserved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reserve_gpu.gpus import memory_caps
from reserve_gpu.model.requests import Request, ReservationTerms
from reserve_gpu.render import notices as notice
from reserve_gpu.reservation.feature import Feature, Owner
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reserve_gpu.model.devices import Device, Process
    from reserve_gpu.reservation.holding import Change, Holding


class OverLimit(Feature):
    """Warns after a cell if the process is using more of a device's memory than it has reserved."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._over: frozenset[Device] = frozenset()  # devices already warned about

    def changed(self, change: Change) -> None:
        """Forget earlier warnings when the devices are released."""
        if change.held is None:
            self._over = frozenset()

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return a warning for each device on which this process now exceeds its reserved memory.

        Args:
            look: A function that returns the processes on each device.
        """
        held, pid = self.owner.held, os.getpid()
        if held is None or held.terms.memory_limit_mib is None:
            return []
        uses = {
            device: procfs.memory_by_process(processes, {pid})[pid]
            for device, processes in look().items()
        }
        self._over, notices = exceeded(held, self.owner.environ, uses, self._over)
        return notices


def exceeded(
    held: Holding,
    environ: Mapping[str, str],
    uses: Mapping[Device, float | None],
    before: frozenset[Device],
) -> tuple[frozenset[Device], list[str]]:
    """Find the devices on which this process exceeds its reserved memory.

    Args:
        held: The reservation, which includes only part of each device.
        environ: The environment variables set for the reservation.
        uses: The memory that this process and its descendants use on each device, in MiB. None if
            it can't be read. In that case, the device keeps its previous result.
        before: The devices found after the previous cell.

    Returns:
        The devices, and a warning for each device that is not in `before`.
    """
    memory_limit_mib = held.terms.memory_limit_mib or 0.0
    over = frozenset(
        device
        for device, used_mib in uses.items()
        if (device in before if used_mib is None else used_mib > memory_limit_mib)
    )
    request = Request(terms=ReservationTerms(held.terms.size))
    names = sorted(memory_caps.capped_by(environ).values())
    new = [device for device in held.devices if device in over - before]
    return over, [notice.exceeded(device, uses[device] or 0.0, request, names) for device in new]
