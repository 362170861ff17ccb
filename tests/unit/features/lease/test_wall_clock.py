"""A lease for a duration does not change if the wall clock is set.

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


@pytest.mark.parametrize("set_s", [0.0, DECADES_S, -HOUR_S, 3.0])
def test_duration_uses_the_boot_clock(set_s: float) -> None:
    lease = Lease(lasts_s=4 * HOUR_S).begun(NOW)
    for passed_s, is_over in ((4 * HOUR_S - 1, False), (4 * HOUR_S, True)):
        wall, boot = NOW.wall + set_s + passed_s, NOW.boot + passed_s
        assert schedule.is_over(lease, Circumstances(wall, boot=boot)) is is_over
        assert lease.at(Instant(wall, boot)).until == NOW.wall + set_s + 4 * HOUR_S


def test_time_uses_the_wall_clock() -> None:
    lease = Lease(until=NOW.wall + 4 * HOUR_S)
    for set_s, is_over in ((4 * HOUR_S - 1, False), (4 * HOUR_S, True), (-DECADES_S, False)):
        seen = Circumstances(NOW.wall + set_s, boot=NOW.boot)
        assert schedule.is_over(lease, seen) is is_over


def test_warnings_use_the_boot_clock() -> None:
    lease = Lease(lasts_s=4 * HOUR_S).begun(NOW)
    for left_s, action in ((601.0, Action.LASTS), (599.0, Action.WARN), (59.0, Action.WARN_AGAIN)):
        now = Instant(NOW.wall - DECADES_S, NOW.boot).later(4 * HOUR_S - left_s)
        step = schedule.step(lease, NOW.at(now).wall, Circumstances(now.wall, boot=now.boot))
        assert step.action is action
        assert step.at == pytest.approx(now.wall + left_s)


@pytest.mark.parametrize("set_s", [0.0, DECADES_S, -HOUR_S])
def test_record_from_before_the_clock_was_set_shows_the_correct_times(set_s: float) -> None:
    now, age_s = procfs.now(), 30.0  # the machine has been running for longer
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
    assert holder.record.since == written.since  # joined processes recognize it by this value
    lasting = holder._replace(record=holder.record._replace(overdue=None, kept_until=None))
    assert durations.end(lasting, now.wall) == holder.lease.until


def test_record_of_an_earlier_version_uses_the_wall_clock() -> None:
    fields = {"since": 5000.0, "written": 5000.0, "until": 9000.0, "overdue": 9000.0}
    holder = named(Record.from_dict(fields), 1, 5000.0)
    assert (holder.since, holder.lease.until, holder.record.overdue) == (5000.0, 9000.0, 9000.0)
    assert holder.lease.until_boot is holder.last_cell is None


@pytest.mark.parametrize("boot", [-1, 1e300, float("nan"), True, "1", [], 1e11, 0])
def test_forged_boot_time_is_harmless(boot: object) -> None:
    fields = {"since": 5e9, "since_boot": boot, "written": 5e9, "written_boot": boot}
    fields |= {"until": 5e9, "until_boot": boot, "overdue": 5e9, "kept_until": 5e9}
    now, record = procfs.now(), Record.from_dict(fields)
    holder = named(record, 1, now.wall)
    assert phrases.plain(phrases.holder_line(holder, now.wall))
    assert (record.taken(now) or now).boot <= now.boot
    assert (holder.since or 0.0) >= 0


@pytest.mark.parametrize(
    ("stamped_s", "set_s", "last_s"),
    [
        pytest.param(-600, 0, -600, id="never set"),
        pytest.param(-600 - DECADES_S, DECADES_S, -600, id="set forward after the cell"),
        pytest.param(-600, DECADES_S, -600, id="set forward before the cell"),
        pytest.param(-600 + HOUR_S, -HOUR_S, -600, id="set back after the cell"),
        pytest.param(-600, -HOUR_S, -600, id="set back before the cell"),
        pytest.param(-2 * HOUR_S, HOUR_S, -HOUR_S, id="unknown, so the shorter idle time counts"),
    ],
)
def test_clock_change_does_not_lengthen_the_idle_time(
    stamped_s: float, set_s: float, last_s: float
) -> None:
    now = procfs.now()
    wrote = now.later(-5 * HOUR_S)
    record = Record(written=wrote.wall - set_s, written_boot=wrote.boot)
    last_cell = named(record, 1, now.wall + stamped_s).last_cell
    assert last_cell == pytest.approx(now.wall + last_s, abs=1)


def test_holder_is_recognized_after_the_clock_was_set_forward(tmp_path: Path) -> None:
    """A process that started before its record was written is the holder, despite the ctime.

    Process 1 stands in for the holder, because the test can't see its open files.
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
