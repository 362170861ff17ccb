"""Render a table of numbers, with a bar in each row, to fit the width of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.render.columns import FULL, GAP, LIGHT, MEDIUM, cut, row, width_of, wrapped
from reserve_gpu.render.phrases import FAINT, STRONG, Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


SHORTEST_BAR, LONGEST_BAR = 8, 24  # columns
LEAST_NAME = 12  # minimum width of the first column; other columns are left out to make room
# The character and style of each piece of a bar. The SGR codes 32 and 33 are green and yellow.
PIECES = ((FULL, "32"), (MEDIUM, "33"), (LIGHT, FAINT))


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: The column's title.
        cells: The text of the column's cell in each row.
        worth: The column's priority. In a narrow terminal, the columns with the lowest priorities
            are left out.
        is_figure: Whether the cells are numbers, which are right-aligned.
    """

    title: str
    cells: tuple[str, ...]
    worth: int = 0
    is_figure: bool = False


class Sheet(NamedTuple):
    """A table of sanitized strings.

    Attributes:
        columns: The columns. The first one identifies the rows, and is truncated if it does not
            fit.
        bars: For each row, the length of each piece of its bar, as a fraction of the longest bar.
        legend: The meaning of each piece of a bar.
        title: The title above the table.
        has_total: Whether the last row contains the totals of the other rows.
    """

    columns: tuple[Column, ...]
    bars: tuple[tuple[float, ...], ...] = ()
    legend: tuple[str, ...] = ()
    title: str = ""
    has_total: bool = False

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return len(self.columns[0].cells)


def rows(sheet: Sheet, width: int) -> Iterator[Line]:
    """Render a table as styled lines.

    Args:
        sheet: The table.
        width: The width of the terminal in columns.
    """
    shown = _fitting(sheet.columns, width)
    widths = [_width(column) for column in shown]
    rest = width - sum(widths) - GAP * len(widths)
    bar = min(LONGEST_BAR, rest) if sheet.bars and rest >= SHORTEST_BAR else 0
    widths[0] = max(1, min(widths[0], width - sum(widths[1:]) - GAP * (len(widths) - 1)))
    rooms = [widths[0], bar, *widths[1:]]  # the bar comes second
    figures = [False, False, *(column.is_figure for column in shown[1:])]

    def line(texts: Sequence[str], style: str, pieces: Line = ()) -> Line:
        fitting = map(cut, texts, widths)
        first, *rest = (((text, style),) for text in fitting)
        return row(zip([first, pieces, *rest], rooms, figures, strict=True))

    if sheet.title:
        yield ("",)
        yield from wrapped(((sheet.title, FAINT),), width)
    yield line([column.title for column in shown], FAINT)
    for number in range(sheet.height):
        style = STRONG if sheet.has_total and number == sheet.height - 1 else ""
        pieces = _pieces(sheet.bars[number], bar) if bar and number < len(sheet.bars) else ()
        yield line([column.cells[number] for column in shown], style, pieces)
    if bar:
        yield from wrapped(_legend(sheet.legend), width)


def in_columns(shares: Sequence[float], length: int) -> list[int]:
    """Return the width of each piece of a bar, in terminal columns.

    The widths never add up to more than `length`. They add up to at least 1 if any piece has a
    length above zero.

    Args:
        shares: The lengths of the pieces, as fractions of the longest bar.
        length: The width of the longest bar, in terminal columns.
    """
    total = min(length, round(sum(shares) * length) or (sum(shares) > 0))
    ends = [min(total, round(sum(shares[: place + 1]) * length)) for place in range(len(shares))]
    ends[-1] = total
    return [end - start for end, start in zip(ends, [0, *ends], strict=False)]


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the first column and the most important other columns that fit the width."""
    first, *rest = columns
    least = min(_width(first), LEAST_NAME)
    while rest and least + sum(GAP + _width(each) for each in rest) > width:
        rest.remove(min(rest, key=lambda each: each.worth))
    return [first, *rest]


def _width(column: Column) -> int:
    return max(map(width_of, (column.title, *column.cells)))


def _pieces(shares: Sequence[float], length: int) -> Line:
    counts = in_columns(shares, length)
    return tuple(
        (letter * count, style)
        for (letter, style), count in zip(PIECES, counts, strict=False)
        if count
    )


def _legend(words: Sequence[str]) -> Line:
    line: Line = ()
    for (letter, style), word in zip(PIECES, words, strict=False):
        line += (letter * 2, style), (f" {word}{' ' * GAP}", FAINT)
    return line
