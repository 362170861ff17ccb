"""Who used what: a value that is shown as tables with bars, as a page and as JSON."""

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


VERSION = 1  # of the JSON; names are only ever added to it
DAY_S, HOUR_S = 86400, 3600
MOST_ROWS = 40  # that are shown; the rest is one row. Days all are
MOST_DAYS = 366
MOST_HOURS = 12_000  # rows that are read of another machine
LEAST_UNKNOWN = 0.05  # of the reserved hours: what could not be read is told from there on
BY_DAY = "day"
LEGEND = ("used", "idle", "not known")
# Of each column: what it is worth where not all have room, and what it means if that is not clear.
COLUMNS = {
    "reserved": (9, ""),
    "used": (7, ""),
    "idle": (8, ""),
    "over": (4, "more than was promised, or for longer"),
    "waited": (5, "hours in the queue"),
}
ALWAYS = ("reserved", "used", "idle")  # of which a zero is told
SWITCH = ("history = true", TYPED)


class Report(NamedTuple):
    """What reservations came to since a moment.

    by: what the rows are: `user`, `notebook`, `gpu` or `day`. rows: the hours of each.
    days: of each day, as `2026-11-24`. longest_idle: the reservations that lay idle for longest.
    since, until: in seconds since the epoch. lasts_s: what was asked for, None for a moment.
    host: the machine, or several. user: whose history alone it is, None for that of all.
    is_kept: there is a history. file: where it is switched on.
    problems: why hosts have not answered, in a line for each. has_answers: not all of them.
    cut: users of whose lines only the newest are counted, as there are too many.
    is_new: it has begun today, and nothing can be summed up yet.
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
        """Return the hours of all together."""
        return together(self.days.values())

    def picture(self) -> Picture:
        """Return what it looks like."""
        tables = [each for each in (_hours(self), _longest_idle(self)) if each.height]
        tables = [] if self.is_new else tables
        head = [*_head(self)]
        return Picture(Layout(head, foot=[*_foot(self)], sheets=tables), head[0][0][0])

    def to_dict(self) -> dict[str, Any]:
        """Return what programs read, in the shape that docs/report.md describes."""
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


# -- the picture -----------------------------------------------------------------------------------


def _head(report: Report) -> Iterator[Line]:
    yield ((_sentence(report), STRONG),)
    since = time.strftime("%a %Y-%m-%d %H:%M", time.localtime(report.since))
    whose = f", {sanitize(report.user)}" if report.user else ""
    yield ((f"{sanitize(report.host, REASON_LIMIT)}{whose}, since {since}", FAINT),)
    for host, problem in report.problems.items():
        yield (sanitize(host), STRONG), ": ", (sanitize(problem, REASON_LIMIT), MARK)
    for user in report.cut:
        yield (sanitize(user), STRONG), ": ", ("too many lines, of which the newest count", MARK)


def _sentence(report: Report) -> str:
    """Return `31.0 GPU-hours reserved in the last 7 days, 22.0 of them idle.`."""
    total, since = report.total, _period(report)
    if not report.is_kept:
        return "No history is kept here."
    if not report.has_answers:
        return "No machine answered."
    if report.is_new:
        return "The history has just begun: there is hardly anything in it yet."
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
    """Return the table with a row for each user, notebook, device or day, and their sum."""
    rows = _folded(_sorted(report), MOST_DAYS if report.by == BY_DAY else MOST_ROWS)
    longest = max((hours.reserved for _, hours in rows), default=0.0)
    has_total = len(rows) > 1
    every = [hours for _, hours in rows] + [report.total] * has_total
    names = [sanitize(name, NOTEBOOK_LIMIT) for name, _ in rows] + ["total"] * has_total
    columns = [Column(report.by.replace("gpu", "GPU"), tuple(names))]
    for kind in _told(rows):
        cells = (phrases.hours(getattr(each, kind), is_zero_told=kind in ALWAYS) for each in every)
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
    """Return the table of the reservations that lay idle for longest."""
    every = report.longest_idle
    columns = [
        Column("notebook", tuple(sanitize(each.name or "?", NOTEBOOK_LIMIT) for each in every)),
        Column("idle", tuple(phrases.hours(each.idle_hours) for each in every), 9, is_figure=True),
        Column("GPU", tuple(_devices(each.gpus) for each in every), 6),
        Column("user", tuple(sanitize(each.user, NOTEBOOK_LIMIT) for each in every), 8),
        Column("since", tuple(durations.moment(each.since, report.until) for each in every), 7),
    ]
    if report.user:
        columns = [column for column in columns if column.title != "user"]
    return Sheet(tuple(columns), title="idle for longest while reserved")


def _devices(gpus: Sequence[str]) -> str:
    named = [sanitize(gpu, NOTEBOOK_LIMIT) for gpu in gpus[:2]]
    return listed([*named, f"{len(gpus) - 2} more"] if len(gpus) > 2 else named)


def _foot(report: Report) -> Iterator[Line]:
    if not report.is_kept:
        yield "Switch it on with ", SWITCH, f" in {sanitize(report.file, REASON_LIMIT)}"
        yield (("What is logged then, and where: docs/history.md", FAINT),)
        return
    total, told = report.total, _told([*report.rows.items()])
    if total.unknown > max(LEAST_UNKNOWN * total.reserved, phrases.LEAST_HOURS):
        unknown, reserved = phrases.hours(total.unknown), phrases.hours(total.reserved)
        yield ((f"Of {unknown} of {reserved} GPU-hours the use could not be read.", FAINT),)
    if meanings := [f"{kind}: {COLUMNS[kind][1]}" for kind in told if COLUMNS[kind][1]]:
        yield (("; ".join(meanings), FAINT),)
    if report.user:
        whose = f"This is {sanitize(report.user)}'s history alone."
        yield ((f"{whose} How root sees that of all users: docs/history.md", FAINT),)


def _told(rows: Sequence[tuple[str, Hours]]) -> list[str]:
    """Return the columns in which any row has something."""
    return [kind for kind in COLUMNS if any(getattr(hours, kind) for _, hours in rows)]


def _sorted(report: Report) -> list[tuple[str, Hours]]:
    """Return the rows, who has reserved most first; devices and days in their order."""
    rows = [*report.rows.items()]
    if report.by in (BY_DAY, "gpu"):
        return sorted(rows, key=lambda row: _by_number(row[0]))
    return sorted(rows, key=lambda row: (-row[1].reserved, row[0]))


def _by_number(label: str) -> list[tuple[bool, int, str]]:
    """Return what puts GPU2 before GPU10, and days in their order."""
    import re

    parts = re.split(r"([0-9]{1,9})", label)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _folded(rows: Sequence[tuple[str, Hours]], most: int) -> list[tuple[str, Hours]]:
    """Return the first ones, and one for all others if there are more than that."""
    if len(rows) <= most:
        return [*rows]
    others = rows[most - 1 :]
    return [*rows[: most - 1], (f"{len(others)} more", together(hours for _, hours in others))]


# -- of another machine ---------------------------------------------------------------------------


def read_report(fields: object) -> Report:
    """Return the report of a history that the JSON describes. Raises FormatError."""
    said = table(fields, VERSION, "rows")
    by = said.text("by")
    return Report(
        by if by in KEYS else "user",
        dict(map(_hours_of, said.tables("rows", MOST_HOURS))),
        dict(map(_hours_of, said.tables("days", MOST_HOURS))),
        tuple(map(_idle_of, said.tables("longest_idle"))),
        said.number("since") or 0.0,
        said.number("until") or 0.0,
        host=said.text("host") or "",
        user=said.text("user"),
        is_kept=said.boolean("is_kept") is not False,
        cut=tuple(said.texts("cut")),
    )


def _hours_of(said: Fields) -> tuple[str, Hours]:
    hours = (said.number(f"{kind}_hours") or 0.0 for kind in Hours._fields)
    return said.text("name") or UNKNOWN, Hours(*hours)


def _idle_of(said: Fields) -> Idle:
    return Idle(**{**fields_of(Idle, said.fields), "gpus": tuple(said.texts("gpus"))})
