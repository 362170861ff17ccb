"""The status as a table in a notebook, also in a saved one that is not trusted.

Such a notebook keeps inline styles and <meter>, but no <style>, no <svg> and no theme variables. So
plain text has the notebook's own colour, and what has a colour of its own has its own background.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model import State
from reserve_gpu.report.layout import QUEUE_TITLE, TITLES
from reserve_gpu.report.words import FAINT, MARK, STRONG, escape

if TYPE_CHECKING:
    from reserve_gpu.report.layout import Entry, Layout
    from reserve_gpu.report.words import Line

# White text on each of them is readable (contrast 4.5:1 or more), and each can be told from a white
# and from a black page.
BACKGROUNDS = {
    State.FREE: "#1a7f37",
    State.RESERVED: "#9a6700",
    State.AWAITED: "#9a6700",
    State.BUSY: "#c6303e",
    State.UNKNOWN: "#8250df",
}
OTHER_BACKGROUND = "#6a737d"
STYLES = {
    STRONG: "font-weight:bold",
    FAINT: "opacity:0.75",
    MARK: "font-weight:bold;font-style:italic",
}
# The people stand below each row, as in a terminal: where two notebooks are side by side, a column
# for them would be cut off. The theme's stripes would part the two rows of one device, so they are
# switched off, and a line stands above each device.
ROW = "background:transparent"
LINE = "border-top:1px solid rgba(128,128,128,0.4)"
CELL = "text-align:left;vertical-align:top;padding:4px 7px"
SHORT = f"{CELL};white-space:nowrap"
LONG = f"{CELL};overflow-wrap:break-word"
BELOW = "text-align:left;padding:0 7px 6px;overflow-wrap:anywhere"


def html(layout: Layout) -> str:
    """The picture in HTML."""
    head = "".join(f'<th style="{SHORT}">{title}</th>' for title in TITLES)
    body = "".join(map(_row, layout.entries))
    waiting = "".join(f"<div>{_line(line)}</div>" for line in layout.waiting)
    if waiting:
        waiting = f'<div style="margin-top:6px"><b>{QUEUE_TITLE}</b></div>{waiting}'
    remarks = "".join(f"<div>{_line(line)}</div>" for line in layout.remarks)
    return (
        f"<div>{_line(layout.head)}</div><div>{_line(layout.advice)}</div>"
        '<table style="border-collapse:collapse;table-layout:auto;margin:6px 0;color:inherit">'
        f'<thead><tr style="{ROW}">{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>{waiting}{remarks}"
    )


def _row(entry: Entry) -> str:
    number = entry.number
    if entry.is_instance:
        number = f'<span style="margin-left:1em">{number}</span>'
    cells = (
        (SHORT, number),
        (SHORT, _state(entry.state)),
        (LONG, _isolated(entry.name)),
        (CELL, _memory(entry)),
        (SHORT, entry.use),
    )
    row = "".join(f'<td style="{LINE};{style}">{cell}</td>' for style, cell in cells)
    lines = "".join(f"<div>{_line(line)}</div>" for line in entry.lines)
    below = f'<td></td><td style="{BELOW}" colspan="{len(cells) - 1}">{lines}</td>'
    return f'<tr style="{ROW}">{row}</tr>' + (f'<tr style="{ROW}">{below}</tr>' if lines else "")


def _memory(entry: Entry) -> str:
    if entry.share is None:
        return escape(entry.memory)
    meter = (
        f'<meter min="0" max="1" low="0.5" high="0.9" optimum="0" value="{entry.share:.3f}"'
        ' style="width:5em"></meter>'
    )
    return f'{meter} <span style="white-space:nowrap">{escape(entry.memory)}</span>'


def _state(state: State | None) -> str:
    if state is None:
        return ""
    return (
        f'<b style="background-color:{BACKGROUNDS.get(state, OTHER_BACKGROUND)};color:#ffffff;'
        f'border-radius:4px;padding:1px 7px">{state.value}</b>'
    )


def _line(line: Line) -> str:
    return "".join(
        _isolated(part)
        if isinstance(part, str)
        else f'<span style="{STYLES[part[1]]}">{_isolated(part[0])}</span>'
        for part in line
    )


def _isolated(text: str) -> str:
    """The text, escaped; letters that run from right to left move nothing outside of it."""
    return escape(text) if text.isascii() else f"<bdi>{escape(text)}</bdi>"
