"""`reserve-gpu report` on this machine's usage history."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.report import totals
from reserve_gpu.commands.report.totals import Hours
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.model.requests import End
from reserve_gpu.system import procfs
from tests.support.histories import (
    DAY_S,
    DAYS,
    FIRST_UID,
    HOUR_S,
    PEOPLE,
    Histories,
    Stay,
    write_year,
    year,
)
from tests.support.report import (
    AT,
    NOW,
    expected_hours,
    log_line,
    notebook_row,
    recorded_hours,
    recorded_summary,
    rounded,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.commandline import CommandLine
    from tests.support.here import Here


@pytest.mark.parametrize(
    ("people", "days"),
    [
        pytest.param(3, 5, id="a week"),
        pytest.param(PEOPLE, DAYS, id="a year", marks=pytest.mark.full),
    ],
)
def test_totals_equal_the_reservations(kept: Histories, people: int, days: int) -> None:
    """The totals by each key equal the reserved hours, and a year needs less than 50 MB."""
    now = time.time()
    stays = year(now, people, days)
    write_year(kept, stays)
    assert kept.size() < 50e6
    keys: dict[str, Callable[[Stay], str]] = {
        "notebook": notebook_row,
        "gpu": lambda stay: stay.uuid,
        "day": lambda stay: datetime.fromtimestamp(stay.start).strftime("%Y-%m-%d"),  # noqa: DTZ006
    }
    if not os.geteuid():
        keys["user"] = lambda stay: f"uid {FIRST_UID + stay.person}"
    for by, key in keys.items():
        summary = recorded_summary(by, now - 366 * DAY_S, now)
        found = {name: hours[:3] for name, hours in rounded(summary.rows).items()}
        assert found == expected_hours(stays, key), by
    seconds = sum(stay.seconds for stay in stays)
    assert totals.together(summary.days.values()).unknown == pytest.approx(seconds / 3600 / 8)


PART = {"share": 0.25, "used_s": 3600.0, "idle_s": 0.0, "over_s": 900.0}


@pytest.mark.parametrize(
    ("entries", "by", "rows"),
    [
        pytest.param(
            [log_line(), log_line(id="b2")], "gpu", {"GPU-1": Hours(2, 1, 1)}, id="overlapping"
        ),
        pytest.param(
            [log_line(**PART)], "gpu", {"GPU-1": Hours(0.25, 0.25, 0, 0.0625)}, id="a part"
        ),
        pytest.param(
            [
                log_line(seconds=600.0, used_s=600.0, idle_s=0.0, how=End.RESTART),
                log_line(id="b2", start=AT + 601, seconds=1200.0, used_s=None, idle_s=None),
            ],
            "notebook",
            {"train.ipynb": Hours(0.5, 1 / 6)},
            id="a restart",
        ),
        pytest.param(
            [log_line(kind=Kind.WAITED, seconds=7200.0, gpu=None, how=End.GRANTED), log_line()],
            "notebook",
            {"train.ipynb": Hours(1, 0.5, 0.5, waited=2)},
            id="a wait",
        ),
        pytest.param(
            [log_line(kind=Kind.WAITED, seconds=99_999.0, gpu=None, how=End.GAVE_UP)],
            "gpu",
            {},
            id="a wait has no GPU",
        ),
        pytest.param(
            [log_line(start=AT + HOUR_S, end=AT + 600, seconds=600.0, used_s=600.0, idle_s=0.0)],
            "gpu",
            {"GPU-1": Hours(1 / 6, 1 / 6)},
            id="a clock that was set back",
        ),
    ],
)
def test_line_adds_its_monotonic_seconds(
    kept: Histories, entries: list[LogLine], by: str, rows: dict[str, Hours]
) -> None:
    """A line adds the elapsed monotonic time, times its share of the GPU."""
    kept.write(entries)
    assert rounded(recorded_summary(by).rows) == rounded(rows)


def test_only_lines_of_the_period_count(kept: Histories) -> None:
    kept.write([log_line(start=AT - 1), log_line(start=AT), log_line(start=NOW + 2 * DAY_S)])
    assert recorded_hours(since=AT).reserved == 1


def test_longest_idle_reservations(kept: Histories) -> None:
    """The idle time of a reservation is summed over its hours and devices."""
    for number in range(9):
        kept.write(
            log_line(id=f"r{number}", start=AT + hour * HOUR_S, used_s=0.0, idle_s=3600.0,
                     gpu=f"GPU-{hour % 2}", label=f"GPU{hour % 2}",
                     name=f"n{number}" if hour else None)
            for hour in range(number)
        )  # fmt: skip
    longest = recorded_summary().idle
    assert [(idle.name, idle.idle_hours) for idle in longest[:2]] == [("n8", 8.0), ("n7", 7.0)]
    assert longest[0].gpus == ("GPU0", "GPU1")
    assert len(longest) == totals.MOST_IDLE


def report_json(typed: CommandLine, *options: str) -> Any:
    """Return the parsed output of `reserve-gpu report --json`."""
    return json.loads(typed("report", "--json", *options).stdout)


def gpu_rows(typed: CommandLine) -> list[str]:
    """Return the names of the rows of a report by GPU."""
    return [row["name"] for row in report_json(typed, "--by", "gpu")["rows"]]


def test_label_of_the_driver_replaces_the_label_in_the_history(
    kept: Histories, typed: CommandLine, here: Here
) -> None:
    kept.write([log_line(start=time.time() - 60, gpu=here.uuid("1"), label="GPU7 (broken)")])
    assert gpu_rows(typed) == ["GPU1"]


def test_gpus_with_the_same_label_are_two_rows(kept: Histories, typed: CommandLine) -> None:
    for uuid in ("GPU-11111111-x", "GPU-22222222-x"):
        kept.write([log_line(start=time.time() - 60, gpu=uuid, id=uuid)])
    assert gpu_rows(typed) == ["GPU0 GPU-11111111", "GPU0 GPU-22222222"]


def test_report_without_a_history(kept: Histories, typed: CommandLine, here: Here) -> None:
    """Without a history, the report names the configuration file and does not call the driver."""
    shutil.rmtree(kept.folder)
    done = typed("report")
    assert (done.code, done.stderr) == (0, "")
    assert f"{here.home}/.config/reserve_gpu.toml" in done.stdout
    assert report_json(typed)["is_kept"] is False
    assert here.calls() == []


def test_report_of_an_empty_period(kept: Histories, typed: CommandLine) -> None:
    """A history without lines in the period is enabled, and its totals are zero."""
    for entries in ([], [log_line()]):
        kept.write(entries)
        report = report_json(typed, "--since", "1h")
        assert (report["is_kept"], report["rows"]) == (True, [])
        assert "reserve_gpu.toml" not in typed("report", "--since", "1h").stdout


@pytest.mark.parametrize("form", ["text", "html"])
def test_report_of_the_first_minutes(kept: Histories, typed: CommandLine, form: str) -> None:
    """A history that started some seconds ago has no totals; a longer or older one has."""
    now = time.time()
    new = log_line(since=now, start=now, end=now + 9, seconds=9.0, used_s=None, idle_s=None)
    kept.write([new])
    assert "started recently" in typed("report", "--format", form).stdout
    for entry in (log_line(start=now - 60, id="b1"), log_line(start=now - 40 * DAY_S, id="c1")):
        kept.write([new, entry])
        text = typed("report", "--format", form).stdout
        assert "started recently" not in text
        assert "GPU-hours" in text


def test_rows_by_each_key(kept: Histories, typed: CommandLine) -> None:
    start = time.time() - 90
    kept.write([log_line(start=start)])
    rows = {
        "user": procfs.user_name(os.geteuid()),
        "notebook": "train.ipynb",
        "gpu": "GPU0",
        "day": time.strftime("%Y-%m-%d", time.localtime(start)),
    }
    for by, name in rows.items():
        report = report_json(typed, "--by", by)
        assert (report["by"], [row["name"] for row in report["rows"]]) == (by, [name])
        assert name in typed("report", "--by", by).stdout


@pytest.mark.parametrize("option", ["--since=soon", "--by=gpus", "--format=xml", "--sinse=7d"])
def test_invalid_option_is_a_usage_error(typed: CommandLine, option: str) -> None:
    done = typed("report", option)
    assert (done.code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
