"""The status in a terminal, in a log and in a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reserve_gpu.model import State
from reserve_gpu.report.layout import QUEUE_TITLE, TITLES
from reserve_gpu.report.words import FAINT, MARK, STRONG

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import OverflowMethod, RenderableType
    from rich.text import Text

    from reserve_gpu.report.layout import Entry, Layout

STYLES = {STRONG: "bold", FAINT: "dim", MARK: "bold cyan"}
STATES = {
    State.FREE: "bold green",
    State.RESERVED: "bold yellow",
    State.AWAITED: "bold yellow",
    State.BUSY: "bold red",
}
OTHER_STATE = "bold magenta"
BAR = 8  # columns
FULL, LIGHT = "\N{FULL BLOCK}", "\N{LIGHT SHADE}"
# In place of letters that not every encoding has; the others become question marks.
ASCII = {FULL: "#", LIGHT: ".", "\N{HORIZONTAL ELLIPSIS}": "..."}
HEAD = (*TITLES[:3], "", *TITLES[3:])  # the bar of the memory has no title
STATE, NAME, BARS, MEMORY, USE = 1, 2, 3, 4, 5
LEAST_NAME = 6  # columns; where less is left for the name, another column is left out
GAP = 2
INDENT = 5
PLAIN_COLUMNS = 4000  # so wide that no line is broken where there is no terminal


def text(layout: Layout, *, is_plain: bool = False) -> str:
    """How it looks on standard output: coloured if that is a terminal, and broken to its width.

    is_plain: without colours and each line in one piece, also in a terminal.
    """
    from rich.console import Console, Group
    from rich.theme import Theme

    is_terminal = not is_plain and hasattr(sys.stdout, "isatty") and sys.stdout.isatty()
    console = Console(
        theme=Theme(STYLES),
        force_terminal=is_terminal,
        force_jupyter=False,
        width=None if is_terminal else PLAIN_COLUMNS,
        highlight=False,
        legacy_windows=False,
    )
    is_ascii = not console.encoding.startswith("utf")
    with console.capture() as captured:
        parts = _parts(layout, console.width, "crop" if is_ascii else "ellipsis")
        console.print(Group(*parts))
    words = "\n".join(line.rstrip() for line in captured.get().splitlines())
    if not is_ascii:
        return words
    for letter, instead in ASCII.items():
        words = words.replace(letter, instead)
    return words.encode(console.encoding, "replace").decode(console.encoding)


def _parts(layout: Layout, width: int, overflow: OverflowMethod) -> Iterator[RenderableType]:
    """What is printed, from above: each row of the table is followed by what is said about it."""
    from rich.padding import Padding
    from rich.text import Text

    yield Text.assemble(*layout.head)
    if layout.advice:
        yield Text.assemble(*layout.advice)
    head, *rows = _rows(layout.entries, width, overflow)
    yield head
    for entry, row in zip(layout.entries, rows, strict=True):
        yield row
        for line in entry.lines:
            yield Padding.indent(Text.assemble(*line), INDENT + 2 * entry.is_instance)
    if layout.waiting:
        yield Text(QUEUE_TITLE, FAINT)
    for line in layout.waiting:
        yield Padding.indent(Text.assemble(*line), 1)
    for line in layout.remarks:
        yield Text.assemble(*line)


def _rows(entries: Sequence[Entry], width: int, overflow: OverflowMethod) -> Iterator[Text]:
    """The titles and a line for each device; figures stand to the right.

    overflow: how a name looks for which there is not enough room.
    """
    from rich.cells import cell_len
    from rich.text import Text

    rows = [HEAD, *map(_cells, entries)]
    widths = [max(map(cell_len, column)) + GAP for column in zip(*rows, strict=True)]
    room = width + GAP
    for column in (BARS, USE, MEMORY):
        if sum(widths) - max(0, widths[NAME] - LEAST_NAME - GAP) > room:
            widths[column] = 0
    widths[NAME] = max(1 + GAP, min(widths[NAME], room - sum(widths) + widths[NAME]))
    for entry, cells in zip([None, *entries], rows, strict=True):
        row = Text(no_wrap=True, overflow="crop", style="" if entry else FAINT)
        styles = {BARS: FAINT}
        if entry and entry.state:
            styles[STATE] = STATES.get(entry.state, OTHER_STATE)
        for column, words in enumerate(cells):
            if widths[column]:
                cell = Text(words, styles.get(column, ""))
                cell.truncate(widths[column] - GAP, overflow=overflow)
                cell.align("right" if column in (MEMORY, USE) else "left", widths[column] - GAP)
                row.append_text(cell).append(" " * GAP)
        row.rstrip()
        yield row


def _cells(entry: Entry) -> tuple[str, ...]:
    number = f"  {entry.number}" if entry.is_instance else entry.number
    state = entry.state.value if entry.state else ""
    bar = ""
    if entry.share is not None:
        full = round(entry.share * BAR) or (entry.share > 0.001)  # a little memory is not no memory
        bar = FULL * full + LIGHT * (BAR - full)
    return number, state, entry.name, bar, entry.memory, entry.use
