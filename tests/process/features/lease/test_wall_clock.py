"""Durations do not change if the wall clock is set while a GPU is reserved.

A board without a battery boots with its clock at 1970: anduril/jetpack-nixos#500.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.support.admin_rules import ENDS
from tests.support.processes import US, wait_for
from tests.support.wall_clock import WallClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Child, Machine

HOUR_S, DECADES_S = 3600.0, 1_700_000_000.0
STEP = "from reserve_gpu.reservation.session import session; session().run(lambda: None)"
SEEN = """
import time
(holder,) = reserve_gpu.status().rows[0].holders
now = time.time()
[now - holder.since, holder.lease.until - now, reserve_gpu.current().lease.until - now]
"""


# -- real processes --------------------------------------------------------------------------------


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path, -int(DECADES_S))


@pytest.fixture
def child(machine: Machine, clock: WallClock) -> Iterator[Child]:
    """Yield a process that begins before the clock is set."""
    with machine.child(**clock.environ) as child:
        yield child


def test_hours_that_are_left_stay_when_ntp_sets_the_clock(child: Child, clock: WallClock) -> None:
    """A reservation for 4 hours goes on when the clock is set from 1972 to today, and shows so."""
    child.run("reserve_gpu.reserve(for_='4h').lease")
    for shift_s in (0, -3600, 7200):
        clock.set(shift_s)
        child.run(STEP)
        held_s, left_s, own_left_s = child.run(SEEN).value
        assert held_s == pytest.approx(0, abs=60)
        assert left_s == pytest.approx(4 * HOUR_S, abs=60)
        assert own_left_s == pytest.approx(left_s, abs=2)


def test_a_duration_is_over_although_the_clock_was_set_back(child: Child, clock: WallClock) -> None:
    """A reservation for a second ends after a second, though by the wall clock it has an hour."""
    clock.set(0)
    assert child.reserve("for_=1").value == "0"
    clock.set(-3600)
    wait_for(lambda: child.run("reserve_gpu.current() is None").value)


def test_a_rule_counts_by_the_boot_clock(machine: Machine, child: Child, clock: WallClock) -> None:
    """A rule of 24 hours leaves the remaining time if the clock is set."""
    machine.rules.write_text(ENDS)
    child.reserve()
    clock.set(0)
    lasts = "import time; reserve_gpu.reserve(for_={!r}).lease.until - time.time()"
    assert child.run(lasts.format("1h")).value == pytest.approx(HOUR_S, abs=60)
    assert child.run(lasts.format("24h")).value == pytest.approx(24 * HOUR_S, abs=60)


def test_a_guest_goes_by_the_boot_clock_of_its_holder(
    machine: Machine, child: Child, clock: WallClock
) -> None:
    """A process that joins after the clock was set has what is left, and notices a prolongation."""
    child.reserve("for_='4h'")
    clock.set(0)
    with machine.child(**clock.environ) as guest:
        joined = guest.run(
            "from reserve_gpu.reservation import remote_release; from reserve_gpu import api\n"
            "api.join(remote_release.reservations_of_user()[0])\n"
            "import time; reserve_gpu.current().lease.until - time.time()"
        )
        assert joined.value == pytest.approx(4 * HOUR_S, abs=60)
        clock.set(-3600)
        guest.run(STEP)
        assert guest.run("import time; reserve_gpu.current().lease.until - time.time()").value == (
            pytest.approx(4 * HOUR_S, abs=60)
        )
        child.run("reserve_gpu.reserve(for_='8h').lease")
        guest.run(STEP)
        wait_for(lambda: guest.run("reserve_gpu.current().lease.until - time.time()").value > 20000)


def test_a_command_ends_after_its_duration(machine: Machine, clock: WallClock) -> None:
    """`run --for 2s` ends the command after 2 seconds, though the clock was set back meanwhile."""
    clock.set(0)
    shift = clock.file
    code = f"open({str(shift)!r}, 'w').write('-3600'); import signal; signal.pause()"
    began = time.monotonic()
    command = ("run", "--for", "2s", "--", "python3", "-c", code)
    done = machine.command(*US, *command, **clock.environ)
    assert done.returncode == -15, done
    assert time.monotonic() - began >= 2


def test_a_command_goes_on_after_exec_with_the_same_times(
    machine: Machine, clock: WallClock
) -> None:
    """The program after exec knows the age of the lock, although the clock was set."""
    shown = (
        "import reserve_gpu, time; h = reserve_gpu.current().lease; print(h.until - time.time())"
    )
    code = f"open({str(clock.file)!r}, 'w').write('0'); {shown}"
    done = machine.command(*US, "run", "--for", "4h", "--", "python3", "-c", code, **clock.environ)
    assert float(done.stdout) == pytest.approx(4 * HOUR_S, abs=60), done
