"""The text of `reserve-gpu report`, for chosen reports and widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.report.totals import Hours
from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError
from reserve_gpu.render import terminal
from tests.support.histories import DAY_S
from tests.support.report import HOSTILE, REPORT, ROWS, TUESDAY, WEEK, WEEKLY

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.commands.report.usage_view import Report

PLAIN = REPORT._replace(
    rows={name: hours for name, hours in ROWS.items() if name != HOSTILE},
    longest_idle=REPORT.longest_idle[:1],
)
EMPTY = WEEKLY._replace(rows={}, days={}, longest_idle=())


@pytest.mark.parametrize("width", [160, 45, 20])
def test_report_in_a_terminal(width: int, snapshot: SnapshotAssertion) -> None:
    """A narrow terminal shows no bars, then shorter names, then fewer columns."""
    lines = terminal.lines(PLAIN.picture().layout, width, is_colored=False)
    assert "\n".join(line.rstrip() for line in lines) == snapshot


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(WEEKLY._replace(by="gpu", rows={"GPU0": WEEK["bob"]}), id="by GPU, one row"),
        pytest.param(WEEKLY._replace(user="alice"), id="one user"),
        pytest.param(WEEKLY._replace(cut=("nina",)), id="too many history lines"),
        pytest.param(
            WEEKLY._replace(
                host="lab1, lab2", problems={"lab2": "no answer within 5 s. Try: ssh lab2"}
            ),
            id="a host that does not respond",
        ),
        pytest.param(EMPTY._replace(has_answers=False), id="no host responds"),
        pytest.param(EMPTY, id="nothing reserved"),
        pytest.param(EMPTY._replace(is_new=True), id="history started today"),
        pytest.param(
            EMPTY._replace(is_kept=False, file="/home/alice/.config/reserve_gpu.toml"),
            id="history disabled",
        ),
    ],
)
def test_report(report: Report, snapshot: SnapshotAssertion) -> None:
    assert str(report.picture()) == snapshot


TOTAL = Hours(31, 9, 22)


@pytest.mark.parametrize(
    ("total", "lasts_s"),
    [
        pytest.param(TOTAL, DAY_S, id="one day"),
        pytest.param(TOTAL, 5400, id="hours and minutes"),
        pytest.param(Hours(1), 7 * DAY_S, id="usage unknown"),
        pytest.param(Hours(0.03), 7 * DAY_S, id="less than 0.1 hours"),
    ],
)
def test_first_line(total: Hours, lasts_s: float | None, snapshot: SnapshotAssertion) -> None:
    """The first line states the reserved and the idle hours, and the period."""
    report = WEEKLY._replace(days={"2026-11-18": total}, lasts_s=lasts_s)
    assert str(report.picture()).splitlines()[0] == snapshot


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("2026-11-24 17:00", id="an hour in the future"),
        pytest.param("7", id="no unit"),
        pytest.param("\x1b[2J", id="control characters"),
    ],
)
def test_invalid_since(text: str, snapshot: SnapshotAssertion) -> None:
    with pytest.raises(RequestError) as error:
        parsing.parse_since(text, TUESDAY)
    assert str(error.value) == snapshot
