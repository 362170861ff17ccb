"""Render a layout as HTML for a notebook.

In an untrusted notebook, Jupyter keeps inline styles and <meter>, but removes <style>, <svg> and
theme variables. So plain text uses the notebook's color, and colored text has its own background.
Each row of devices is a flexbox, because a media query needs a <style>. Without inline styles, such
as on GitHub, it is an ordinary table row.
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
LONG = f"{CELL};overflow-wrap:break-word"
NOWRAP = "white-space:nowrap"
SHORT = f"{CELL};{NOWRAP}"
WHO = f"{CELL};overflow-wrap:anywhere;min-width:7em"

# The columns of devices, in the order of the JupyterLab panel. The last one moves below the others
# if less than WHO_EM is left for it.
COLUMNS = ("GPU", "memory", "state", "util", "name", "who")
FIGURES = ("memory", "util")
FLEX_ROW = "display:flex;flex-wrap:wrap"
FLEX_CELL = "box-sizing:content-box;border:0;padding:2px 5px;text-align:left;vertical-align:top"
WHO_EM = 30
LETTER_EM = 0.6  # width of a digit, with some reserve
METER_EM = 4
CAPITAL_EM = 0.75
NAME_EM = 12  # longer names wrap


def html(layout: Layout) -> str:
    """Render a layout as HTML."""
    entries = _devices(layout.entries) if layout.entries else ""
    queue = ""
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


def _devices(entries: Sequence[Entry]) -> str:
    """Return the table of devices.

    Numbers never wrap. The text about holders moves below its device in a narrow notebook.
    """
    titles = _titles(entries)
    memory_em = _width([entry.memory for entry in entries])
    rows = [_cells(entry, memory_em) for entry in entries]
    styles = [_style(title, entries) for title in titles]
    heads = (title if title != "who" else "" for title in titles)
    head = "".join(
        f'<th style="{style};font-weight:normal;opacity:0.75">{title}</th>'
        for title, style in zip(heads, styles, strict=True)
    )
    body = ""
    for entry, contents in zip(entries, rows, strict=True):
        cells = "".join(
            f'<td style="{style}">{contents[title]}</td>'
            for title, style in zip(titles, styles, strict=True)
        )
        color = OWN_ROW if entry.is_mine else ROW
        body += f'<tr style="{FLEX_ROW};{LINE};{color}">{cells}</tr>'
    block = "display:block;border:0"
    return (
        f'<table style="{block};border-collapse:collapse;margin:6px 0;color:inherit">'
        f'<thead style="{block}"><tr style="{FLEX_ROW};{ROW}">{head}</tr></thead>'
        f'<tbody style="{block}">{body}</tbody></table>'
    )


def _titles(entries: Sequence[Entry]) -> list[str]:
    """Return the titles of the columns that have content.

    Temperature and power have no columns. They appear in the utilization's tooltip instead.
    """
    hidden = set()
    if all(entry.load is None for entry in entries):
        hidden.add("util")
    if not any(entry.name for entry in entries):
        hidden.add("name")
    return [title for title in COLUMNS if title not in hidden]


def _style(title: str, entries: Sequence[Entry]) -> str:
    """Return the style of a column's cells, which have the same width in every row."""
    if title == "who":
        return f"{FLEX_CELL};flex:1 1 {WHO_EM}em;min-width:0;overflow-wrap:anywhere"
    texts = {
        "GPU": [f"{entry.number}{'  ' * entry.is_instance}" for entry in entries],
        "memory": [entry.memory for entry in entries],
        "state": [f"{entry.state.value}   " if entry.state else "" for entry in entries],
        "util": [entry.util for entry in entries],
        "name": [entry.name for entry in entries],
    }
    if title == "name":
        width = min(NAME_EM, CAPITAL_EM * max(map(len, texts[title])))
        return f"{FLEX_CELL};flex:none;width:{width:.1f}em;overflow-wrap:anywhere"
    width = _width([title, *texts[title]])
    if title == "memory" and any(entry.share is not None for entry in entries):
        width += METER_EM + LETTER_EM
    align = ";text-align:right" if title in FIGURES else ""
    return f"{FLEX_CELL}{align};flex:none;min-width:{width:.1f}em;{NOWRAP}"


def _width(texts: Sequence[str]) -> float:
    """Return the width of the longest text in em."""
    return LETTER_EM * max(map(len, texts))


def _cells(entry: Entry, memory_em: float) -> dict[str, str]:
    """Return the HTML of each column's cell.

    Args:
        entry: The device.
        memory_em: The width of the longest text about memory, in em.
    """
    number = entry.number
    if entry.is_instance:
        number = f'<span style="margin-left:1em">{number}</span>'
    lines = [entry.who, *entry.more]
    heat = " ".join(filter(None, [entry.temperature, entry.power]))
    return {
        "GPU": f"<b>{number}</b>" if entry.is_mine else number,
        "memory": _memory(entry, memory_em),
        "state": _state(entry.state),
        "util": f'<span title="{escape(heat)}">{entry.util}</span>',
        "name": _isolated(entry.name),
        "who": divs([line for line in lines if line]),
    }


def divs(lines: Sequence[Line]) -> str:
    """Render each line as a <div>."""
    return "".join(f"<div>{_line(line)}</div>" for line in lines)


def _memory(entry: Entry, width_em: float) -> str:
    if entry.share is None:
        return escape(entry.memory)
    style = f"display:inline-block;min-width:{width_em:.1f}em"
    cell = f'{_meter(entry.share)} <span style="{style}">{escape(entry.memory)}</span>'
    if entry.taken is not None:
        cell += f'<div>{_meter(entry.taken)} <span style="{style}">promised</span></div>'
    return cell


def _meter(share: float) -> str:
    # Jupyter's sanitizer drops `optimum`, so it defaults to 0.5. Because 0.5 is below `low`, the
    # browser treats low values as good and shows them in green.
    return (
        f'<meter min="0" max="1" low="0.5001" high="0.9" value="{share:.3f}"'
        f' style="width:{METER_EM}em"></meter>'
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
