"""The status in a terminal, in a log and in a pipe."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

from reserve_gpu.model import State
from reserve_gpu.report.layout import QUEUE_TITLE, TITLES, Part, Style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

    from reserve_gpu.report.layout import Entry, Layout, Line

STYLES = {
    Style.PLAIN: "",
    Style.STRONG: "bold",
    Style.FAINT: "dim",
    Style.MARK: "bold cyan",
}
STATES = {
    State.FREE: "bold green",
    State.RESERVED: "bold yellow",
    State.AWAITED: "bold yellow",
    State.BUSY: "bold red",
}
OTHER_STATE = "bold magenta"
BAR = 8  # columns
BLOCKS, ASCII_BLOCKS = "\N{FULL BLOCK}\N{LIGHT SHADE}", "#."
GAP = "  "
HEAD = (*TITLES[:3], "", *TITLES[3:])  # the bar of the memory has no title
STATE, NAME, BARS, MEMORY, USE = 1, 2, 3, 4, 5
LEAST_NAME = 6  # columns; where less is left for the name, another column is left out
INDENT = 5
PLAIN_COLUMNS = 4000  # so wide that no line is broken where there is no terminal


def text(renderable: RenderableType) -> str:
    """How it looks on standard output: coloured if that is a terminal, broken to its width."""
    return _captured(renderable, sys.stdout, is_terminal=_is_terminal(sys.stdout))


def plain(renderable: RenderableType) -> str:
    """How it looks without colours, each line in one piece, in letters that can be printed."""
    stream = io.TextIOWrapper(io.BytesIO(), getattr(sys.stdout, "encoding", None) or "utf-8")
    return _captured(renderable, stream, is_terminal=False)


def rendered(layout: Layout, options: ConsoleOptions) -> RenderResult:
    """What a console prints: each row is followed by what is said about it."""
    from rich.padding import Padding

    yield _line(layout.head, options)
    if layout.advice:
        yield _line(layout.advice, options)
    rows = [_cells(entry, options) for entry in layout.entries]
    widths = _widths([HEAD, *rows], options.max_width)
    faint = STYLES[Style.FAINT]
    yield _row(HEAD, widths, options, dict.fromkeys(range(len(widths)), faint))
    for entry, row in zip(layout.entries, rows, strict=True):
        state = STATES.get(entry.state, OTHER_STATE) if entry.state else ""
        yield _row(row, widths, options, {STATE: state, BARS: faint})
        for line in entry.lines:
            yield Padding.indent(_line(line, options), INDENT + 2 * entry.is_instance)
    if layout.waiting:
        yield _line((Part(QUEUE_TITLE, Style.FAINT),), options)
    for line in layout.waiting:
        yield Padding.indent(_line(line, options), 1)
    for line in layout.remarks:
        yield _line(line, options)


def _captured(renderable: RenderableType, stream: Any, *, is_terminal: bool) -> str:
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
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().split("\n")).rstrip("\n")


def _is_terminal(stream: Any) -> bool:
    return hasattr(stream, "isatty") and bool(stream.isatty())


def _cells(entry: Entry, options: ConsoleOptions) -> tuple[str, ...]:
    number = f"  {entry.number}" if entry.is_instance else entry.number
    bar = _bar(entry.share, ASCII_BLOCKS if options.ascii_only else BLOCKS)
    state = entry.state.value if entry.state else ""
    return number, state, _printable(entry.name, options), bar, entry.memory, entry.use


def _bar(share: float | None, blocks: str) -> str:
    if share is None:
        return ""
    full = round(share * BAR) or (share > 0.001)  # a little memory is not no memory
    return blocks[0] * full + blocks[1] * (BAR - full)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The width of each column, 0 for one that is left out as the terminal is narrow."""
    from rich.cells import cell_len

    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(HEAD))]
    longest = widths[NAME]
    for dropped in (None, BARS, USE, MEMORY):
        if dropped is not None:
            widths[dropped] = 0
        others = sum(w + len(GAP) for w in widths if w) - widths[NAME] - len(GAP)
        widths[NAME] = min(longest, width - others)
        if widths[NAME] >= min(longest, LEAST_NAME):
            break
    widths[NAME] = max(1, widths[NAME])
    return widths


def _row(
    cells: Sequence[str], widths: Sequence[int], options: ConsoleOptions, styles: dict[int, str]
) -> Text:
    """One line of the table, cell by cell; figures stand to the right."""
    from rich.text import Text

    row = Text(no_wrap=True, overflow="crop")
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if width:
            words = Text(_printable(cell, options), styles.get(column, ""))
            words.truncate(width, overflow="crop" if options.ascii_only else "ellipsis")
            words.align("right" if column in (MEMORY, USE) else "left", width)
            row.append_text(words)
            row.append(GAP)
    row.rstrip()
    return row


def _line(parts: Line, options: ConsoleOptions) -> Text:
    from rich.text import Text

    styled = ((_printable(part.text, options), STYLES[part.style]) for part in parts)
    return Text.assemble(*styled)


def _printable(words: str, options: ConsoleOptions) -> str:
    """The words in letters that the stream has."""
    if options.encoding.startswith("utf"):
        return words
    words = words.replace("\N{HORIZONTAL ELLIPSIS}", "...")
    return words.encode(options.encoding, "replace").decode(options.encoding)
