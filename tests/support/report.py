"""History lines, the totals of the recorded history, and reports as values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reserve_gpu.commands.report import totals
from reserve_gpu.commands.report.totals import Hours, Idle, summed
from reserve_gpu.commands.report.usage_view import Report
from reserve_gpu.log import log_reader
from reserve_gpu.log.log_lines import Kind, LogLine
from tests.support.histories import DAY_S, HOUR_S

if TYPE_CHECKING:
    from collections.abc import Mapping


AT = 1761300000 - 1761300000 % HOUR_S  # 2025-10-24, at the start of an hour
NOW = AT + 30 * DAY_S
TUESDAY = time.mktime((2026, 11, 24, 16, 15, 30, 0, 0, -1))
HOSTILE = "\x1b[31m<b>=1\u202e\n" * 20

WEEK = {"alice": Hours(31, 9.3, 20.5), "bob": Hours(22, 19.8, 1.3), "dave": Hours(3, 2.9, 0.0)}
FORGOTTEN = Idle("alice", "train.ipynb", ("GPU0",), TUESDAY - DAY_S, 20.5)
WEEKLY = Report(
    "user", WEEK, WEEK, (FORGOTTEN,), TUESDAY - 7 * DAY_S, TUESDAY, 7.0 * DAY_S, "gpu-box"
)
# A report with every column, wide letters, right-to-left letters and control characters.
ROWS = {
    "alice": Hours(31, 9, 22, 0.5, 1.25),
    "bob": Hours(22.5, 20, 0.03),
    "\u540d\u524d" * 20: Hours(12, 2, 6),
    HOSTILE: Hours(0.02, 0.01, 0.01),
    "\u0627\u0644": Hours(),
}
DAYS = {"2026-11-18": Hours(40, 20, 15, 0.5, 1.25), "2026-11-21": Hours(25.52, 11, 13)}
IDLE = (
    Idle("alice", "train.ipynb", ("GPU0", "GPU1", "GPU2"), TUESDAY - DAY_S, 22.0),
    Idle(HOSTILE, HOSTILE, (HOSTILE,), TUESDAY - 9 * DAY_S, 9.0),
)
REPORT = WEEKLY._replace(rows=ROWS, days=DAYS, longest_idle=IDLE)


def log_line(**changes: Any) -> LogLine:
    """Return a history line for one hour on GPU0, half of which was used."""
    line = LogLine(
        Kind.RESERVED, "a1", AT, AT, AT + HOUR_S, 3600.0, 1800.0, 1800.0, gpu="GPU-1",
        label="GPU0", name="train.ipynb",
    )  # fmt: skip
    return line._replace(**changes)


def recorded_summary(by: str = "user", since: float = 0) -> totals.Summary:
    """Return the totals of the history directory that the environment names."""
    return summed(log_reader.since(since, NOW, set()), by)


def recorded_hours(since: float = 0) -> Hours:
    """Return the sum of all hours in the history directory."""
    return totals.together(recorded_summary(since=since).days.values())


def rounded(rows: Mapping[str, Hours]) -> dict[str, list[float]]:
    """Return the rows as lists of numbers with six decimal places."""
    return {name: [round(value, 6) for value in hours] for name, hours in rows.items()}
