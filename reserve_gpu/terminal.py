"""The status in a terminal, in a log and in a pipe. The only module that imports rich."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from reserve_gpu import loading
from reserve_gpu.device import State
from reserve_gpu.layout import FAINT, MARK, PLAIN, STRONG, TITLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from reserve_gpu.layout import Entry, Layout, Line

STYLES = {
    PLAIN: "",
    STRONG: "bold",
    FAINT: "dim",
    MARK: "bold cyan",
    State.FREE: "bold green",
    State.RESERVED: "bold yellow",
    State.BUSY: "bold red",
    State.UNKNOWN: "bold magenta",
    State.BROKEN: "bold magenta",
}
BAR = 8  # columns
BLOCKS, ASCII_BLOCKS = "\N{FULL BLOCK}\N{LIGHT SHADE}", "#."
GAP = "  "
HEAD = (*TITLES[:3], "", *TITLES[3:])  # the bar has none
STATE, NAME, BARS, MEMORY, USE = 1, 2, 3, 4, 5
LEAST_NAME = 6  # columns; where less is left, something else goes
INDENT = 5
PLAIN_COLUMNS = 4000  # where nobody looks at lines that are broken, they are not broken


def text(shown: Any) -> str:
    """How it looks on standard output: coloured if that is a terminal, broken to its width."""
    return _captured(shown, sys.stdout, is_terminal=_is_terminal(sys.stdout))


def plain(shown: Any) -> str:
    """How it looks without colours, each line in one piece, in letters that can be printed."""
    stream = io.TextIOWrapper(io.BytesIO(), getattr(sys.stdout, "encoding", None) or "utf-8")
    return _captured(shown, stream, is_terminal=False)


def rendered(layout: Layout, console: Console, options: ConsoleOptions) -> RenderResult:
    """The lines for a console: each row is followed by what is said about it."""
    width = options.max_width
    yield from _wrapped(layout.head, console, options, width)
    yield from _wrapped(layout.advice, console, options, width)
    rows = [_cells(entry, options) for entry in layout.entries]
    widths = _widths([HEAD, *rows], width)
    yield _row(HEAD, widths, options, dict.fromkeys(range(len(widths)), FAINT))
    for entry, row in zip(layout.entries, rows, strict=True):
        yield _row(row, widths, options, {STATE: entry.state, BARS: FAINT})
        for line in entry.lines:
            yield from _wrapped(line, console, options, width, INDENT + 2 * entry.is_part)
    if layout.waiting:
        yield _text("waiting in line", FAINT, options)
    for line in layout.waiting:
        yield from _wrapped(line, console, options, width, 1)
    for line in layout.remarks:
        yield from _wrapped(line, console, options, width)


def _captured(shown: Any, stream: Any, *, is_terminal: bool) -> str:
    with loading.definitions():
        from rich.console import Console

    console = Console(
        file=stream,
        force_terminal=is_terminal,
        force_jupyter=False,
        width=None if is_terminal else PLAIN_COLUMNS,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(shown)
    return captured.get().rstrip("\n")


def _is_terminal(stream: Any) -> bool:
    return hasattr(stream, "isatty") and bool(stream.isatty())


def _cells(entry: Entry, options: ConsoleOptions) -> tuple[str, ...]:
    index = f"  {entry.index}" if entry.is_part else entry.index
    bar = _bar(entry.share, ASCII_BLOCKS if options.ascii_only else BLOCKS)
    return index, entry.state, _printable(entry.name, options), bar, entry.memory, entry.use


def _bar(share: float | None, blocks: str) -> str:
    if share is None:
        return ""
    full = round(share * BAR) or (share > 0.001)  # what is little is not nothing
    return blocks[0] * full + blocks[1] * (BAR - full)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The width of each column, 0 for one that is left out as the terminal is narrow."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(HEAD))]
    longest = widths[NAME]
    for dropped in (None, BARS, USE, MEMORY):
        if dropped is not None:
            widths[dropped] = 0
        rest = sum(w + len(GAP) for w in widths if w) - widths[NAME]
        widths[NAME] = min(longest, width - rest + len(GAP))
        if widths[NAME] >= min(longest, LEAST_NAME):
            break
    widths[NAME] = max(1, widths[NAME])
    return widths


def _row(
    cells: Sequence[str], widths: Sequence[int], options: ConsoleOptions, styles: dict[int, str]
) -> Text:
    """One line of the table, cell by cell; figures stand to the right."""
    found = _text("", PLAIN, options)
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if width:
            words = _text(cell, styles.get(column, PLAIN), options)
            words.truncate(width, overflow="crop" if options.ascii_only else "ellipsis")
            words.align("right" if column in (MEMORY, USE) else "left", width)
            found.append_text(words)
            found.append(GAP)
    found.rstrip()
    found.no_wrap, found.overflow = True, "crop"
    return found


def _wrapped(
    line: Line, console: Console, options: ConsoleOptions, width: int, indent: int = 0
) -> list[Text]:
    """The line broken to the width, every part of it indented."""
    words = _text("", PLAIN, options)
    for part in line:
        words.append_text(_text(part.text, part.style, options))
    broken = words.wrap(console, max(10, width - indent))
    found = []
    for piece in broken:
        piece.rstrip()
        found.append(_text(" " * indent, PLAIN, options).append_text(piece))
    return found


def _text(words: str, style: str, options: ConsoleOptions) -> Text:
    from rich.text import Text

    return Text(_printable(words, options), STYLES[style])


def _printable(words: str, options: ConsoleOptions) -> str:
    """The words in letters that the stream has."""
    if options.encoding.startswith("utf"):
        return words
    words = words.replace("\N{HORIZONTAL ELLIPSIS}", "...")
    return words.encode(options.encoding, "replace").decode(options.encoding)
