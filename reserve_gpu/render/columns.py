"""Measure, truncate and wrap text by its width in terminal columns."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from reserve_gpu.model.untrusted import is_mark
from reserve_gpu.render.phrases import plain as text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reserve_gpu.render.phrases import Line

GAP = 2  # spaces between table columns
# Bar characters for memory in use, memory that is reserved but unused, and available memory.
FULL, MEDIUM, LIGHT = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{LIGHT SHADE}"


def width_of(text: str) -> int:
    """Return the width of a string in terminal columns.

    Some characters take two columns, and some take none.
    """
    if text.isascii():
        return len(text)
    return sum(map(_letter_width, text))


@cache
def _letter_width(letter: str) -> int:
    return 0 if is_mark(letter) else 1 + (east_asian_width(letter) in "WF")


def width_of_line(line: Line) -> int:
    """Return the width of a styled line in terminal columns."""
    return width_of(text_of(line))


def cut(text: str, width: int, end: str = "\N{HORIZONTAL ELLIPSIS}") -> str:
    """Truncate text to a width in terminal columns.

    Truncated text ends with `end`, which is included in the width.
    """
    if width_of(text) <= width:
        return text
    shortened = text
    while shortened and width_of(shortened) > width - len(end):
        shortened = shortened[:-1]
    return f"{shortened.rstrip()}{end}"


def row(cells: Iterable[tuple[Line, int, bool]]) -> Line:
    """Return one row of a table as a styled line.

    Args:
        cells: For each cell, its styled text, its width in terminal columns, and whether it is a
            number. Numbers are right-aligned. Cells of width 0 are left out.
    """
    line: Line = ()
    for words, width, is_figure in cells:
        if width > 0:
            space = " " * (width - width_of_line(words))
            line += (space, *words, " " * GAP) if is_figure else (*words, space, " " * GAP)
    return line


def wrapped(line: Line, width: int, indent: int = 0) -> Iterator[Line]:
    """Wrap a line between words. A word is split only if it does not fit on one line."""
    if indent + width_of_line(line) <= width:
        yield (" " * indent, *line)
        return
    letters = [(letter, style) for words, style in map(part, line) for letter in words]
    row: Line = ()
    used = indent
    for match in re.finditer(r"\S+\s*|\s+", text_of(tuple(letters))):
        word = tuple(letters[slice(*match.span())])
        has_room = width_of(match[0].rstrip()) <= width - indent
        for piece in [word] if has_room else [(letter,) for letter in word]:
            if used > indent and used + width_of(text_of(piece).rstrip()) > width:
                yield (" " * indent, *row)
                row, used = (), indent
            row += piece
            used += width_of(text_of(piece))
    yield (" " * indent, *row)


def part(piece: str | tuple[str, str]) -> tuple[str, str]:
    """Return the text and style of one piece of a line. A plain string has an empty style."""
    return (piece, "") if isinstance(piece, str) else piece
