"""The picture as a table in a notebook, also in a saved one that is not trusted.

Such a notebook keeps inline styles and <meter>, but no <style>, no <svg> and no theme variables. So
plain text has the notebook's own colour, and what has a colour of its own has its own background.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.devices import State
from reserve_gpu.render.phrases import (
    FAINT,
    MARK,
    QUEUE_TITLE,
    STRONG,
    TAKEN,
    TITLES,
    TYPED,
    escape,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.render.layout import Entry, Layout
    from reserve_gpu.render.phrases import Line
    from reserve_gpu.render.tables import Column, Sheet

# White text on each of them is readable (contrast 4.5:1 or more), and each can be told from a white
# and from a black page.
BACKGROUNDS = {
    State.FREE: "#1a7f37",
    **dict.fromkeys(TAKEN, "#9a6700"),
    State.BUSY: "#c6303e",
    State.UNKNOWN: "#8250df",
}
OTHER_BACKGROUND = "#6a737d"
# Of a bar of hours: what was used, what was idle, and what is not known.
PIECES = (BACKGROUNDS[State.FREE], BACKGROUNDS[State.RESERVED], OTHER_BACKGROUND)
BAR_EM = 10  # how long the longest bar is
STYLES = {
    STRONG: "font-weight:bold",
    TYPED: "font-weight:bold",
    FAINT: "opacity:0.75",
    MARK: "font-weight:bold;font-style:italic",
}
# The theme's stripes are switched off; a line stands above each device instead. This kernel's own
# row has a background that can be seen on white and on black.
ROW = "background:transparent"
OWN_ROW = "background:rgba(9,105,218,0.16)"
LINE = "border-top:1px solid rgba(128,128,128,0.4)"
CELL = "text-align:left;vertical-align:top;padding:3px 4px"
NOWRAP = "white-space:nowrap"
SHORT = f"{CELL};{NOWRAP}"
LONG = f"{CELL};overflow-wrap:break-word"
NAME = f"{LONG};min-width:5em"  # beside a long note, in two lines mostly
WHO = f"{CELL};overflow-wrap:anywhere;min-width:7em"


def html(layout: Layout) -> str:
    """Return the picture in HTML."""
    entries = queue = ""
    if layout.entries:
        titles = _titles(layout.entries)
        entries = table(titles, "".join(_row(entry, titles) for entry in layout.entries))
    if layout.queue:
        queue = f'<div style="margin-top:6px"><b>{QUEUE_TITLE}</b></div>{divs(layout.queue)}'
    below = "".join(f'<div style="margin-top:12px">{html(each)}</div>' for each in layout.sections)
    sheets = "".join(map(_sheet, layout.sheets))
    return f"{divs(layout.head)}{entries}{queue}{sheets}{divs(layout.foot)}{below}"


def table(titles: Sequence[str], rows: str) -> str:
    """Return a table with those titles. rows: in HTML."""
    head = "".join(f'<th style="{SHORT}">{title}</th>' for title in titles)
    return (
        '<table style="border-collapse:collapse;table-layout:auto;margin:6px 0;color:inherit">'
        f'<thead><tr style="{ROW}">{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def chip(text: str, background: str) -> str:
    """Return a word in white on that colour."""
    return (
        f'<b style="background-color:{background};color:#ffffff;border-radius:4px;'
        f'padding:1px 7px;{NOWRAP}">{text}</b>'
    )


def _sheet(sheet: Sheet) -> str:
    """Return a table of figures, which stand to the right, each row with its bar."""
    first, *others = sheet.columns
    columns = [first, *([None] if sheet.bars else []), *others]
    rows = "".join(
        f'<tr style="{ROW}">{"".join(_sheet_cell(sheet, column, row) for column in columns)}</tr>'
        for row in range(sheet.height)
    )
    titles = [
        f'<div style="text-align:{_side(column)}">{escape(column.title)}</div>' if column else ""
        for column in columns
    ]
    title = f'<div style="margin-top:12px"><b>{escape(sheet.title)}</b></div>'
    legend = " ".join(
        f'{_piece("1em", colour)}<span style="margin:0 1em 0 4px">{escape(word)}</span>'
        for word, colour in zip(sheet.legend, PIECES, strict=False)
    )
    shown = f'<div style="overflow-x:auto">{table(titles, rows)}</div>'
    return f"{title if sheet.title else ''}{shown}<div>{legend}</div>"


def _sheet_cell(sheet: Sheet, column: Column | None, row: int) -> str:
    """Return a cell. column: None for the one with the bars."""
    if column is None:
        shares = sheet.bars[row] if row < len(sheet.bars) else ()
        pieces = "".join(
            _piece(f"{share * BAR_EM:.2f}em", colour)
            for share, colour in zip(shares, PIECES, strict=False)
        )
        return f'<td style="{LINE};{SHORT};min-width:{BAR_EM}em">{pieces}</td>'
    is_total = sheet.has_total and row == sheet.height - 1
    cell = _isolated(column.cells[row])
    style = f"{SHORT if column.is_figure else WHO};text-align:{_side(column)}"
    return f'<td style="{LINE};{style}">{f"<b>{cell}</b>" if is_total else cell}</td>'


def _side(column: Column) -> str:
    return "right" if column.is_figure else "left"


def _piece(width: str, colour: str) -> str:
    return (
        f'<span style="display:inline-block;height:0.8em;width:{width};'
        f'background-color:{colour}"></span>'
    )


def _titles(entries: Sequence[Entry]) -> list[str]:
    """Return the columns that say something; temperature and power show when you point at util."""
    without = {"temp", "power"}
    if all(entry.load is None for entry in entries):
        without.add("util")
    if not any(entry.name for entry in entries):
        without.add("name")
    return [title for title in TITLES if title not in without]


def _row(entry: Entry, titles: Sequence[str]) -> str:
    number = entry.number
    if entry.is_instance:
        number = f'<span style="margin-left:1em">{number}</span>'
    lines = [entry.who, *entry.more]
    heat = " ".join(filter(None, [entry.temperature, entry.power]))
    contents = {
        "GPU": (SHORT, f"<b>{number}</b>" if entry.is_mine else number),
        "state": (SHORT, _state(entry.state)),
        "name": (NAME, _isolated(entry.name)),
        "memory": (CELL, _memory(entry)),  # in a narrow notebook the bar stands above
        "util": (SHORT, f'<span title="{escape(heat)}">{entry.util}</span>'),
        "who": (WHO, divs([line for line in lines if line])),
    }
    shown = (contents[title] for title in titles)
    cells = "".join(f'<td style="{LINE};{style}">{cell}</td>' for style, cell in shown)
    return f'<tr style="{OWN_ROW if entry.is_mine else ROW}">{cells}</tr>'


def divs(lines: Sequence[Line]) -> str:
    """Return a line below the other."""
    return "".join(f"<div>{_line(line)}</div>" for line in lines)


def _memory(entry: Entry) -> str:
    if entry.share is None:
        return escape(entry.memory)
    cell = f'{_meter(entry.share)} <span style="{NOWRAP}">{escape(entry.memory)}</span>'
    if entry.taken is not None:
        cell += f'<div>{_meter(entry.taken)} <span style="{NOWRAP}">with promises</span></div>'
    return cell


def _meter(share: float) -> str:
    # Jupyter drops `optimum`. Then it is the middle, 0.5; as that is below `low`, little is best.
    return (
        f'<meter min="0" max="1" low="0.5001" high="0.9" value="{share:.3f}"'
        ' style="width:4em"></meter>'
    )


def _state(state: State | None) -> str:
    return chip(state.value, BACKGROUNDS.get(state, OTHER_BACKGROUND)) if state else ""


def _line(line: Line) -> str:
    return "".join(
        _isolated(part)
        if isinstance(part, str)
        else f'<span style="{STYLES[part[1]]}">{_isolated(part[0])}</span>'
        for part in line
    )


def _isolated(text: str) -> str:
    """Return the text escaped; letters that run right to left move nothing outside of it."""
    return escape(text) if text.isascii() else f"<bdi>{escape(text)}</bdi>"
