"""What goes with a part of a device in this process: its caps, and whether it keeps to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model import Promise, Request
from reserve_gpu.report import capping, parts
from reserve_gpu.report.faces import MAGIC
from reserve_gpu.reservation import caps, environment, hooks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reserve_gpu.model import Device
    from reserve_gpu.reservation.environment import Changes
    from reserve_gpu.reservation.held import Held

UNCAPPED = {environment.TF_GROWTH}  # of the variables that are set: it is no cap


class Capped:
    """The caps that this process has got with a part, for as long as it holds one."""

    def __init__(self) -> None:
        self._over: frozenset[Device] = frozenset()  # of which it uses more than its part

    def variables(self, held: Held, outside: Mapping[str, str | None]) -> dict[str, str]:
        """What to set for what is held. outside: the variables as somebody else set them."""
        return caps.marked(held.devices, held.part_mib, outside)

    def keep(self, held: Held, changes: Changes, outside: Mapping[str, str | None]) -> list[str]:
        """Keep the frameworks of this process within what is held; returns what to say of it.

        changes: of the variables, with those of the caps. outside: as somebody else set them.
        """
        theirs = caps.standing(outside) if held.part_mib is not None else []
        said = hooks.install(held.devices, held.part_mib, theirs)
        fractions = caps.uneven(held.devices, held.part_mib, changes.written)
        return [*capping.stand(theirs), *fractions, *said]

    def exceeded(
        self, held: Held, changes: Changes, uses: Mapping[Device, float | None]
    ) -> list[str]:
        """What to say of the devices of which more is used than the part, once for each time.

        uses: by this process and its children, in MiB, None where it can't be seen.
        """
        if held.part_mib is None:
            return []
        before, self._over = self._over, parts.over(uses, held.part_mib, self._over)
        request = Request(share=True, promise=Promise(held.promise.size))
        names = sorted(({*environment.CAPS} - UNCAPPED) & changes.written.keys())
        new = [device for device in held.devices if device in self._over - before]
        return [parts.warning(device, uses[device] or 0.0, request, names, MAGIC) for device in new]

    def end(self) -> None:
        """Let the frameworks go that can be let go, and begin anew with the next part."""
        self._over = frozenset()
        hooks.remove()
