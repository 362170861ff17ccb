"""Keep a Jupyter kernel's devices across a restart by handing them over to the new kernel."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.holders import LONGEST_RESTART_S
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.reservation import restart_handover
from reserve_gpu.reservation.feature import Feature, Leaving, Owner
from reserve_gpu.system.jupyter_kernel import cells, kernels_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reserve_gpu.model.requests import Fact

RESTART = "RESERVE_GPU_RESTART"
RESTART_S = 60.0  # default for RESTART, in seconds


class Restart(Feature):
    """Hands a reservation over to the next kernel with the same connection file."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._has_checked = False

    def begins(self) -> list[str]:
        """Take over the devices that the previous kernel left.

        Returns:
            Notices about the devices.

        Raises:
            RequestError: The value of RESERVE_GPU_RESTART is invalid.
            LockError: The lock directory can't be used.
        """
        restart_s()  # report an invalid setting first
        if self._has_checked or self.owner.held or cells().has_lock_keeper is False:
            return []
        notices = restart_handover.take_over(self.owner, kernels_file())
        self._has_checked = True
        return notices

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Leave the devices to the next kernel if this kernel is restarting.

        Args:
            how: The kind of program that takes over.

        Raises:
            RequestError: The value of RESERVE_GPU_RESTART is invalid.
            LockError: The lock directory can't be used.
            OSError: The lock keeper can't be started.
        """
        if how is not Leaving.RESTART:
            return {}
        connection_file, seconds = kernels_file(), restart_s()
        if connection_file and seconds:
            restart_handover.leave_to_lock_keeper(self.owner, connection_file, seconds)
        return {}


def restart_s() -> float:
    """Return the time for which a restarting kernel's devices are kept, in seconds.

    Raises:
        RequestError: The value of RESERVE_GPU_RESTART is invalid.
    """
    text = os.environ.get(RESTART) or str(RESTART_S)
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= LONGEST_RESTART_S:
            return seconds
    raise RequestError(
        f"{RESTART}={sanitize(text)!r} must be a number of seconds between 0 and "
        f"{LONGEST_RESTART_S:.0f}. With 0, the GPU is not kept during a restart."
    )
