"""The status of a machine as text, as a table for notebooks, and as JSON.

What each cell says is decided once, in `cells`; text and HTML only lay it out.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from reserve_gpu import report
from reserve_gpu.choosing import gib
from reserve_gpu.device import Value
from reserve_gpu.names import shown

if TYPE_CHECKING:
    from reserve_gpu.device import Holder, Row, Ticket

TITLES = ("GPU", "name", "memory", "", "util", "state", "who")
BAR = 10  # characters
COLOURS = {"free": "#2e8b57", "reserved": "#c77700", "busy": "#c0392b"}  # on white and on black
OTHER_COLOUR = "#8a6d9e"


class Status(Value):
    """How a machine stood at one moment; shows itself as text and as a table in a notebook.

    problem: why nothing, or not all, is known of reservations.
    """

    rows: tuple[Row, ...]
    waiting: tuple[Ticket, ...] = ()
    problem: str | None = None

    def __repr__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _html(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON: see README for its shape."""
        return _to_dict(self)


def cells(row: Row) -> tuple[str, ...]:
    """What the columns say of one device."""
    device = row.device
    used = "?" if row.used_mib is None else gib(row.used_mib)
    total = "?" if device is None or device.memory_mib is None else gib(device.memory_mib)
    return (
        row.label.removeprefix("GPU"),
        shown((device.name if device else None) or "?", 40),
        f"{used} of {total}",
        _bar(_share(row)),
        "?" if row.utilisation is None else f"{row.utilisation} %",
        row.state,
        "; ".join(_who(row)),
    )


def _text(status: Status) -> str:
    """The table in plain text, followed by the line of those who wait."""
    lines = [TITLES, *(cells(row) for row in status.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(TITLES))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([*table, *_footer(status)])


def _html(status: Status) -> str:
    """The table in HTML, with inline styles alone: an untrusted notebook keeps no others."""
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in TITLES)
    body = "".join(_html_row(row) for row in status.rows)
    footer = "".join(f"<div>{escape(line)}</div>" for line in _footer(status))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}"


def _to_dict(status: Status) -> dict[str, Any]:
    """The status as JSON takes it; names are stable."""
    return {
        "devices": [_row_dict(row) for row in status.rows],
        "waiting": [
            {**_holder_dict(ticket.holder), "wants": sorted(ticket.wants)}
            for ticket in status.waiting
        ],
        "problem": status.problem,
    }


def _who(row: Row) -> list[str]:
    """Who has the device and who uses it, what is to be said of that first."""
    found = []
    if row.holder:
        found.append(report.holder(row.holder) + (" (this kernel)" if row.is_mine else ""))
        found += ["nothing runs on it"] if row.is_unused else []
    if row.processes:
        found.append(report.users(row.processes))
        found += ["not reserved"] if row.is_unreserved_use else []
    elif row.reason:
        found.append(row.reason)
    return found


def _share(row: Row) -> float | None:
    total = row.device.memory_mib if row.device else None
    return None if row.used_mib is None or not total else min(1.0, row.used_mib / total)


def _bar(share: float | None) -> str:
    if share is None:
        return " " * BAR
    full = round(share * BAR)
    return "#" * full + "." * (BAR - full)


def _footer(status: Status) -> list[str]:
    waiting = [
        f"{place}. in line: {report.holder(ticket.holder, 'awaited')}"
        for place, ticket in enumerate(status.waiting, 1)
    ]
    return waiting + (
        [f"Reservations may be missing here: {status.problem}"] if status.problem else []
    )


def _html_row(row: Row) -> str:
    share = _share(row)
    meter = "" if share is None else f"<meter min='0' max='1' value='{share:.3f}'></meter>"
    colour = COLOURS.get(row.state, OTHER_COLOUR)
    styled = dict(zip(TITLES, (escape(cell) for cell in cells(row)), strict=True))
    styled[""] = meter
    styled["state"] = f"<b style='color:{colour}'>{styled['state']}</b>"
    return (
        f"<tr>{''.join(f'<td style=text-align:left>{cell}</td>' for cell in styled.values())}</tr>"
    )


def _row_dict(row: Row) -> dict[str, Any]:
    device = row.device
    return {
        "label": row.label,
        "state": row.state,
        "reason": row.reason or None,
        "index": device.index if device else None,
        "instance": device.instance if device else None,
        "uuid": device.uuid if device else None,
        "name": device.name if device else None,
        "bus_id": device.bus_id if device else None,
        "memory_total_mib": device.memory_mib if device else None,
        "memory_used_mib": row.used_mib,
        "utilisation_percent": row.utilisation,
        "processes": [
            {"pid": p.pid, "user": p.user, "command": p.command, "memory_mib": p.memory_mib}
            for p in row.processes
        ],
        "holder": _holder_dict(row.holder) if row.holder else None,
        "is_this_process": row.is_mine,
        "is_reserved_but_idle": row.is_unused,
        "is_used_without_reservation": row.is_unreserved_use,
    }


def _holder_dict(holder: Holder) -> dict[str, Any]:
    return {
        "pid": holder.pid,
        "user": holder.user,
        "notebook": holder.notebook,
        "note": holder.note,
        "since": holder.since,
        "confirmed": holder.confirmed,
        "elsewhere": holder.elsewhere,
    }
