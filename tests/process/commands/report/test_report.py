"""`reserve-gpu report` of several users, across clock changes, and on a terminal."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.histories import DAY_S, FIRST_UID, HOUR_S, Histories, Stay, month_file
from tests.support.locked import needs_root
from tests.support.report import AT, log_line, recorded_summary
from tests.support.users import DAEMON, NOBODY, as_user, for_users

if TYPE_CHECKING:
    from tests.support.here import Here

REPORT = (sys.executable, "-m", "reserve_gpu", "report")


@pytest.mark.parametrize(
    ("first", "day", "hours"),
    [(1761429600, "2025-10-26", 25.0), (1743289200, "2025-03-30", 23.0)],
    ids=["autumn", "spring"],
)
def test_day_of_a_clock_change(
    kept: Histories, here: Here, first: int, day: str, hours: float
) -> None:
    """A whole day in Berlin has 25 hours when clocks go back, and 23 when they go forward."""
    kept.write(Stay(0, 0, first, int(hours) * HOUR_S).lines())
    options = ("--json", "--by", "day", "--since", f"@{first - 3 * DAY_S}")
    done = here.command(*REPORT, *options, TZ="Europe/Berlin", RESERVE_GPU_HISTORY=str(kept.folder))
    found = {row["name"]: row["reserved_hours"] for row in json.loads(done.stdout)["rows"]}
    assert found == {day: hours}


@needs_root
def test_only_the_owner_of_a_folder_writes_its_history(kept: Histories) -> None:
    """A file of another owner, and a folder with the name of another user, are not read."""
    for uid in range(FIRST_UID, FIRST_UID + 3):
        kept.write([log_line()], uid)
    os.chown(month_file(kept.of(FIRST_UID), AT), FIRST_UID + 1, FIRST_UID)
    (kept.folder / str(FIRST_UID + 1)).rename(kept.folder / str(FIRST_UID + 5))
    assert set(recorded_summary().rows) == {f"uid {FIRST_UID + 2}"}


WRITE_HISTORY = """
import os, time
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine
at = time.time() - 7200
folder = places.to_write(None)
page = log_writer.Page.new(os.dup(folder))
lines = [LogLine(Kind.RESERVED, "a1", at, at, at + 3600, 3600.0, 3600.0, 0.0, gpu="GPU-1")]
page.write(lines)
page.turn(lines)
page.write([lines[0]._replace(start=at + 3600, seconds=1800.0, used_s=0.0, idle_s=1800.0)])
"""


@pytest.mark.xdist_group("users")
def test_users_read_only_their_own_history() -> None:
    """Root reads the histories of all users, and other users read only their own."""
    with for_users() as machine:
        histories = Histories(machine.folder / "history")
        extra = {"RESERVE_GPU_HISTORY": str(histories.folder), "HOME": "/nonexistent"}

        def run_python(user: str, *words: str) -> str:
            done = machine.command(*as_user(user), sys.executable, *words, **extra)
            assert done.returncode == 0, done.stderr
            return done.stdout

        for user in (NOBODY, DAEMON):
            run_python(user, "-c", WRITE_HISTORY)
        for user, covered, rows in (
            ("root", None, {NOBODY: 1.5, DAEMON: 1.5}),
            (NOBODY, NOBODY, {NOBODY: 1.5}),
            (DAEMON, DAEMON, {DAEMON: 1.5}),
        ):
            report = json.loads(run_python(user, *REPORT[1:], "--json"))
            assert report["user"] == covered
            assert {row["name"]: row["reserved_hours"] for row in report["rows"]} == rows
        folder = next(path for path in histories.folder.iterdir() if path.owner() == DAEMON)
        code = f"import os; print(os.access({str(folder)!r}, os.R_OK | os.X_OK))"
        assert run_python(NOBODY, "-c", code) == "False\n"
