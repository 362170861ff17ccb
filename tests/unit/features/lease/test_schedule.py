"""What is due of a lease at a moment, as tables: no clock runs here."""

from __future__ import annotations

from math import inf
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
MOMENT = Lease(until=BEGAN + HOUR_S)
IDLE = Lease(idle_s=HOUR_S)
LONG, SHORT = Lease(until=BEGAN + 10 * HOUR_S), Lease(until=BEGAN + 180)


def step(lease: Lease, after_s: float, **seen: Any) -> Step:
    """Return what is due so long after the begin of the lease, and then since when it has ended."""
    due = schedule.step(lease, BEGAN, Circumstances(BEGAN + after_s, **seen))
    return due._replace(at=due.at - BEGAN)


def action(lease: Lease, after_s: float, **seen: Any) -> Action:
    return step(lease, after_s, **seen).action


# -- before the end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease", "after_s", "expected"),
    [
        # 10 minutes and one minute before, where the whole time is long.
        (LONG, 0, Action.LASTS),
        (LONG, 36_000 - 600.1, Action.LASTS),
        (LONG, 36_000 - 600, Action.WARN),
        (LONG, 36_000 - 60.1, Action.WARN),
        (LONG, 36_000 - 60, Action.WARN_AGAIN),
        (LONG, 36_000 - 0.001, Action.WARN_AGAIN),
        # At half of the time, where that is less; and 15 s before the end of what is short.
        (Lease(until=BEGAN + 960), 479.9, Action.LASTS),
        (Lease(until=BEGAN + 960), 480, Action.WARN),
        (Lease(until=BEGAN + 960), 900, Action.WARN_AGAIN),
        (Lease(until=BEGAN + 240), 179.9, Action.WARN),
        (Lease(until=BEGAN + 240), 180, Action.WARN_AGAIN),
        (SHORT, 89.9, Action.LASTS),
        (SHORT, 90, Action.WARN),
        (SHORT, 164.9, Action.WARN),
        (SHORT, 165, Action.WARN_AGAIN),
        # What is shorter still has two warnings as well.
        (Lease(until=BEGAN + 20), 10, Action.WARN),
        (Lease(until=BEGAN + 20), 14.9, Action.WARN),
        (Lease(until=BEGAN + 20), 15, Action.WARN_AGAIN),
    ],
)
def test_warnings(lease: Lease, after_s: float, expected: Action) -> None:
    """People are warned 10 minutes and 1 minute before; of what is short at half and at 15 s."""
    assert action(lease, after_s) is expected


@pytest.mark.parametrize(
    ("idle_s", "expected"),
    [
        (0, Action.LASTS),
        (2999.9, Action.LASTS),
        (3000, Action.WARN),
        (3540, Action.WARN_AGAIN),
        (3599.9, Action.WARN_AGAIN),
        (3600, Action.RELEASE),
    ],
)
@pytest.mark.parametrize("after_s", [3600, 30 * DAY_S])
def test_warnings_of_idleness(idle_s: float, expected: Action, after_s: float) -> None:
    """Of idleness the whole time is the one in which nothing may use it, however long it lasts."""
    assert action(IDLE, after_s, idle_s=idle_s) is expected


def test_use_takes_a_warning_back() -> None:
    """Where something uses the devices after a warning the lease lasts as before."""
    assert action(IDLE, DAY_S, idle_s=3599) is Action.WARN_AGAIN
    assert step(IDLE, DAY_S, idle_s=0) == Step(Action.LASTS, DAY_S + HOUR_S, LONGEST_PAUSE_S)


@pytest.mark.parametrize(
    ("lease", "after_s", "idle_s", "pause_s"),
    [
        # Far away, so that a machine that has slept looks at its clock soon.
        (LONG, 0, 0, LONGEST_PAUSE_S),
        (Lease(until=inf), 0, 0, LONGEST_PAUSE_S),
        (IDLE, 0, 0, LONGEST_PAUSE_S),
        # Up to the first warning, the second one, and the end.
        (LONG, 36_000 - 610, 0, 10),
        (LONG, 36_000 - 600, 0, LONGEST_PAUSE_S),
        (LONG, 36_000 - 90, 0, 30),
        (LONG, 36_000 - 60, 0, 60),
        (LONG, 36_000 - 1, 0, 1),
        (SHORT, 70, 0, 20),
        (SHORT, 153, 0, 12),
        (SHORT, 170, 0, 10),
        (IDLE, DAY_S, 2990, 10),
        (IDLE, DAY_S, 3595, 5),
    ],
)
def test_pauses(lease: Lease, after_s: float, idle_s: float, pause_s: float) -> None:
    """The next look is at the next warning or the end, and at most a minute later."""
    assert step(lease, after_s, idle_s=idle_s).pause_s == pytest.approx(pause_s)


def test_each_pause_leads_to_the_next_act() -> None:
    """Who looks after each pause misses no act, and looks no more often than once a minute."""
    after_s, acts, looks = 0.0, [], 0
    while True:
        due = step(LONG, after_s)
        acts += [] if due.action in acts else [due.action]
        if due.pause_s is None:
            break
        after_s, looks = after_s + due.pause_s, looks + 1
    assert acts == [Action.LASTS, Action.WARN, Action.WARN_AGAIN, Action.RELEASE]
    assert after_s == pytest.approx(36_000)
    assert looks <= 36_000 / LONGEST_PAUSE_S + 2


# -- which end comes first ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease", "after_s", "idle_s", "end_s", "is_by_idleness"),
    [
        (MOMENT, 10, 0, 3600, False),
        (MOMENT, 10, 3000, 3600, False),
        (IDLE, 10, 0, 3610, True),
        (IDLE, 10, 5, 3605, True),
        (Lease(until=BEGAN + 3600, idle_s=600), 10, 0, 610, True),
        (Lease(until=BEGAN + 3600, idle_s=600), 3100, 0, 3600, False),
        (Lease(until=BEGAN + 3600, idle_s=600), 3100, 100.0, 3600, False),  # both at once
        (Lease(until=BEGAN + 3600, idle_s=600), 3100, 100.1, 3599.9, True),
        (Lease(), 10, 0, inf, False),
    ],
)
def test_the_end_that_comes_first(
    lease: Lease, after_s: float, idle_s: float, end_s: float, *, is_by_idleness: bool
) -> None:
    """A lease ends at its moment, or before it where nothing has used the devices for long."""
    at = schedule.end(lease, Circumstances(BEGAN + after_s, idle_s))
    assert at == pytest.approx(BEGAN + end_s)
    assert lease.is_by_idleness(at) == is_by_idleness


def test_the_part_of_the_time_is_of_the_end_that_comes_first() -> None:
    """Who gives an hour and says idle for 4 minutes is warned when 2 minutes have been idle."""
    both = Lease(until=BEGAN + HOUR_S, idle_s=240)
    assert action(both, 100, idle_s=119) is Action.LASTS
    assert action(both, 100, idle_s=120) is Action.WARN


# -- at the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [3600, 3600.001, 30 * DAY_S], ids=["at it", "after", "long"])
def test_the_end(after_s: float) -> None:
    """Exactly at the end it is over; a machine that has slept past it finds it so."""
    assert step(MOMENT, after_s) == Step(Action.RELEASE, 3600, None)


def test_a_machine_that_sleeps_is_not_idle() -> None:
    """What a machine has slept is no idleness: the clock on the wall alone ends nothing there."""
    assert step(IDLE, 30 * DAY_S, idle_s=10).action is Action.LASTS


@pytest.mark.parametrize(
    ("wishes", "seen", "expected"),
    [
        ("", "", Action.RELEASE),
        ("", "has_cuda", Action.MARK_OVERDUE),
        ("end_kernel", "", Action.RELEASE),
        ("end_kernel", "has_cuda", Action.END_PROCESS),
        ("", "is_running", Action.PUT_OFF),
        ("", "is_running has_cuda", Action.PUT_OFF),
        ("end_kernel", "is_running has_cuda", Action.PUT_OFF),
        ("if_wanted", "is_running", Action.PUT_OFF),
        ("if_wanted", "is_running is_wanted", Action.PUT_OFF),
        ("is_strict", "is_running", Action.RELEASE),
        ("is_strict", "is_running has_cuda", Action.MARK_OVERDUE),
        ("is_strict end_kernel", "is_running has_cuda", Action.END_PROCESS),
        ("if_wanted", "", Action.STAY),
        ("if_wanted", "has_cuda", Action.STAY),
        ("if_wanted end_kernel", "has_cuda", Action.STAY),
        ("if_wanted is_strict", "is_running", Action.STAY),
        ("if_wanted", "is_wanted", Action.RELEASE),
        ("if_wanted", "is_wanted has_cuda", Action.MARK_OVERDUE),
        ("if_wanted end_kernel", "is_wanted has_cuda", Action.END_PROCESS),
        ("if_wanted is_strict", "is_running is_wanted", Action.RELEASE),
        ("", "is_wanted", Action.RELEASE),
        ("", "has_child", Action.LEAVE_TO_CHILD),
        ("", "has_child has_cuda", Action.MARK_OVERDUE),
        ("", "has_child is_running", Action.PUT_OFF),
        ("if_wanted", "has_child", Action.STAY),
        ("if_wanted", "has_child is_wanted", Action.LEAVE_TO_CHILD),
        ("end_kernel", "has_child", Action.END_PROCESS),
    ],
)
@pytest.mark.parametrize("way", ["by the clock", "by idleness"])
def test_what_is_done_at_the_end(way: str, wishes: str, seen: str, expected: Action) -> None:
    """A running cell puts off an end that is not strict; then only who waits ends `if_wanted`."""
    lease = (MOMENT if way == "by the clock" else IDLE)._replace(
        **dict.fromkeys(wishes.split(), True)
    )
    due = step(lease, 5000, idle_s=HOUR_S, **dict.fromkeys(seen.split(), True))
    pauses = {Action.PUT_OFF: LONGEST_PAUSE_S, Action.STAY: WANTED_S}
    pauses[Action.LEAVE_TO_CHILD] = CHILD_S
    assert due == Step(expected, 3600 if way == "by the clock" else 5000, pauses.get(expected))
    assert (due.action in schedule.FINAL) == (due.pause_s is None)


@pytest.mark.parametrize("seen", ["is_running", "is_wanted", "has_cuda"])
@pytest.mark.parametrize("wish", ["if_wanted", "end_kernel", "is_strict"])
def test_nothing_ends_before(seen: str, wish: str) -> None:
    """Before the end neither who waits, nor CUDA, nor a cell changes anything."""
    assert action(MOMENT._replace(**{wish: True}), 10, **{seen: True}) is Action.LASTS


HELD_SO = Lease(until=5.0, idle_s=30.0, end_kernel=True, is_strict=True)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (Lease(idle_s=60.0), HELD_SO._replace(idle_s=60.0)),
        (Lease(until=9.0), HELD_SO._replace(until=9.0)),
        (Lease(until=9.0, if_wanted=True), HELD_SO._replace(until=9.0, if_wanted=True)),
    ],
)
def test_who_prolongs_keeps_what_they_do_not_name(new: Lease, expected: Lease) -> None:
    """A new end by the clock leaves the idle time as it was, and the reverse."""
    assert HELD_SO.changed_by(new) == expected
