"""The table of features, and what the order of its rows means."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.reservation.session import session
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

HISTORY, LEASE = "History", "LeaseTimer"


def test_a_look_for_the_history_serves_the_lease(logged: Here) -> None:
    """Where both are due the history looks, and the lease counts the use that it saw."""
    reserve_gpu.reserve(1, idle="1h")
    features: dict[str, Any] = {**session().features}
    timer, history = features[LEASE], features[HISTORY]
    wait_for(lambda: timer._next_look > time.monotonic())
    session().run(int)  # that look is over
    logged.add(f"compute {os.getpid()} 900\nutilisation 95")
    used, looks = timer._used, number_of_looks(logged)

    def step_with_both_due() -> None:
        timer._next_look = history._recorder._next_look = 0.0
        session()._step()

    session().run(step_with_both_due)
    assert number_of_looks(logged) == looks + 1
    assert timer._used > used


def number_of_looks(here: Here) -> int:
    """Return how often somebody has talked to the driver."""
    return sum("Init" in call for call in here.calls())


def test_the_history_says_until_when(logged: Here) -> None:
    """The page of what is held says when its lease ends, and after how long without use."""
    until = reserve_gpu.reserve(1, for_="4h", idle="1h").lease.until
    folder = logged.home / ".local/state/reserve_gpu" / os.uname().nodename
    wait_for(lambda: [file for file in folder.glob("*.open") if file.read_text()])
    (file,) = folder.glob("*.open")
    said = json.loads(file.read_text().splitlines()[-1])
    assert (said["until"], said["idle_limit_s"]) == (pytest.approx(until, abs=0.001), 3600.0)
