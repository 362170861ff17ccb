"""Measure, cut and wrap text by its width in terminal columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from reserve_gpu.model.untrusted import is_mark
from reserve_gpu.render.phrases import plain as text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reserve_gpu.render.phrases import Line

GAP = 2  # columns between two columns of a table
# The parts of a bar: memory in use, reserved memory that is not in use, and available memory.
FULL, MEDIUM, LIGHT = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{LIGHT SHADE}"


def width_of(text: str) -> int:
    """Return the width in terminal columns. Some characters take two columns, some take none."""
    if text.isascii():
        return len(text)
    return sum(0 if is_mark(letter) else 1 + (east_asian_width(letter) in "WF") for letter in text)


def width_of_line(line: Line) -> int:
    """Return the width of a styled line in terminal columns."""
    return width_of(text_of(line))


def cut(text: str, width: int, end: str = "\N{HORIZONTAL ELLIPSIS}") -> str:
    """Cut the text to a width, and append `end` if anything was cut."""
    if width_of(text) <= width:
        return text
    shortened = text
    while shortened and width_of(shortened) > width - len(end):
        shortened = shortened[:-1]
    return f"{shortened.rstrip()}{end}"


def row(cells: Iterable[tuple[Line, int, bool]]) -> Line:
    """Return a line of a table.

    Args:
        cells: The styled text, the width in columns, and whether the cell is a number. Numbers are
            right-aligned. A cell of width 0 is left out.
    """
    line: Line = ()
    for words, width, is_figure in cells:
        if width > 0:
            space = " " * (width - width_of_line(words))
            line += (space, *words, " " * GAP) if is_figure else (*words, space, " " * GAP)
    return line


def wrapped(line: Line, width: int, indent: int = 0) -> Iterator[Line]:
    """Wrap the line between words. A word is broken only if it is wider than a whole line."""
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
    """Return the text and style of a piece. The style of plain text is empty."""
    return (piece, "") if isinstance(piece, str) else piece
