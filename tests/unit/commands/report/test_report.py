"""`reserve-gpu report`: what is read of histories, what it sums up to, and how it is shown."""

from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
import wcwidth

from reserve_gpu.commands.export import html_page
from reserve_gpu.commands.report import accounting, totals
from reserve_gpu.commands.report.totals import Hours, Idle, summed
from reserve_gpu.commands.report.usage_view import Report, read_report
from reserve_gpu.log.log_reader import Logged
from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import FormatError
from reserve_gpu.render import html, phrases, terminal
from reserve_gpu.render.tables import Column, Sheet, in_columns, rows
from tests.support.histories import (
    DAY_S,
    FIRST_UID,
    HOUR_S,
    Histories,
    Stay,
    write_year,
    year,
)
from tests.support.lab import CHROMIUM, FLAGS
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


from tests.support.report import ROWS, intended, line, notebook_of, rounded, sums

AT = 1761300000 - 1761300000 % HOUR_S  # 2025-10-24, at the beginning of an hour
NOW = AT + 30 * DAY_S


@pytest.mark.full
def test_a_year(kept: Histories) -> None:
    """A year of 20 people sums up to what they meant, by each key, on less than 50 MB."""
    now = time.time()
    stays = year(now)
    assert write_year(kept, stays) > 40_000
    assert kept.size() < 50e6
    keys: dict[str, Callable[[Stay], str]] = {
        "notebook": notebook_of,
        "gpu": lambda stay: stay.uuid,
        "day": lambda stay: datetime.fromtimestamp(stay.start).strftime("%Y-%m-%d"),  # noqa: DTZ006
    }
    if not os.geteuid():
        keys["user"] = lambda stay: f"uid {FIRST_UID + stay.person}"
    for by, key in keys.items():
        summary = sums(by, now - 366 * DAY_S, now)
        found = {name: hours[:3] for name, hours in rounded(summary.rows).items()}
        assert found == intended(stays, key), by
    whole = sum(stay.seconds for stay in stays) / 3600
    reserved = totals.together(summary.days.values())
    assert reserved.reserved == pytest.approx(whole)
    assert reserved.unknown == pytest.approx(whole / 8)


@pytest.mark.full
def test_a_million_of_names_are_bounded() -> None:
    """However many names and reservations there are, few are kept, and no hour is lost."""
    count = 3 * totals.MOST_RESERVATIONS
    lines = (Logged("a", line(id=f"i{n}", name=f"n{n}", idle_s=3600.0)) for n in range(count))
    last = (Logged("a", line(id="long", idle_s=3600.0)) for _ in range(9))
    summary = summed((each for those in (last, lines) for each in those), "notebook")
    assert len(summary.rows) == totals.MOST_NAMES + 1
    assert "others" in summary.rows
    assert sum(hours.reserved for hours in summary.rows.values()) == pytest.approx(count + 9)
    assert (summary.idle[0].name, summary.idle[0].idle_hours) == ("train.ipynb", 9.0)


@pytest.mark.parametrize("by", ["user", "notebook", "gpu", "day"])
def test_a_users_words_change_no_other_users_row(by: str) -> None:
    """However many names one user writes, the others' rows are as they would be without them."""
    others = [Logged("b", line()), Logged("c", line(id="c1", gpu="GPU-2", label="GPU1"))]
    many = [
        Logged("a", line(id=f"i{n}", name=f"n{n}", gpu=f"GPU-x{n}", start=AT + n * DAY_S))
        for n in range(totals.MOST_NAMES + 2)
    ]
    expected = summed([*others, Logged("a", line(name="n", gpu="GPU-x", start=0.0))], by)
    found = summed([*many, *others], by)
    own = {name for name in expected.rows if not name.startswith(("a", "GPU-x", "19"))}
    assert own
    if by == "day":
        own = set()  # a day is everybody's
    assert {name: found.rows[name] for name in own} == {n: expected.rows[n] for n in own}
    assert found.labels["b"] == {"GPU-1": "GPU0"}


# -- since when ------------------------------------------------------------------------------------

TUESDAY = time.mktime((2026, 11, 24, 16, 15, 30, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "moment", "lasts_s"),
    [
        ("7d", (2026, 11, 17, 16, 0), 604800),
        ("12h", (2026, 11, 24, 4, 0), 43200),
        ("1h30m", (2026, 11, 24, 14, 0), 5400),
        ("today", (2026, 11, 24, 0, 0), None),
        ("Yesterday", (2026, 11, 23, 0, 0), None),
        ("yesterday 18:00", (2026, 11, 23, 18, 0), None),
        ("Mon", (2026, 11, 23, 0, 0), None),
        ("Tue", (2026, 11, 24, 0, 0), None),
        ("wednesday", (2026, 11, 18, 0, 0), None),
        ("Tue 18:00", (2026, 11, 17, 18, 0), None),
        ("18:00", (2026, 11, 23, 18, 0), None),
        ("9am", (2026, 11, 24, 9, 0), None),
        ("2026-11-01", (2026, 11, 1, 0, 0), None),
        ("2026-11-01 18:30", (2026, 11, 1, 18, 0), None),
    ],
)
def test_since(text: str, moment: tuple[int, ...], lasts_s: float | None) -> None:
    """A time back, a day or a moment means the beginning of that hour, in local time."""
    expected = time.mktime((*moment, 0, 0, 0, -1))  # type: ignore[arg-type] # nine numbers
    assert parsing.parse_since(text, TUESDAY) == (expected, lasts_s)


def test_since_the_epoch() -> None:
    """With an @ it is that very second; no time back reaches before the epoch."""
    assert parsing.parse_since("@1793750455", TUESDAY) == (1793750455, None)
    assert parsing.parse_since("99999d", TUESDAY)[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tomorrow", "in the future. The local time is 2026-11-24 16:15"),
        ("2027-01-01", "in the future"),
        ("2026-11-24 17:00", "in the future"),
        ("@9999999999", "in the future"),
        ("7", "7 has no unit. Use 7s, 7m, 7h or 7d"),
        ("soon", "'soon' is not a valid time. Examples: 7d, 12h, yesterday"),
        ("-7d", "is not a valid time"),
        ("2026-02-30", "is not a valid time"),
        ("t", "is not a valid time"),
        ("", "is not a valid time"),
        ("\x1b[2J", "'\ufffd\\[2J' is not a valid time"),
    ],
)
def test_since_what_makes_no_sense(text: str, said: str) -> None:
    """What is no time, or still to come, is one line that says what to type."""
    with pytest.raises(RequestError, match=said) as caught:
        parsing.parse_since(text, TUESDAY)
    assert "\n" not in str(caught.value)


# -- how it is shown -------------------------------------------------------------------------------

HOSTILE = "\x1b[31m<b>=1\u202e\n" * 20
DAYS = {"2026-11-18": Hours(40, 20, 15, 0.5, 1.25), "2026-11-21": Hours(25.52, 11, 13)}
IDLE = (
    Idle("alice", "train.ipynb", ("GPU0", "GPU1", "GPU2"), TUESDAY - DAY_S, 22.0),
    Idle(HOSTILE, HOSTILE, (HOSTILE,), TUESDAY - 9 * DAY_S, 9.0),
)
REPORT = Report("user", ROWS, DAYS, IDLE, TUESDAY - 7 * DAY_S, TUESDAY, 7.0 * DAY_S, "gpu-box")
STYLED = re.compile("\x1b\\[[0-9;]*m")


def shown(report: Report, width: int, *, is_colored: bool = False) -> list[str]:
    return terminal.lines(report.picture().layout, width, is_colored=is_colored)


def titles(report: Report, width: int) -> list[str]:
    """Return the titles of the first table's columns, with a mark for the bars."""
    lines = shown(report, width)
    place = next(n for n, each in enumerate(lines) if each.startswith(("user", "notebook", "GPU")))
    bars = ["bars"] if "\N{FULL BLOCK}" in "".join(lines) else []
    return bars + lines[place].split()


WEEK = {"alice": Hours(31, 9.3, 20.5), "bob": Hours(22, 19.8, 1.3), "dave": Hours(3, 2.9, 0.0)}
FORGOTTEN = Idle("alice", "train.ipynb", ("GPU0",), TUESDAY - DAY_S, 20.5)


def test_the_example_of_the_page() -> None:
    """docs/report.md begins with the report of a week as it is in a terminal of 72 columns."""
    page = (ROOT / "docs" / "report.md").read_text()
    typed, *example = page.split("```")[1].splitlines()[1:]
    start = TUESDAY - 7 * DAY_S
    week = Report("user", WEEK, WEEK, (FORGOTTEN,), start, TUESDAY, 7.0 * DAY_S, "gpu-box")
    assert typed == "$ sudo reserve-gpu report"
    assert example == shown(week, 72)


@pytest.mark.parametrize("width", [20, 30, 40, 60, 61, 80, 100, 120, 121, 160, 200])
def test_it_fits_a_terminal(width: int) -> None:
    """No line is wider than the terminal, whatever people call themselves and their notebooks."""
    for each in shown(REPORT, width):
        assert 0 <= wcwidth.wcswidth(each) <= width, each
    coloured = [STYLED.sub("", each) for each in shown(REPORT, width, is_colored=True)]
    assert coloured == shown(REPORT, width)


def test_what_is_left_out_in_a_narrow_terminal() -> None:
    """Where there is little room bars go first, then names are cut, then columns of less worth."""
    short = REPORT._replace(rows={"alice": ROWS["alice"], "bob": ROWS["bob"]})
    figures = ["reserved", "used", "idle", "over", "waited"]
    assert titles(short, 100) == ["bars", "user", *figures]
    assert titles(short, 45) == ["user", *figures]
    assert titles(short, 38) == ["user", "reserved", "used", "idle", "waited"]
    assert titles(short, 30) == ["user", "reserved", "used", "idle"]
    assert titles(short, 20) == ["user", "reserved"]


def test_figures_stand_to_the_right() -> None:
    """The figures of a column end below each other, wide letters or not."""
    lines = shown(REPORT, 160)
    first = next(n for n, each in enumerate(lines) if each.startswith("user"))
    ends = set()
    for each in lines[first : first + 4]:
        match = re.match(r".*?(reserved|31\.0|22\.5|12\.0)", each)
        assert match
        ends.add(wcwidth.wcswidth(match[0]))
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("shares", "length", "columns"),
    [
        ((1.0, 0.0, 0.0), 10, [10, 0, 0]),
        ((0.25, 0.25, 0.5), 8, [2, 2, 4]),
        ((0.5, 0.0, 0.001), 10, [5, 0, 0]),
        ((0.001, 0.0, 0.0), 10, [0, 0, 1]),
        ((0.0, 0.0, 0.0), 10, [0, 0, 0]),
        ((0.6, 0.6, 0.6), 10, [6, 4, 0]),
    ],
)
def test_a_bar_is_as_long_as_its_pieces(
    shares: tuple[float, ...], length: int, columns: list[int]
) -> None:
    """A bar is never longer than it may be, and what is there at all has a column."""
    found = in_columns(shares, length)
    assert sum(found) <= length
    assert sum(found) == sum(columns)
    assert min(found) >= 0
    if sum(columns) > 1:
        assert found == columns


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.0, "0.0"),
        (0.001, "<0.1"),
        (0.049, "<0.1"),
        (0.05, "0.1"),
        (31.04, "31.0"),
        (12345.6, "12345.6"),
    ],
)
def test_figures(hours: float, text: str) -> None:
    """Hours have one digit behind the point, and a little is not nothing."""
    assert phrases.hours(hours) == text


TOTAL = Hours(31, 9, 22)
NOTHING = "No GPU was reserved in the last 7 days."


@pytest.mark.parametrize(
    ("total", "lasts_s", "sentence"),
    [
        (TOTAL, 7 * DAY_S, "31.0 GPU-hours reserved in the last 7 days, 22.0 of them idle."),
        (TOTAL, DAY_S, "31.0 GPU-hours reserved in the last day, 22.0 of them idle."),
        (TOTAL, 12 * HOUR_S, "31.0 GPU-hours reserved in the last 12 hours, 22.0 of them idle."),
        (TOTAL, 5400, "31.0 GPU-hours reserved in the last 1 h 30 min, 22.0 of them idle."),
        (TOTAL, None, "31.0 GPU-hours reserved since 2026-11-17 16:15, 22.0 of them idle."),
        (Hours(1, 1), 7 * DAY_S, "1.0 GPU-hours reserved in the last 7 days, none of them idle."),
        (Hours(1), 7 * DAY_S, "1.0 GPU-hours reserved in the last 7 days."),
        (Hours(0.03), 7 * DAY_S, "Less than 0.1 GPU-hours were reserved in the last 7 days."),
        (Hours(), 7 * DAY_S, NOTHING),
    ],
)
def test_the_first_line(total: Hours, lasts_s: float | None, sentence: str) -> None:
    """The first line says how much was reserved, since when, and how much of it lay idle."""
    report = REPORT._replace(days={"2026-11-18": total}, lasts_s=lasts_s)
    assert str(report.picture()).splitlines()[0] == sentence


def test_no_machine_that_answers() -> None:
    """A report of which no machine has answered doesn't say that nothing was reserved."""
    report = REPORT._replace(days={}, has_answers=False)
    assert str(report.picture()).startswith("No machine answered.\n")


def test_what_could_not_be_read_is_said() -> None:
    """A line says for how long the use could not be read, if that is more than 5 %."""
    assert "for 0.2 of 4.0" not in str(with_unknown(0.2).picture())
    text = str(with_unknown(0.4).picture())
    assert "The usage could not be read for 0.4 of 4.0 GPU-hours." in text


def with_unknown(hours: float) -> Report:
    return REPORT._replace(days={"2026-11-18": Hours(4, 2, 2 - hours)})


def test_long_lists_are_folded() -> None:
    """Of very many rows the smaller ones are one, and the sum is that of all."""
    rows = {f"n{number:03}": Hours(number, number) for number in range(200)}
    lines = str(REPORT._replace(rows=rows, by="notebook").picture()).splitlines()
    assert any(each.startswith("161 more") for each in lines)
    assert sum(each.startswith("n1") for each in lines) == 39


def test_devices_and_days_keep_their_order() -> None:
    """GPU2 stands before GPU10, and days follow each other, whoever has reserved more."""
    rows = {"GPU10": Hours(9), "GPU2": Hours(1)}
    assert [row["name"] for row in REPORT._replace(by="gpu", rows=rows).to_dict()["rows"]] == [
        "GPU2",
        "GPU10",
    ]
    days = REPORT._replace(by="day", rows=dict(reversed(DAYS.items())))
    assert [row["name"] for row in days.to_dict()["rows"]] == [*DAYS]


# -- formats ---------------------------------------------------------------------------------------


def test_a_report_survives_its_json() -> None:
    """What is read from the JSON of a report has the same JSON."""
    plain = {name: hours for name, hours in ROWS.items() if name != HOSTILE}
    said = json.loads(json.dumps(REPORT._replace(rows=plain, longest_idle=IDLE[:1]).to_dict()))
    assert read_report(said).to_dict() == said


NESTED: Any = []
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": [{}, 3, None, NESTED, {"name": 7, "reserved_hours": "x"}]},
        {"rows": [{"name": HOSTILE * 99, "reserved_hours": 1e308, "idle_hours": -1}]},
        {"rows": [{"name": "a", "reserved_hours": float("nan"), "used_hours": True}]},
        {"rows": [{"name": f"n{n}", "reserved_hours": 10**400} for n in range(20_000)]},
        {"rows": [], "days": [{"name": "2026-99-99", "reserved_hours": 3}, {"name": "9" * 9999}]},
        {"rows": [], "days": [{"name": "0001-01-01", "used_hours": 1}, {"name": "9999-12-31"}]},
        {"rows": [], "days": [{"name": "2026-11-24", "used_hours": 9e10}] * 3},
        {"rows": [], "longest_idle": [{"gpus": NESTED, "since": "x"}, {"gpus": [HOSTILE] * 9999}]},
        {"rows": [], "longest_idle": [{"since": 9e10, "idle_hours": 5}], "problems": 3, "by": []},
    ],
)
def test_a_foreign_answer_is_bounded(fields: dict[str, Any]) -> None:
    """Whatever a host answers is shown in bounded length, without control letters."""
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


@pytest.mark.parametrize("answer", [None, [], {}, {"version": 1}, {"version": 2, "rows": []}])
def test_what_is_no_report_is_refused(answer: object) -> None:
    """JSON that is none of ours is no report without rows."""
    with pytest.raises(FormatError):
        read_report(answer)


def test_several_hosts_are_one_report() -> None:
    """Users and days are summed over the hosts; a GPU is called by its host."""
    one = REPORT._replace(rows={"alice": Hours(1, 1), "bob": Hours(2)}, user=None)
    two = one._replace(rows={"alice": Hours(3, 0, 3)}, longest_idle=IDLE[:1] * 5)
    whole = accounting.merged({"lab1": one, "lab2": two}, "user")
    assert whole.rows == {"alice": Hours(4, 1, 3), "bob": Hours(2)}
    assert whole.total.reserved == pytest.approx(2 * REPORT.total.reserved)
    assert whole.longest_idle[0].gpus == ("lab1:GPU0", "lab1:GPU1", "lab1:GPU2")
    assert len(whole.longest_idle) == totals.MOST_IDLE
    by_gpu = one._replace(by="gpu", rows={"GPU0": Hours(1)})
    both = accounting.merged({"lab1": by_gpu, "lab2": by_gpu}, "gpu")
    assert set(both.rows) == {"lab1:GPU0", "lab2:GPU0"}


# -- the page --------------------------------------------------------------------------------------


def page_of(report: Report) -> str:
    return html_page.page(report, "GPU-hours")


def test_the_page() -> None:
    """The page has both tables, and nothing that somebody else wrote is markup."""
    page = page_of(REPORT._replace(host=HOSTILE, problems={"lab3": HOSTILE}))
    assert page.count("<table") == 2
    assert "<b>=" not in page
    assert "&lt;b&gt;=" in page
    assert not re.search("(?:src|href)=|<script|http", page)


def luminance(colour: str) -> float:
    """Return the relative luminance, as https://www.w3.org/TR/WCAG21 defines it."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
def test_bars_can_be_told_from_the_page(background: str) -> None:
    """Each colour of a bar has a contrast of 3:1 or more with the light and the dark page."""
    for colour in html.PIECES:
        low, high = sorted((luminance(colour), luminance(background)))
        assert (high + 0.05) / (low + 0.05) >= 3


@pytest.mark.full
@pytest.mark.needs("browser")
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(tmp_path: Path, scheme: str) -> None:
    """A real browser shows the page without scrolling sideways, in the colours of its scheme."""
    from playwright.sync_api import sync_playwright

    path = tmp_path / "report.html"
    path.write_text(page_of(REPORT), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for width in (340, 1000):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 600}
            )
            page = context.new_page()
            failed: list[object] = []
            page.on("pageerror", lambda error, seen=failed: seen.append(error))
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            text = page.evaluate("getComputedStyle(document.body).color")
            assert text == ("rgb(31, 35, 40)" if scheme == "light" else "rgb(230, 237, 243)")
            assert failed == []
        browser.close()


@pytest.mark.parametrize(("has_total", "strong"), [(True, ["total", "3"]), (False, [])])
def test_the_total_stands_out(strong: list[str], *, has_total: bool) -> None:
    """The row that sums up the others is in strong letters, and no other is."""
    columns = Column("user", ("alice", "total")), Column("hours", ("1", "3"), is_figure=True)
    lines = rows(Sheet(columns, has_total=has_total), 40)
    styled = [part for line in lines for part in line if isinstance(part, tuple)]
    assert [text for text, style in styled if style == phrases.STRONG] == strong
