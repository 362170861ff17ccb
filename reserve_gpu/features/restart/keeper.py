"""Keeps what a kernel holds over its restart: left as this one ends, taken by the next one."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.holders import LONGEST_RESTART_S
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.reservation import restart_handover
from reserve_gpu.reservation.feature import Feature, Leaving, Owner
from reserve_gpu.system.jupyter_kernel import kernels_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reserve_gpu.model.requests import Fact

RESTART = "RESERVE_GPU_RESTART"
RESTART_S = 60.0


class Restart(Feature):
    """Leaves what is held to the next kernel with this one's connection file."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._has_looked = False

    def begins(self) -> list[str]:
        """Take over what the kernel before this one has left. Raises RequestError, LockError."""
        restart_s()  # a setting that is no number is said first
        if self._has_looked or self.owner.held:
            return []
        notices = restart_handover.take_over(self.owner, kernels_file())
        self._has_looked = True
        return notices

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Leave it to the next kernel, where this one restarts. Raises what keeps it from that."""
        if how is not Leaving.RESTART:
            return {}
        connection_file, seconds = kernels_file(), restart_s()
        if connection_file and seconds:
            restart_handover.leave(self.owner, connection_file, seconds)
        return {}


def restart_s() -> float:
    """Return for how long a restart of a kernel keeps its devices. Raises RequestError."""
    text = os.environ.get(RESTART) or str(RESTART_S)
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= LONGEST_RESTART_S:
            return seconds
    raise RequestError(
        f"{RESTART}={sanitize(text)!r} must be a number of seconds, as 60, up to an hour; "
        "0 keeps nothing."
    )
