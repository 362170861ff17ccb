"""How wide a text is in the columns of a terminal; to cut it, and to break it into lines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from reserve_gpu.model.untrusted import is_mark
from reserve_gpu.render.phrases import plain as text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reserve_gpu.render.phrases import Line

GAP = 2  # between two columns of a table
# Of a bar: what is in use, what is promised besides, and what is left.
FULL, MEDIUM, LIGHT = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}", "\N{LIGHT SHADE}"


def width_of(text: str) -> int:
    """Return the width in columns of a terminal; some letters take two, and some none."""
    if text.isascii():
        return len(text)
    return sum(0 if is_mark(letter) else 1 + (east_asian_width(letter) in "WF") for letter in text)


def width_of_line(line: Line) -> int:
    """Return the width in columns of words with styles."""
    return width_of(text_of(line))


def cut(text: str, width: int, end: str = "\N{HORIZONTAL ELLIPSIS}") -> str:
    """Return as much of the text as has room, with the end where it was cut."""
    if width_of(text) <= width:
        return text
    kept = text
    while kept and width_of(kept) > width - len(end):
        kept = kept[:-1]
    return f"{kept.rstrip()}{end}"


def row(cells: Iterable[tuple[Line, int, bool]]) -> Line:
    """Return a line of a table. cells: of each the words, the width, and whether it is a figure.

    Figures stand to the right. What has no width is left out.
    """
    line: Line = ()
    for words, width, is_figure in cells:
        if width > 0:
            space = " " * (width - width_of_line(words))
            line += (space, *words, " " * GAP) if is_figure else (*words, space, " " * GAP)
    return line


def wrapped(line: Line, width: int, indent: int = 0) -> Iterator[Line]:
    """Break the line between words into as many as it takes; inside a word only if it must."""
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
    """Return words and their style, which is empty for plain words."""
    return (piece, "") if isinstance(piece, str) else piece
