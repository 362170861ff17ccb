"""`reserve-gpu report`: periods, totals, and reports as values, JSON and HTML."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from reserve_gpu.commands.export import html_page
from reserve_gpu.commands.report import accounting, totals
from reserve_gpu.commands.report.totals import Hours, summed
from reserve_gpu.commands.report.usage_view import read_report
from reserve_gpu.log.log_reader import Logged
from reserve_gpu.model import parsing
from reserve_gpu.model.untrusted import FormatError
from reserve_gpu.render import terminal
from tests.support.machine import ROOT
from tests.support.report import (
    DAYS,
    HOSTILE,
    IDLE,
    REPORT,
    ROWS,
    TUESDAY,
    WEEKLY,
    log_line,
)


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        ("user", {"b": Hours(1, 0.5, 0.5), "c": Hours(1, 0.5, 0.5)}),
        ("notebook", dict.fromkeys(("b: train.ipynb", "c: train.ipynb"), Hours(1, 0.5, 0.5))),
        ("gpu", {"GPU-1": Hours(1, 0.5, 0.5), "GPU-2": Hours(1, 0.5, 0.5)}),
    ],
)
def test_many_names_of_a_user_keep_the_rows_of_others(by: str, rows: dict[str, Hours]) -> None:
    """The rows of other users stay complete if one user's history has too many names."""
    others = [Logged("b", log_line()), Logged("c", log_line(gpu="GPU-2", label="GPU1"))]
    many = [
        Logged("a", log_line(id=f"i{n}", name=f"n{n}", gpu=f"GPU-x{n}"))
        for n in range(totals.MOST_NAMES + 2)
    ]
    found = summed([*many, *others], by)
    assert {name: found.rows.get(name) for name in rows} == rows
    assert ("a: others" in found.rows) == (by != "user")
    assert len(found.labels["a"]) == totals.MOST_GPUS
    assert found.labels["b"] == {"GPU-1": "GPU0"}


def test_reservation_with_less_than_an_idle_hour_is_not_listed() -> None:
    for idle_s, count in ((3600.0, 1), (3599.0, 0)):
        assert len(summed([Logged("a", log_line(idle_s=idle_s))]).idle) == count


# -- periods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "moment", "lasts_s"),
    [
        ("7d", (2026, 11, 17, 16, 0), 604800),
        ("today", (2026, 11, 24, 0, 0), None),
        ("yesterday 18:00", (2026, 11, 23, 18, 0), None),
        ("Tue", (2026, 11, 24, 0, 0), None),
        ("wednesday", (2026, 11, 18, 0, 0), None),
        ("Tue 18:00", (2026, 11, 17, 18, 0), None),
        ("18:00", (2026, 11, 23, 18, 0), None),
        ("2026-11-01", (2026, 11, 1, 0, 0), None),
        ("2026-11-01 18:30", (2026, 11, 1, 18, 0), None),
    ],
)
def test_since(text: str, moment: tuple[int, ...], lasts_s: float | None) -> None:
    """A period starts at the full hour, in local time."""
    expected = time.mktime((*moment, 0, 0, 0, -1))  # type: ignore[arg-type] # nine numbers
    assert parsing.parse_since(text, TUESDAY) == (expected, lasts_s)


def test_since_the_epoch() -> None:
    """A time with an @ is exact to the second, and no period starts before the epoch."""
    assert parsing.parse_since("@1793750455", TUESDAY) == (1793750455, None)
    assert parsing.parse_since("99999d", TUESDAY)[0] == 0


def test_example_in_the_documents() -> None:
    """docs/report.md starts with the report of a week in a terminal of 72 columns."""
    page = (ROOT / "docs" / "report.md").read_text()
    typed, *example = page.split("```")[1].splitlines()[1:]
    assert typed == "$ sudo reserve-gpu report"
    assert example == terminal.lines(WEEKLY.picture().layout, 72, is_colored=False)


# -- tables ----------------------------------------------------------------------------------------


def test_only_the_largest_rows_are_shown() -> None:
    """The last row of a long table totals the remaining rows."""
    rows = {f"n{number:03}": Hours(number, number) for number in range(200)}
    lines = str(REPORT._replace(rows=rows, by="notebook").picture()).splitlines()
    assert any(line.startswith("161 more") for line in lines)
    assert sum(line.startswith("n1") for line in lines) == 39


@pytest.mark.parametrize(
    ("by", "rows", "order"),
    [
        ("gpu", {"GPU10": Hours(9), "GPU2": Hours(1)}, ["GPU2", "GPU10"]),
        ("day", dict(reversed(DAYS.items())), [*DAYS]),
        ("user", {"carol": Hours(1), "bob": Hours(1), "zoe": Hours(2)}, ["zoe", "bob", "carol"]),
    ],
)
def test_row_order(by: str, rows: dict[str, Hours], order: list[str]) -> None:
    """GPUs and days are in natural order; other rows are sorted by reserved hours, then name."""
    report = REPORT._replace(by=by, rows=rows)
    assert [row["name"] for row in report.to_dict()["rows"]] == order


# -- JSON and HTML ---------------------------------------------------------------------------------


def test_report_survives_its_json() -> None:
    plain = {name: hours for name, hours in ROWS.items() if name != HOSTILE}
    report = REPORT._replace(rows=plain, longest_idle=IDLE[:1], cut=("nina",), is_kept=False)
    fields = json.loads(json.dumps(report.to_dict()))
    assert read_report(fields).to_dict() == fields


NESTED: Any = []
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": [{}, 3, None, NESTED, {"name": 7, "reserved_hours": "x"}]},
        {"rows": [{"name": f"n{n}", "reserved_hours": 10**400} for n in range(20_000)]},
        {"rows": [], "longest_idle": [{"gpus": NESTED, "since": "x"}, {"gpus": [HOSTILE] * 9999}]},
    ],
)
def test_hostile_report_of_another_host_is_bounded(fields: dict[str, Any]) -> None:
    """The text of another host's report is bounded and has no control characters."""
    read = read_report({"version": 1, "host": HOSTILE, **fields})
    merged = accounting.merged({"lab1": read}, "user")
    for text in (str(merged.picture()), str(read.picture())):
        assert len(text) < 60_000
        assert not {letter for letter in text if not letter.isprintable()} - {"\n"}
    page = html_page.page(merged, "")
    assert "<b>=" not in page
    assert len(page) < 500_000
    assert len(merged.rows) <= 12_000
    json.dumps(merged.to_dict())


@pytest.mark.parametrize("answer", [None, {}, {"version": 1}, {"version": 2, "rows": []}])
def test_invalid_report_of_another_host_is_refused(answer: object) -> None:
    with pytest.raises(FormatError):
        read_report(answer)


def test_reports_of_several_hosts_are_merged() -> None:
    """Users and days are summed over the hosts, and the names of GPUs start with the host."""
    one = REPORT._replace(rows={"alice": Hours(1, 1), "bob": Hours(2)}, user="alice", cut=("b",))
    two = one._replace(rows={"alice": Hours(3, 0, 3)}, longest_idle=IDLE[:1] * 5, is_kept=False)
    merged = accounting.merged({"lab1": one, "lab2": two}, "user")
    assert merged.rows == {"alice": Hours(4, 1, 3), "bob": Hours(2)}
    assert merged.total.reserved == pytest.approx(2 * REPORT.total.reserved)
    assert merged.longest_idle[0].gpus == ("lab1:GPU0", "lab1:GPU1", "lab1:GPU2")
    assert len(merged.longest_idle) == totals.MOST_IDLE
    assert (merged.user, merged.is_kept, merged.cut) == ("alice", True, ("b",))
    by_gpu = one._replace(by="gpu", rows={"GPU0": Hours(1)}, user="bob", is_kept=False)
    merged = accounting.merged({"lab1": by_gpu, "lab2": by_gpu._replace(user="carol")}, "gpu")
    assert set(merged.rows) == {"lab1:GPU0", "lab2:GPU0"}
    assert (merged.user, merged.is_kept) == (None, False)


def test_page_escapes_the_text_of_other_users() -> None:
    """The page has two tables, no link and no script, and the users' text is escaped."""
    report = REPORT._replace(host=HOSTILE, problems={"lab3": HOSTILE})
    page = html_page.page(report, "GPU-hours")
    assert page.count("<table") == 2
    assert "<b>=" not in page
    assert "&lt;b&gt;=" in page
    assert not re.search("(?:src|href)=|<script|http", page)
