"""The table of features, and what the order of its rows means."""

from __future__ import annotations

import inspect
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.reservation.feature import FEATURES, Feature, FeatureRow
from reserve_gpu.reservation.session import session
from tests.processes import wait_for

if TYPE_CHECKING:
    from tests.here import Here

HOOKS = {name for name, _ in inspect.getmembers(Feature, inspect.isfunction)}
HISTORY, LEASE = "History", "LeaseTimer"


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_each_row_is_a_feature(row: FeatureRow) -> None:
    """Each row loads, and its class has no method that nobody calls, as a misspelt hook is."""
    kind = row.load()
    assert issubclass(kind, Feature)
    source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
    own = {name for name, method in vars(kind).items() if inspect.isfunction(method)}
    assert [name for name in own - HOOKS if f".{name}" not in source] == []


@pytest.fixture
def logged(here: Here) -> Here:
    """Put the test on a machine on which a history is kept."""
    folder = here.home / ".config"
    folder.mkdir(exist_ok=True)
    (folder / "reserve_gpu.toml").write_text("history = true\n")
    return here


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


@pytest.mark.process
def test_the_history_says_how_a_lease_has_ended(logged: Here) -> None:
    """What a lease ends is logged as over, not as released or lost."""
    reserve_gpu.reserve(1, for_=2)
    wait_for(lambda: reserve_gpu.current() is None)
    session().run(session()._step)
    folder = logged.home / ".local/state/reserve_gpu" / os.uname().nodename
    (file,) = folder.glob("*.jsonl")
    assert json.loads(file.read_text())["how"] == "its time was over"


def test_the_history_says_until_when(logged: Here) -> None:
    """The page of what is held says when its lease ends, and after how long without use."""
    until = reserve_gpu.reserve(1, for_="4h", idle="1h").lease.until
    folder = logged.home / ".local/state/reserve_gpu" / os.uname().nodename
    wait_for(lambda: [file for file in folder.glob("*.open") if file.read_text()])
    (file,) = folder.glob("*.open")
    said = json.loads(file.read_text().splitlines()[-1])
    assert (said["until"], said["idle_limit_s"]) == (pytest.approx(until, abs=0.001), 3600.0)
