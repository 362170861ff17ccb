"""Warn after a cell if the process uses more of a device than its part."""

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
    """Warns after a cell if the process uses more of a device than its part."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._over: frozenset[Device] = frozenset()  # of which more is used

    def changed(self, change: Change) -> None:
        """Forget what was warned of, once it is released."""
        if change.held is None:
            self._over = frozenset()

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return a warning for each device of which more than the part is used, once."""
        held, pid = self.owner.held, os.getpid()
        if held is None or held.terms.memory_limit_mib is None:
            return []
        uses = {device: procfs.uses(those, {pid})[pid] for device, those in look().items()}
        self._over, notices = exceeded(held, self.owner.environ, uses, self._over)
        return notices


def exceeded(
    held: Holding,
    environ: Mapping[str, str],
    uses: Mapping[Device, float | None],
    before: frozenset[Device],
) -> tuple[frozenset[Device], list[str]]:
    """Return the devices of which more than the part is used, and a notice for each new one.

    Args:
        held: Devices with a part of each.
        environ: The variables that are set for it.
        uses: The memory in MiB that this process and its children use, None if it can't be read.
            Then the device stays as it was.
        before: The devices that were returned after the last cell.
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
