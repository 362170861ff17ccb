"""What a check has found, as text, as a table for notebooks, and as JSON.

What each cell says is decided once, in `cells`; text and HTML only lay it out.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from reserve_gpu.device import Value
from reserve_gpu.text import duration, labels, shown
from reserve_gpu.verdict import ABSENT, FITS, UNRESERVED

if TYPE_CHECKING:
    from reserve_gpu.device import Device
    from reserve_gpu.verdict import Finding

TITLES = ("framework", "version", "built for", "sees", "result")
COLOURS = {FITS: "#2e8b57", UNRESERVED: "#c77700", ABSENT: "#808080"}  # on white and on black
OTHER_COLOUR = "#c0392b"


class Progress(Value):
    """How a check stands: the names of those that have answered and of those that have not."""

    done: tuple[str, ...]
    running: tuple[str, ...]
    waited_s: float

    def __str__(self) -> str:
        total = len(self.done) + len(self.running)
        how = f"{len(self.done)} of {total} have answered, {duration(self.waited_s)}"
        return f"Checking what each framework sees: {how}. Waiting for {', '.join(self.running)}"


class Check(Value):
    """What the driver and the frameworks see; shows itself as text and as a table in a notebook.

    reserved: what they should see, in CUDA's order. visible: CUDA_VISIBLE_DEVICES at the time.
    """

    rows: tuple[Finding, ...]
    reserved: tuple[Device, ...] = ()
    visible: str | None = None

    @property
    def is_well(self) -> bool:
        """Whether every framework that is installed sees what it should."""
        return all(row.is_well for row in self.rows)

    def __repr__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _html(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        return _to_dict(self)


def cells(row: Finding) -> tuple[str, ...]:
    """What the columns say of one framework."""
    built = {None: "CPU" if row.version else "", "": "CUDA"}.get(row.build, f"CUDA {row.build}")
    result = f"{row.state}: {row.reason}" if row.reason else row.state
    return row.name, row.version or "", built, ", ".join(row.sees), result


def _headline(check: Check) -> str:
    if check.reserved:
        return f"Reserved: {labels(check.reserved)}."
    now = "not set" if check.visible is None else repr(shown(check.visible))
    return (
        "Nothing is reserved here, so no framework was started on a GPU. Reserve one first "
        "(%reserve_gpu; in a shell: reserve-gpu run -- reserve-gpu check). "
        f"CUDA_VISIBLE_DEVICES is {now}."
    )


def _text(check: Check) -> str:
    lines = [TITLES, *(cells(row) for row in check.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(TITLES))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([_headline(check), *table])


def _html(check: Check) -> str:
    """The table in HTML, with inline styles alone: an untrusted notebook keeps no others."""
    head = "".join(f"<th style='text-align:left'>{title}</th>" for title in TITLES)
    body = "".join(_html_row(row) for row in check.rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div>{escape(_headline(check))}</div>{table}"


def _html_row(row: Finding) -> str:
    *plain, result = map(escape, cells(row))
    colour = COLOURS.get(row.state, OTHER_COLOUR)
    rest = result.removeprefix(row.state)
    styled = [*plain, f"<b style='color:{colour}'>{row.state}</b>{rest}"]
    return f"<tr>{''.join(f'<td style=text-align:left>{cell}</td>' for cell in styled)}</tr>"


def _to_dict(check: Check) -> dict[str, Any]:
    """The check as JSON takes it; names are stable."""
    return {
        "is_well": check.is_well,
        "reserved": [{"label": d.label, "uuid": d.uuid} for d in check.reserved],
        "cuda_visible_devices": check.visible,
        "frameworks": [
            {
                "name": row.name,
                "state": row.state,
                "version": row.version,
                "is_built_for_cuda": row.build is not None if row.version else None,
                "cuda_version": row.build or None,
                "sees": [
                    {"label": label, "uuid": uuid}
                    for label, uuid in zip(row.sees, row.uuids, strict=True)
                ],
                "reason": row.reason or None,
            }
            for row in check.rows
        ],
    }
