"""Durations do not change in processes that run while the wall clock is set.

A board without a battery boots with its clock at 1970: anduril/jetpack-nixos#500.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.support.lease import ENDS
from tests.support.processes import US, wait_for
from tests.support.wall_clock import WallClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Child, Machine

HOUR_S, DECADES_S = 3600.0, 1_700_000_000.0
# Code for child processes.
STEP = "from reserve_gpu.reservation.session import session; session().run(lambda: None)"
LEFT = "import time; reserve_gpu.current().lease.until - time.time()"
SEEN = """
import time
(holder,) = reserve_gpu.status().rows[0].holders
now = time.time()
[now - holder.since, holder.lease.until - now, reserve_gpu.current().lease.until - now]
"""


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    """Return a wall clock that shows a time decades ago."""
    return WallClock(tmp_path, -int(DECADES_S))


@pytest.fixture
def child(machine: Machine, clock: WallClock) -> Iterator[Child]:
    """Start a process before the clock is set."""
    with machine.child(**clock.environ) as child:
        yield child


def test_remaining_time_is_kept_when_the_clock_is_set(child: Child, clock: WallClock) -> None:
    child.run("reserve_gpu.reserve(for_='4h').lease")
    for shift_s in (0, -3600, 7200):
        clock.set(shift_s)
        child.run(STEP)
        held_s, left_s, own_left_s = child.run(SEEN).value
        assert held_s == pytest.approx(0, abs=60)
        assert left_s == pytest.approx(4 * HOUR_S, abs=60)
        assert own_left_s == pytest.approx(left_s, abs=2)


def test_lease_ends_on_time_after_the_clock_was_set_back(child: Child, clock: WallClock) -> None:
    clock.set(0)
    assert child.reserve("for_=1").value == "0"
    clock.set(-3600)
    wait_for(lambda: child.run("reserve_gpu.current() is None").value)


def test_rule_uses_the_boot_clock(machine: Machine, child: Child, clock: WallClock) -> None:
    machine.rules.write_text(ENDS)
    child.reserve()
    clock.set(0)
    for duration, left_s in (("1h", HOUR_S), ("24h", 24 * HOUR_S)):
        child.reserve(f"for_={duration!r}")
        assert child.run(LEFT).value == pytest.approx(left_s, abs=60)


def test_joined_process_uses_the_boot_clock(
    machine: Machine, child: Child, clock: WallClock
) -> None:
    """A process that joins after the clock was set has the remaining time, and its extensions."""
    child.reserve("for_='4h'")
    clock.set(0)
    with machine.child(**clock.environ) as guest:
        guest.run(
            "from reserve_gpu.reservation import remote_release; from reserve_gpu import api\n"
            "api.join(remote_release.reservations_of_user()[0])"
        )
        assert guest.run(LEFT).value == pytest.approx(4 * HOUR_S, abs=60)
        clock.set(-3600)
        guest.run(STEP)
        assert guest.run(LEFT).value == pytest.approx(4 * HOUR_S, abs=60)
        child.reserve("for_='8h'")
        guest.run(STEP)
        wait_for(lambda: guest.run(LEFT).value > 20000)


def test_command_ends_on_time_after_the_clock_was_set_back(
    machine: Machine, clock: WallClock
) -> None:
    clock.set(0)
    code = f"open({str(clock.file)!r}, 'w').write('-3600'); import signal; signal.pause()"
    began = time.monotonic()
    command = ("run", "--for", "2s", "--", "python3", "-c", code)
    done = machine.command(*US, *command, **clock.environ)
    assert done.returncode == -15, done
    assert time.monotonic() - began >= 2


def test_lease_keeps_its_remaining_time_over_exec(machine: Machine, clock: WallClock) -> None:
    show = "import reserve_gpu, time; print(reserve_gpu.current().lease.until - time.time())"
    code = f"open({str(clock.file)!r}, 'w').write('0'); {show}"
    done = machine.command(*US, "run", "--for", "4h", "--", "python3", "-c", code, **clock.environ)
    assert float(done.stdout) == pytest.approx(4 * HOUR_S, abs=60), done
