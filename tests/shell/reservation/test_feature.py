"""Features that depend on each other."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import reserve_gpu
from reserve_gpu.reservation.session import session
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here


def count_connections(here: Here) -> int:
    """Return the number of connections to the driver."""
    return sum("Init" in call for call in here.calls())


def test_lease_uses_the_check_of_the_history(logged: Here) -> None:
    """If both features have a check due, only the history checks for use, and the lease counts it.

    This needs the history before the lease in the table of features.
    """
    reserve_gpu.reserve(1, idle="1h")
    features: dict[str, Any] = {**session().features}
    timer, history = features["LeaseTimer"], features["History"]
    wait_for(lambda: timer._next_look > time.monotonic())
    session().run(int)  # until that check has ended
    logged.add(f"compute {os.getpid()} 900\nutilisation 95")
    used, connections = timer._used, count_connections(logged)

    def step_with_both_due() -> None:
        timer._next_look = history._recorder._next_look = 0.0
        session()._step()

    session().run(step_with_both_due)
    assert count_connections(logged) == connections + 1
    assert timer._used > used
