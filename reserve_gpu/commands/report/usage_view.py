"""Render a GPU usage report as tables with bars, or as JSON."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.commands.report.totals import KEYS, UNKNOWN, Hours, Idle, together
from reserve_gpu.model.errors import REASON_LIMIT
from reserve_gpu.model.untrusted import Fields, fields_of, sanitize, table
from reserve_gpu.render import durations, phrases
from reserve_gpu.render.layout import Layout
from reserve_gpu.render.phrases import FAINT, MARK, NOTEBOOK_LIMIT, STRONG, TYPED, Line, listed
from reserve_gpu.render.pictures import Picture
from reserve_gpu.render.tables import Column, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


VERSION = 1  # JSON format version; fields are added but never removed
DAY_S, HOUR_S = 86400, 3600
MOST_ROWS = 40  # maximum number of rows, except in a report by day; the last row totals the rest
MOST_DAYS = 366
MOST_HOURS = 12_000  # maximum number of rows read from another machine
LEAST_UNKNOWN = 0.05  # smallest share of unknown hours that a report mentions
BY_DAY = "day"
LEGEND = ("used", "idle", "unknown")
# Each column has a priority and, if needed, an explanation. Narrow screens omit the columns with
# the lowest priority.
COLUMNS = {
    "reserved": (9, ""),
    "used": (7, ""),
    "idle": (8, ""),
    "over": (4, "more memory used than reserved, or use after the reservation's end time"),
    "waited": (5, "hours in the queue"),
}
ALWAYS = ("reserved", "used", "idle")  # columns in which zeros are shown
SWITCH = ("history = true", TYPED)


class Report(NamedTuple):
    """GPU usage during a period.

    Attributes:
        by: How the rows are grouped: `user`, `notebook`, `gpu`, or `day`.
        rows: The hours in each row, by row name.
        days: The hours for each day, by date, such as `2026-11-24`.
        longest_idle: The reservations with the longest idle times.
        since: The start of the period, in seconds since the epoch.
        until: The end of the period, in seconds since the epoch.
        lasts_s: The length of the period, in seconds; None if the user gave a start time.
        host: The machine's name, or the names of several machines.
        user: The user whose history this is; None if the report covers several users.
        is_kept: Whether a history is kept.
        file: The configuration file in which the history can be enabled.
        problems: A one-line reason for each host that did not respond, by host name.
        has_answers: Whether any host responded.
        cut: The users with too many history lines. Only their newest lines are counted.
        is_new: Whether the history started today and is still too short for a report.
    """

    by: str
    rows: Mapping[str, Hours]
    days: Mapping[str, Hours]
    longest_idle: tuple[Idle, ...] = ()
    since: float = 0.0
    until: float = 0.0
    lasts_s: float | None = None
    host: str = ""
    user: str | None = None
    is_kept: bool = True
    file: str = ""
    problems: Mapping[str, str] = MappingProxyType({})
    has_answers: bool = True
    cut: tuple[str, ...] = ()
    is_new: bool = False

    @property
    def total(self) -> Hours:
        """Return the sum of all hours."""
        return together(self.days.values())

    def picture(self) -> Picture:
        """Render the report as a picture, which can be shown as text or HTML."""
        tables = [each for each in (_hours(self), _longest_idle(self)) if each.height]
        tables = [] if self.is_new else tables
        head = [*_head(self)]
        return Picture(Layout(head, foot=[*_foot(self)], sheets=tables), head[0][0][0])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that docs/report.md describes."""
        return {
            "version": VERSION,
            "host": self.host,
            "user": self.user,
            "since": self.since,
            "until": self.until,
            "by": self.by,
            "is_kept": self.is_kept,
            "cut": list(self.cut),
            "rows": [{"name": name, **_rounded(hours)} for name, hours in _sorted(self)],
            "total": _rounded(self.total),
            "days": [{"name": day, **_rounded(self.days[day])} for day in sorted(self.days)],
            "longest_idle": [
                {**each._asdict(), "gpus": [*each.gpus], "idle_hours": round(each.idle_hours, 4)}
                for each in self.longest_idle
            ],
            "problems": [{"host": host, "problem": text} for host, text in self.problems.items()],
        }


def _rounded(hours: Hours) -> dict[str, float]:
    return {f"{kind}_hours": round(value, 4) for kind, value in hours._asdict().items()}


# -- picture ---------------------------------------------------------------------------------------


def _head(report: Report) -> Iterator[Line]:
    yield ((_sentence(report), STRONG),)
    since = time.strftime("%a %Y-%m-%d %H:%M", time.localtime(report.since))
    user = f", {sanitize(report.user)}" if report.user else ""
    yield ((f"{sanitize(report.host, REASON_LIMIT)}{user}, since {since}", FAINT),)
    for host, problem in report.problems.items():
        yield (sanitize(host), STRONG), ": ", (sanitize(problem, REASON_LIMIT), MARK)
    for name in report.cut:
        yield (
            (sanitize(name), STRONG),
            ": ",
            ("too many history lines; only the newest are counted", MARK),
        )


def _sentence(report: Report) -> str:
    """Return a summary like `31.0 GPU-hours reserved in the last 7 days, 22.0 of them idle.`."""
    total, since = report.total, _period(report)
    if not report.is_kept:
        return "No history is kept here."
    if not report.has_answers:
        return "No machine answered."
    if report.is_new:
        return "The history started recently, so there is little to report yet."
    if not total.reserved:
        return f"No GPU was reserved {since}."
    if total.reserved < phrases.LEAST_HOURS:
        return f"Less than 0.1 GPU-hours were reserved {since}."
    idle = f", {phrases.hours(total.idle) if total.idle else 'none'} of them idle"
    is_known = total.idle or total.unknown <= LEAST_UNKNOWN * total.reserved
    return f"{phrases.hours(total.reserved)} GPU-hours reserved {since}{idle if is_known else ''}."


def _period(report: Report) -> str:
    seconds = report.lasts_s
    if seconds is None:
        return f"since {durations.moment(report.since, report.until)}"
    for length, unit in ((DAY_S, "day"), (HOUR_S, "hour")):
        if seconds >= length and not seconds % length:
            count = int(seconds // length)
            return f"in the last {unit if count == 1 else f'{count} {unit}s'}"
    return f"in the last {durations.duration(seconds)}"


def _hours(report: Report) -> Sheet:
    """Return a table of the rows, followed by their total."""
    rows = _folded(_sorted(report), MOST_DAYS if report.by == BY_DAY else MOST_ROWS)
    longest = max((hours.reserved for _, hours in rows), default=0.0)
    has_total = len(rows) > 1
    row_hours = [hours for _, hours in rows] + [report.total] * has_total
    names = [sanitize(name, NOTEBOOK_LIMIT) for name, _ in rows] + ["total"] * has_total
    columns = [Column(report.by.replace("gpu", "GPU"), tuple(names))]
    for kind in _used_columns(rows):
        cells = (
            phrases.hours(getattr(each, kind), shows_zero=kind in ALWAYS) for each in row_hours
        )
        columns.append(Column(kind, tuple(cells), COLUMNS[kind][0], is_figure=True))
    bars = tuple(
        (hours.used / longest, hours.idle / longest, hours.unknown / longest)
        for _, hours in rows
        if longest
    )
    legend = tuple(
        word for place, word in enumerate(LEGEND) if place < 2 or any(bar[place] for bar in bars)
    )
    return Sheet(tuple(columns), bars, legend if bars else (), has_total=has_total)


def _longest_idle(report: Report) -> Sheet:
    """Return a table of the reservations with the longest idle times."""
    reservations = report.longest_idle
    columns = [
        Column(
            "notebook", tuple(sanitize(each.name or "?", NOTEBOOK_LIMIT) for each in reservations)
        ),
        Column(
            "idle",
            tuple(phrases.hours(each.idle_hours) for each in reservations),
            9,
            is_figure=True,
        ),
        Column("GPU", tuple(_devices(each.gpus) for each in reservations), 6),
        Column("user", tuple(sanitize(each.user, NOTEBOOK_LIMIT) for each in reservations), 8),
        Column(
            "since", tuple(durations.moment(each.since, report.until) for each in reservations), 7
        ),
    ]
    if report.user:
        columns = [column for column in columns if column.title != "user"]
    return Sheet(tuple(columns), title="longest idle reservations")


def _devices(gpus: Sequence[str]) -> str:
    named = [sanitize(gpu, NOTEBOOK_LIMIT) for gpu in gpus[:2]]
    return listed([*named, f"{len(gpus) - 2} more"] if len(gpus) > 2 else named)


def _foot(report: Report) -> Iterator[Line]:
    if not report.is_kept:
        yield "Turn it on with ", SWITCH, f" in {sanitize(report.file, REASON_LIMIT)}"
        yield (("See reserve-gpu report --help for what is logged.", FAINT),)
        return
    total, columns = report.total, _used_columns([*report.rows.items()])
    if total.unknown > max(LEAST_UNKNOWN * total.reserved, phrases.LEAST_HOURS):
        unknown, reserved = phrases.hours(total.unknown), phrases.hours(total.reserved)
        yield ((f"The usage could not be read for {unknown} of {reserved} GPU-hours.", FAINT),)
    if meanings := [f"{kind}: {COLUMNS[kind][1]}" for kind in columns if COLUMNS[kind][1]]:
        yield (("; ".join(meanings), FAINT),)
    if report.user:
        yield (
            (f"This covers only {sanitize(report.user)}. Root's report covers all users.", FAINT),
        )


def _used_columns(rows: Sequence[tuple[str, Hours]]) -> list[str]:
    """Return the columns in which any row has a value above zero."""
    return [kind for kind in COLUMNS if any(getattr(hours, kind) for _, hours in rows)]


def _sorted(report: Report) -> list[tuple[str, Hours]]:
    """Sort devices and days in natural order, and other rows by reserved hours, largest first."""
    rows = [*report.rows.items()]
    if report.by in (BY_DAY, "gpu"):
        return sorted(rows, key=lambda row: _by_number(row[0]))
    return sorted(rows, key=lambda row: (-row[1].reserved, row[0]))


def _by_number(label: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts GPU2 before GPU10."""
    import re

    parts = re.split(r"([0-9]{1,9})", label)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _folded(rows: Sequence[tuple[str, Hours]], limit: int) -> list[tuple[str, Hours]]:
    """Return at most `limit` rows. If there are more, the last one totals the rest."""
    if len(rows) <= limit:
        return [*rows]
    rest = rows[limit - 1 :]
    return [*rows[: limit - 1], (f"{len(rest)} more", together(hours for _, hours in rest))]


# -- report from another machine ------------------------------------------------------------------


def read_report(parsed: object) -> Report:
    """Convert parsed JSON from another machine to a report.

    Raises:
        FormatError: The JSON is not a report, or its format version is not supported.
    """
    fields = table(parsed, VERSION, "rows")
    by = fields.text("by")
    return Report(
        by if by in KEYS else "user",
        dict(map(_hours_of, fields.tables("rows", MOST_HOURS))),
        dict(map(_hours_of, fields.tables("days", MOST_HOURS))),
        tuple(map(_idle_of, fields.tables("longest_idle"))),
        fields.number("since") or 0.0,
        fields.number("until") or 0.0,
        host=fields.text("host") or "",
        user=fields.text("user"),
        is_kept=fields.boolean("is_kept") is not False,
        cut=tuple(fields.texts("cut")),
    )


def _hours_of(fields: Fields) -> tuple[str, Hours]:
    hours = (fields.number(f"{kind}_hours") or 0.0 for kind in Hours._fields)
    return fields.text("name") or UNKNOWN, Hours(*hours)


def _idle_of(fields: Fields) -> Idle:
    return Idle(**{**fields_of(Idle, fields.fields), "gpus": tuple(fields.texts("gpus"))})
