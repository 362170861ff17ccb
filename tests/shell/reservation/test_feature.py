"""Features that depend on each other."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.requests import End
from reserve_gpu.reservation.session import session
from tests.support.history import logged_lines, open_lines
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


def test_history_contains_the_terms_of_a_lease(logged: Here) -> None:
    until = reserve_gpu.reserve(1, for_="4h", idle="1h").lease.until
    (line,) = open_lines(logged)
    assert (line["until"], line["idle_limit_s"]) == (pytest.approx(until, abs=0.001), 3600.0)


def test_history_contains_the_end_of_a_lease(logged: Here) -> None:
    reserve_gpu.reserve(1, for_=2)
    wait_for(lambda: reserve_gpu.current() is None)
    (line,) = logged_lines(logged)
    assert line["how"] == End.OVER.value
