"""A table of figures, with a bar in each row, for a terminal of any width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.render.columns import FULL, GAP, LIGHT, MEDIUM, cut, row, width_of, wrapped
from reserve_gpu.render.phrases import FAINT, STRONG, Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


SHORTEST_BAR, LONGEST_BAR = 8, 24  # columns
LEAST_NAME = 12  # columns; where less is left for the first column, another one is left out
# Of a bar, in turn; SGR's green, yellow and faint.
PIECES = ((FULL, "32"), (MEDIUM, "33"), (LIGHT, FAINT))


class Column(NamedTuple):
    """A column, whose first one names the rows.

    worth: where not all have room, the columns that are worth least are left out first.
    """

    title: str
    cells: tuple[str, ...]
    worth: int = 0
    is_figure: bool = False


class Sheet(NamedTuple):
    """A table. What is in it is fit to print.

    columns: the first one names the rows, and is cut where it has to be.
    bars: for each row, what its bar is made of, as shares of the longest one, 0 to 1.
    legend: what the pieces of a bar mean. has_total: the last row sums up the others.
    """

    columns: tuple[Column, ...]
    bars: tuple[tuple[float, ...], ...] = ()
    legend: tuple[str, ...] = ()
    title: str = ""
    has_total: bool = False

    @property
    def height(self) -> int:
        """Return how many rows there are."""
        return len(self.columns[0].cells)


def rows(sheet: Sheet, width: int) -> Iterator[Line]:
    """Yield the lines of a table as words with their styles. width: in columns of the terminal."""
    shown = _fitting(sheet.columns, width)
    widths = [_width(column) for column in shown]
    left = width - sum(widths) - GAP * len(widths)
    bar = min(LONGEST_BAR, left) if sheet.bars and left >= SHORTEST_BAR else 0
    widths[0] = max(1, min(widths[0], width - sum(widths[1:]) - GAP * (len(widths) - 1)))
    rooms = [widths[0], bar, *widths[1:]]  # the bar stands behind the name
    figures = [False, False, *(column.is_figure for column in shown[1:])]

    def line(texts: Sequence[str], style: str, pieces: Line = ()) -> Line:
        fitting = map(cut, texts, widths)
        first, *others = (((text, style),) for text in fitting)
        return row(zip([first, pieces, *others], rooms, figures, strict=True))

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
    """Return how many columns of a bar each of its pieces takes; together they are never longer.

    A little is not nothing, where there is room.
    """
    whole = min(length, round(sum(shares) * length) or (sum(shares) > 0))
    ends = [min(whole, round(sum(shares[: place + 1]) * length)) for place in range(len(shares))]
    ends[-1] = whole
    return [end - before for end, before in zip(ends, [0, *ends], strict=False)]


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that have room; the first one always has."""
    first, *others = columns
    least = min(_width(first), LEAST_NAME)
    while others and least + sum(GAP + _width(each) for each in others) > width:
        others.remove(min(others, key=lambda each: each.worth))
    return [first, *others]


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
