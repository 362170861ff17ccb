"""Render a layout as HTML for a notebook.

In an untrusted notebook, Jupyter keeps inline styles and <meter>, but removes <style>, <svg> and
theme variables. So plain text uses the notebook's color, and colored text has its own background.
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

# White text is readable on each of these colors (the contrast is at least 4.5:1), and each color is
# visible on both white and black pages.
BACKGROUNDS = {
    State.FREE: "#1a7f37",
    **dict.fromkeys(TAKEN, "#9a6700"),
    State.BUSY: "#c6303e",
    State.UNKNOWN: "#8250df",
}
OTHER_BACKGROUND = "#6a737d"
# Bar colors for used, idle and unknown time.
PIECES = (BACKGROUNDS[State.FREE], BACKGROUNDS[State.RESERVED], OTHER_BACKGROUND)
BAR_EM = 10  # length of the longest bar, in em
STYLES = {
    STRONG: "font-weight:bold",
    TYPED: "font-weight:bold",
    FAINT: "opacity:0.75",
    MARK: "font-weight:bold;font-style:italic",
}
# These styles replace the theme's striped rows with a line above each device. The background of
# this kernel's own row is visible on both white and black pages.
ROW = "background:transparent"
OWN_ROW = "background:rgba(9,105,218,0.16)"
LINE = "border-top:1px solid rgba(128,128,128,0.4)"
CELL = "text-align:left;vertical-align:top;padding:3px 4px"
NOWRAP = "white-space:nowrap"
SHORT = f"{CELL};{NOWRAP}"
LONG = f"{CELL};overflow-wrap:break-word"
NAME = f"{LONG};min-width:5em"  # a model name next to a long note wraps to about two lines
WHO = f"{CELL};overflow-wrap:anywhere;min-width:7em"


def html(layout: Layout) -> str:
    """Render a layout as HTML."""
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
    """Return an HTML table.

    Args:
        titles: The column titles, as HTML.
        rows: The rows, as HTML.
    """
    head = "".join(f'<th style="{SHORT}">{title}</th>' for title in titles)
    return (
        '<table style="border-collapse:collapse;table-layout:auto;margin:6px 0;color:inherit">'
        f'<thead><tr style="{ROW}">{head}</tr></thead><tbody>{rows}</tbody></table>'
    )


def chip(text: str, background: str) -> str:
    """Return HTML that shows a word in white on a colored background."""
    return (
        f'<b style="background-color:{background};color:#ffffff;border-radius:4px;'
        f'padding:1px 7px;{NOWRAP}">{text}</b>'
    )


def _sheet(sheet: Sheet) -> str:
    """Render a table of numbers, with a bar in each row, as HTML."""
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
        f'{_piece("1em", color)}<span style="margin:0 1em 0 4px">{escape(word)}</span>'
        for word, color in zip(sheet.legend, PIECES, strict=False)
    )
    shown = f'<div style="overflow-x:auto">{table(titles, rows)}</div>'
    return f"{title if sheet.title else ''}{shown}<div>{legend}</div>"


def _sheet_cell(sheet: Sheet, column: Column | None, row: int) -> str:
    """Render a table cell as HTML. If the column is None, the cell contains the row's bar."""
    if column is None:
        shares = sheet.bars[row] if row < len(sheet.bars) else ()
        pieces = "".join(
            _piece(f"{share * BAR_EM:.2f}em", color)
            for share, color in zip(shares, PIECES, strict=False)
        )
        return f'<td style="{LINE};{SHORT};min-width:{BAR_EM}em">{pieces}</td>'
    is_total = sheet.has_total and row == sheet.height - 1
    cell = _isolated(column.cells[row])
    style = f"{SHORT if column.is_figure else WHO};text-align:{_side(column)}"
    return f'<td style="{LINE};{style}">{f"<b>{cell}</b>" if is_total else cell}</td>'


def _side(column: Column) -> str:
    return "right" if column.is_figure else "left"


def _piece(width: str, color: str) -> str:
    return (
        f'<span style="display:inline-block;height:0.8em;width:{width};'
        f'background-color:{color}"></span>'
    )


def _titles(entries: Sequence[Entry]) -> list[str]:
    """Return the titles of the columns that have content.

    Temperature and power have no columns. They appear in the utilization's tooltip instead.
    """
    hidden = {"temp", "power"}
    if all(entry.load is None for entry in entries):
        hidden.add("util")
    if not any(entry.name for entry in entries):
        hidden.add("name")
    return [title for title in TITLES if title not in hidden]


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
        "memory": (CELL, _memory(entry)),  # the text moves below the bar in a narrow notebook
        "util": (SHORT, f'<span title="{escape(heat)}">{entry.util}</span>'),
        "who": (WHO, divs([line for line in lines if line])),
    }
    shown = (contents[title] for title in titles)
    cells = "".join(f'<td style="{LINE};{style}">{cell}</td>' for style, cell in shown)
    return f'<tr style="{OWN_ROW if entry.is_mine else ROW}">{cells}</tr>'


def divs(lines: Sequence[Line]) -> str:
    """Render each line as a <div>."""
    return "".join(f"<div>{_line(line)}</div>" for line in lines)


def _memory(entry: Entry) -> str:
    if entry.share is None:
        return escape(entry.memory)
    cell = f'{_meter(entry.share)} <span style="{NOWRAP}">{escape(entry.memory)}</span>'
    if entry.taken is not None:
        cell += f'<div>{_meter(entry.taken)} <span style="{NOWRAP}">promised</span></div>'
    return cell


def _meter(share: float) -> str:
    # Jupyter's sanitizer drops `optimum`, so it defaults to 0.5. Because 0.5 is below `low`, the
    # browser treats low values as good and shows them in green.
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
    """Escape text, and isolate it so that right-to-left text can't reorder the text around it."""
    return escape(text) if text.isascii() else f"<bdi>{escape(text)}</bdi>"
