"""Durations do not change if the wall clock is set while a GPU is reserved.

A board without a battery boots with its clock at 1970: anduril/jetpack-nixos#500.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.features.lease import schedule
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.features.lease.schedule import Circumstances
from reserve_gpu.locks import files
from reserve_gpu.locks.holders import Holders, named
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.holders import Record
from reserve_gpu.model.requests import Lease, ReservationTerms
from reserve_gpu.render import durations, phrases
from reserve_gpu.system import procfs
from tests.processes import US, wait_for
from tests.test_rules import ENDS
from tests.wall_clock import WallClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machine import Child, Machine

HOUR_S, DECADES_S = 3600.0, 1_700_000_000.0
STEP = "from reserve_gpu.reservation.session import session; session().run(lambda: None)"
SEEN = """
import time
(holder,) = reserve_gpu.status().rows[0].holders
now = time.time()
[now - holder.since, holder.lease.until - now, reserve_gpu.current().lease.until - now]
"""
NOW = Instant(1_800_000_000.0, 500_000.0)


# -- pure functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("set_s", [0.0, DECADES_S, -HOUR_S, -DECADES_S, 3.0])
def test_a_duration_ends_by_the_boot_clock(set_s: float) -> None:
    """A lease of four hours is over after four hours, whatever the wall clock was set to."""
    lease = Lease(lasts_s=4 * HOUR_S).begun(NOW)
    for passed_s, is_over in ((1.0, False), (4 * HOUR_S - 1, False), (4 * HOUR_S, True)):
        wall, boot = NOW.wall + set_s + passed_s, NOW.boot + passed_s
        assert schedule.is_over(lease, Circumstances(wall, boot=boot)) is is_over
        assert lease.at(Instant(wall, boot)).until == NOW.wall + set_s + 4 * HOUR_S


def test_a_moment_ends_by_the_wall_clock() -> None:
    """A lease until 18:00 is over when the wall clock is set past 18:00."""
    lease = Lease(until=NOW.wall + 4 * HOUR_S)
    for set_s, is_over in ((0.0, False), (4 * HOUR_S, True), (-DECADES_S, False)):
        seen = Circumstances(NOW.wall + set_s, boot=NOW.boot)
        assert schedule.is_over(lease, seen) is is_over


def test_the_warnings_go_by_the_boot_clock() -> None:
    """The warning of a four hour lease comes 10 minutes before its end on a clock that was set."""
    lease = Lease(lasts_s=4 * HOUR_S).begun(NOW)
    for left_s, action in ((601.0, Action.LASTS), (599.0, Action.WARN), (59.0, Action.WARN_AGAIN)):
        now = Instant(NOW.wall - DECADES_S, NOW.boot).later(4 * HOUR_S - left_s)
        seen = Circumstances(now.wall, boot=now.boot)
        due = schedule.step(lease, NOW.at(now).wall, seen)
        assert due.action is action
        assert due.at == pytest.approx(now.wall + left_s)


@pytest.mark.parametrize("set_s", [0.0, DECADES_S, -HOUR_S])
def test_others_read_an_age_and_an_end_that_are_right(set_s: float) -> None:
    """A record that was written before the clock was set shows the right age and end after it."""
    now, age_s = procfs.now(), 30.0  # a machine that runs the tests has been up for longer
    began = now.wall - age_s
    taken = now.later(-age_s)._replace(wall=began - set_s)
    written = Record(
        terms=ReservationTerms(lease=Lease(lasts_s=HOUR_S).begun(taken)),
        since=taken.wall, since_boot=taken.boot, written=taken.wall, written_boot=taken.boot,
        overdue=taken.wall, kept_until=taken.wall,
    )  # fmt: skip
    holder = named(Record.from_dict(json.loads(json.dumps(written.to_dict()))), 1, taken.wall)
    assert holder.since == pytest.approx(began, abs=1)
    assert holder.lease.until == pytest.approx(began + HOUR_S, abs=1)
    assert holder.record.overdue == holder.record.kept_until == pytest.approx(began, abs=1)
    assert holder.record.since == written.since  # by which guests know it
    calm = holder._replace(record=holder.record._replace(overdue=None, kept_until=None))
    assert durations.end(calm, now.wall) == holder.lease.until
    assert " for 30 s" in phrases.plain(phrases.holder_line(calm, began + age_s + 0.5))


def test_a_record_of_an_older_version_goes_by_the_wall_clock() -> None:
    """A record without times of the boot clock is read as it was before there were any."""
    fields = {"since": 5000.0, "written": 5000.0, "until": 9000.0, "overdue": 9000.0}
    holder = named(Record.from_dict(fields), 1, 5000.0)
    assert (holder.since, holder.lease.until, holder.record.overdue) == (5000.0, 9000.0, 9000.0)
    assert holder.lease.until_boot is holder.last_cell is None


@pytest.mark.parametrize("boot", [-1, 1e300, float("nan"), True, "1", [], 1e11, 0])
def test_a_forged_time_of_the_boot_clock_does_no_harm(boot: object) -> None:
    """Any value in place of a boot time gives a holder that can be shown."""
    fields = {"since": 5e9, "since_boot": boot, "written": 5e9, "written_boot": boot}
    fields |= {"until": 5e9, "until_boot": boot, "overdue": 5e9, "kept_until": 5e9}
    now = procfs.now()
    record = Record.from_dict(fields)
    holder = named(record, 1, now.wall)
    assert phrases.plain(phrases.holder_line(holder, now.wall))
    assert (record.taken(now) or now).boot <= now.boot
    assert (holder.since or 0.0) >= 0


@pytest.mark.parametrize(
    ("stamped_s", "set_s", "last_s"),
    [
        (-600, 0, -600),  # ten minutes ago, and no clock was set
        (-600 - DECADES_S, DECADES_S, -600),  # before NTP set it
        (-600, DECADES_S, -600),  # after that
        (-600 + HOUR_S, -HOUR_S, -600),  # before it was set back, so in the future
        (-600, -HOUR_S, -600),  # after that
        (-2 * HOUR_S, HOUR_S, -HOUR_S),  # before or after: the shorter idleness counts
    ],
)
def test_a_last_cell_from_before_the_clock_was_set(
    stamped_s: float, set_s: float, last_s: float
) -> None:
    """No GPU looks idle for longer than it is because the wall clock was set."""
    now = procfs.now()
    wrote = now.later(-5 * HOUR_S)
    record = Record(written=wrote.wall - set_s, written_boot=wrote.boot)
    last_cell = named(record, 1, now.wall + stamped_s).last_cell
    assert last_cell == pytest.approx(now.wall + last_s, abs=1)


def test_a_holder_is_known_after_the_clock_was_set_forward(tmp_path: Path) -> None:
    """A process that started before its record was written is the holder, despite the ctime.

    Process 1 plays the holder: the test can't see which files it has open.
    """
    if procfs.shows_files(1):
        pytest.skip("root sees the files of all processes")
    path = tmp_path / "lock"
    path.touch()
    old = path.stat()
    long_ago = type(old)([*old[:9], 1000])  # its ctime
    holders = Holders(str(tmp_path), files.NONE)
    assert holders.keeper(1, long_ago) is None
    assert holders.keeper(1, long_ago, procfs.now().boot) == 1


# -- real processes --------------------------------------------------------------------------------


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path, -int(DECADES_S))


@pytest.fixture
def child(machine: Machine, clock: WallClock) -> Iterator[Child]:
    """Yield a process that begins before the clock is set."""
    with machine.child(**clock.environ) as child:
        yield child


@pytest.mark.process
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


@pytest.mark.process
def test_a_duration_is_over_although_the_clock_was_set_back(child: Child, clock: WallClock) -> None:
    """A reservation for a second ends after a second, though by the wall clock it has an hour."""
    clock.set(0)
    assert child.reserve("for_=1").value == "0"
    clock.set(-3600)
    wait_for(lambda: child.run("reserve_gpu.current() is None").value)


@pytest.mark.process
def test_a_rule_counts_by_the_boot_clock(machine: Machine, child: Child, clock: WallClock) -> None:
    """A rule of 24 hours leaves the remaining time if the clock is set."""
    machine.rules.write_text(ENDS)
    child.reserve()
    clock.set(0)
    lasts = "import time; reserve_gpu.reserve(for_={!r}).lease.until - time.time()"
    assert child.run(lasts.format("1h")).value == pytest.approx(HOUR_S, abs=60)
    assert child.run(lasts.format("24h")).value == pytest.approx(24 * HOUR_S, abs=60)


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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
