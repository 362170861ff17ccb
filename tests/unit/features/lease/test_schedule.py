"""The next step for a lease, as a function of its terms and the current circumstances."""

from __future__ import annotations

from typing import Any

import pytest

from reserve_gpu.features.lease import schedule
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.features.lease.schedule import (
    CHILD_S,
    LONGEST_PAUSE_S,
    WANTED_S,
    Circumstances,
    Step,
)
from reserve_gpu.model.requests import Lease

BEGAN = 1_000_000.0
HOUR_S, DAY_S = 3600.0, 86_400.0
TIME, IDLE = Lease(until=BEGAN + HOUR_S), Lease(idle_s=HOUR_S)
LONG, SHORT = Lease(until=BEGAN + 10 * HOUR_S), Lease(until=BEGAN + 180)


def step(lease: Lease, after_s: float, **seen: Any) -> Step:
    """Return the step so many seconds after a lease began, with its end relative to the start."""
    due = schedule.step(lease, BEGAN, Circumstances(BEGAN + after_s, **seen))
    return due._replace(at=due.at - BEGAN)


@pytest.mark.parametrize(
    ("lasts_s", "first_s", "last_s"),
    [(36_000, 600, 60), (960, 480, 60), (240, 120, 60), (239, 119.5, 15), (20, 10, 5)],
)
def test_two_warnings_before_the_end(lasts_s: float, first_s: float, last_s: float) -> None:
    """The warnings come 10 minutes and 1 minute before the end, or later for a short lease."""
    lease = Lease(until=BEGAN + lasts_s)
    for left_s, action in (
        (lasts_s, Action.LASTS),
        (first_s + 0.1, Action.LASTS),
        (first_s, Action.WARN),
        (last_s + 0.1, Action.WARN),
        (last_s, Action.WARN_AGAIN),
        (0.001, Action.WARN_AGAIN),
        (0, Action.RELEASE),
    ):
        assert step(lease, lasts_s - left_s).action is action, left_s


def test_use_cancels_the_warnings() -> None:
    assert step(IDLE, DAY_S, idle_s=0) == Step(Action.LASTS, DAY_S + HOUR_S, LONGEST_PAUSE_S)


@pytest.mark.parametrize(
    ("lease", "after_s", "idle_s", "pause_s"),
    [
        (LONG, 0, 0, LONGEST_PAUSE_S),
        (LONG, 36_000 - 610, 0, 10),
        (LONG, 36_000 - 90, 0, 30),
        (SHORT, 70, 0, 20),
        (SHORT, 170, 0, 10),
        (IDLE, DAY_S, 2990, 10),
    ],
)
def test_pause_until_the_next_step(
    lease: Lease, after_s: float, idle_s: float, pause_s: float
) -> None:
    """The next check is at the next warning or at the end, and at most a minute later."""
    assert step(lease, after_s, idle_s=idle_s).pause_s == pytest.approx(pause_s)


def test_earlier_end_determines_the_warnings() -> None:
    """An idle limit of 4 minutes leads to a warning after 2 idle minutes of an hour."""
    both = Lease(until=BEGAN + HOUR_S, idle_s=240)
    assert step(both, 100, idle_s=119).action is Action.LASTS
    assert step(both, 100, idle_s=120).action is Action.WARN


@pytest.mark.parametrize(
    ("options", "seen", "expected"),
    [
        ("", "", Action.RELEASE),
        ("", "has_cuda", Action.MARK_OVERDUE),
        ("end_kernel", "", Action.RELEASE),
        ("end_kernel", "has_cuda", Action.END_PROCESS),
        ("", "is_running", Action.PUT_OFF),
        ("end_kernel", "is_running has_cuda", Action.PUT_OFF),
        ("if_wanted", "is_running is_wanted", Action.PUT_OFF),
        ("is_strict", "is_running", Action.RELEASE),
        ("is_strict", "is_running has_cuda", Action.MARK_OVERDUE),
        ("if_wanted", "has_cuda", Action.STAY),
        ("if_wanted is_strict", "is_running", Action.STAY),
        ("if_wanted", "is_wanted", Action.RELEASE),
        ("if_wanted end_kernel", "is_wanted has_cuda", Action.END_PROCESS),
        ("", "has_child", Action.LEAVE_TO_CHILD),
        ("", "has_child has_cuda", Action.MARK_OVERDUE),
        ("end_kernel", "has_child", Action.END_PROCESS),
    ],
)
@pytest.mark.parametrize("lease", [TIME, IDLE], ids=["time", "idle"])
def test_action_at_the_end(lease: Lease, options: str, seen: str, expected: Action) -> None:
    """A running cell delays the end of a lease, and `if_wanted` delays it until a waiter comes."""
    lease = lease._replace(**dict.fromkeys(options.split(), True))
    due = step(lease, 5000, idle_s=HOUR_S, **dict.fromkeys(seen.split(), True))
    pauses = {Action.PUT_OFF: LONGEST_PAUSE_S, Action.STAY: WANTED_S}
    pauses[Action.LEAVE_TO_CHILD] = CHILD_S
    assert due == Step(expected, 5000 if lease.until is None else 3600, pauses.get(expected))
    assert (due.action in schedule.FINAL) == (due.pause_s is None)


HELD = Lease(until=5.0, idle_s=30.0, end_kernel=True, is_strict=True)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (Lease(idle_s=60.0), HELD._replace(idle_s=60.0)),
        (Lease(until=9.0), HELD._replace(until=9.0)),
        (Lease(until=9.0, if_wanted=True), HELD._replace(until=9.0, if_wanted=True)),
    ],
)
def test_new_terms_keep_the_others(new: Lease, expected: Lease) -> None:
    assert HELD.changed_by(new) == expected
