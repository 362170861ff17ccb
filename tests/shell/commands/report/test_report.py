"""`reserve-gpu report` on this machine's usage history."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.report import totals
from reserve_gpu.commands.report.totals import Hours
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.model.requests import End
from tests.support.histories import (
    DAY_S,
    HOUR_S,
    Histories,
)
from tests.support.report import (
    AT,
    NOW,
    log_line,
    recorded_hours,
    recorded_summary,
    rounded,
)

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


PART = {"share": 0.25, "used_s": 3600.0, "idle_s": 0.0, "over_s": 900.0}


@pytest.mark.parametrize(
    ("entries", "by", "rows"),
    [
        pytest.param(
            [log_line(**PART)], "gpu", {"GPU-1": Hours(0.25, 0.25, 0, 0.0625)}, id="a part"
        ),
        pytest.param(
            [log_line(kind=Kind.WAITED, seconds=7200.0, gpu=None, how=End.GRANTED), log_line()],
            "notebook",
            {"train.ipynb": Hours(1, 0.5, 0.5, waited=2)},
            id="a wait",
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


def test_report_of_the_first_minutes(kept: Histories, typed: CommandLine) -> None:
    """A history that started some seconds ago has no totals; a longer or older one has."""
    now = time.time()
    new = log_line(since=now, start=now, end=now + 9, seconds=9.0, used_s=None, idle_s=None)
    kept.write([new])
    assert "started recently" in typed("report").stdout
    for entry in (log_line(start=now - 60, id="b1"), log_line(start=now - 40 * DAY_S, id="c1")):
        kept.write([new, entry])
        text = typed("report").stdout
        assert "started recently" not in text
        assert "GPU-hours" in text
