"""Durations do not change if the wall clock is set while a GPU is reserved.

A board without a battery boots with its clock at 1970: anduril/jetpack-nixos#500.
"""

from __future__ import annotations

import json
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

if TYPE_CHECKING:
    from pathlib import Path


HOUR_S, DECADES_S = 3600.0, 1_700_000_000.0
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
