"""The picture as text: in a terminal, in a log and in a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO

from reserve_gpu.model.devices import State
from reserve_gpu.render import columns, tables
from reserve_gpu.render.columns import FULL, GAP, LIGHT, MEDIUM
from reserve_gpu.render.phrases import FAINT, MARK, QUEUE_TITLE, STRONG, TAKEN, TITLES, TYPED, Line
from reserve_gpu.render.phrases import plain as text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reserve_gpu.render.layout import Entry, Layout

# The numbers of "select graphic rendition", ECMA-48.
STYLES = {STRONG: "1", FAINT: "2", MARK: "1;36", TYPED: "1"}
STATES = {State.FREE: "1;32", **dict.fromkeys(TAKEN, "1;33"), State.BUSY: "1;31"}
OTHER_STATE = "1;35"
BAR, LONGEST_BAR = 6, 20  # columns
# Of a bar, from that load on: green, yellow, red; as a notebook's <meter> has them.
LOADS = ((0.9, "31"), (0.5, "33"), (0.0, "32"))
HEAD = (*TITLES[:3], "", TITLES[3], "", *TITLES[4:])  # bars have no title
STATE, NAME, BARS, MEMORY, LOAD_BARS, UTIL, TEMPERATURE, POWER = range(1, 9)
FIGURES = (MEMORY, UTIL, TEMPERATURE, POWER)
HEAT_FROM = 119  # columns: of 120, a picture that is rewritten in place leaves one free
LEAST_NAME = 6  # columns; where less is left for the name, another column is left out
INDENT = 5
PLAIN_COLUMNS = 4000  # so wide that no line is broken where there is no terminal


def plain(layout: Layout) -> str:
    """Return the picture without colours, each line in one piece."""
    made = "\n".join(text_of(line).rstrip() for line in rows(layout, PLAIN_COLUMNS))
    return _in_its_letters(made, sys.stdout)


def text(layout: Layout, stream: TextIO | None = None) -> str:
    """Return how it looks on a stream, by default stdout; broken to the width of a terminal.

    Coloured text in a pipe is for a screen as well: `watch` says in COLUMNS how wide its own is.
    """
    stream = stream or sys.stdout
    on_terminal = is_terminal(stream)
    has_colours = is_coloured(os.environ, is_terminal=on_terminal)
    has_width = on_terminal or (has_colours and "COLUMNS" in os.environ)
    width = size(stream)[0] if has_width else PLAIN_COLUMNS
    made = "\n".join(lines(layout, width, is_coloured=has_colours, breaks_commands=False))
    return _in_its_letters(made, stream)


def is_coloured(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Tell whether to use colours.

    environ: of this process. NO_COLOR (https://no-color.org) comes before FORCE_COLOR
    (https://force-color.org); each counts if it is not empty.
    """
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (is_terminal and environ.get("TERM") != "dumb")


def is_terminal(stream: TextIO) -> bool:
    """Tell whether it is a terminal; a stand-in for standard output need not say."""
    return hasattr(stream, "isatty") and stream.isatty()


def size(stream: TextIO) -> tuple[int, int]:
    """Return the columns and the lines of the terminal."""
    with suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
        if size.columns and size.lines:
            return size
    return shutil.get_terminal_size()


def lines(
    layout: Layout, width: int, *, is_coloured: bool, breaks_commands: bool = True
) -> list[str]:
    """Return the picture line by line.

    width: in columns of the terminal. breaks_commands: also what can be typed has to fit in there;
    else it stands on a line of its own where it does not: of a broken one the first half would run.
    """
    made = rows(layout, width, breaks_commands=breaks_commands)
    return [_styled(line, is_coloured=is_coloured) for line in made]


def _in_its_letters(text: str, stream: TextIO) -> str:
    """Return the text with a question mark for each letter that the stream can't write."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def rows(
    layout: Layout, width: int, *, breaks_commands: bool = True, spare: int = 0
) -> Iterator[Line]:
    """Yield the lines as words with their styles.

    breaks_commands: also what can be typed has to fit. spare: so many lines more are no loss.
    """
    for line in layout.head:
        yield from columns.wrapped(line, width)
    if layout.entries:
        yield from _table(layout.entries, width, spare)
    if layout.queue:
        yield ((QUEUE_TITLE, FAINT),)
    for line in layout.queue:
        yield from columns.wrapped(line, width, indent=1)
    for sheet in layout.sheets:
        yield from tables.rows(sheet, width)
    for line in layout.foot:
        is_command = bool(line) and columns.part(line[-1])[1] == TYPED
        if breaks_commands or not is_command or columns.width_of_line(line) <= width:
            yield from columns.wrapped(line, width)
            continue
        if before := line[:-1]:
            yield from columns.wrapped(before, width)
        yield (line[-1],)
    for section in layout.sections:
        yield ("",)
        yield from rows(section, width, breaks_commands=breaks_commands)


def _table(entries: Sequence[Entry], width: int, spare: int) -> Iterator[Line]:
    """Yield the titles and a line for each device; people who don't fit there stand below it."""
    rows = [_cells(entry) for entry in entries]
    widths = _widths(rows)
    if width < PLAIN_COLUMNS:
        _fit(widths, entries, width, spare)
    has_room = sum(widths) + columns.width_of(HEAD[-1]) <= width
    rooms = (max(0, width - GAP) for width in widths)
    titles = [((columns.cut(*each), FAINT),) for each in zip(HEAD, rooms, strict=False)]
    yield (*_row(titles, widths), (HEAD[-1] if has_room else "", FAINT))
    for entry, cells in zip(entries, rows, strict=True):
        who, below = entry.who, list(entry.more)
        if who and sum(widths) + columns.width_of_line(who) > width:
            who, below = (), [entry.who, *below]
        yield (*_row(_styled_cells(entry, cells, widths), widths), *who)
        for line in below:
            yield from columns.wrapped(line, width, indent=INDENT + 2 * entry.is_instance)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column with the gap behind it, 0 for one that is left out."""
    widths = []
    for title, *cells in zip(HEAD, *rows, strict=False):
        widest = max(map(columns.width_of, cells))
        widths.append(max(widest, columns.width_of(title)) + GAP if widest else 0)
    return widths


def _fit(widths: list[int], entries: Sequence[Entry], width: int, spare: int) -> None:
    """Leave out columns, or make them narrower, so that they fit; longer bars take what is left.

    spare: so many lines more are no loss.
    """
    people = [columns.width_of_line(entry.who) for entry in entries]

    def below() -> int:  # how many people stand below their device
        return sum(who > width - sum(widths) for who in people)

    # What people have is worth more than how warm it is, and than bars.
    heat = widths[TEMPERATURE], widths[POWER]
    widths[TEMPERATURE] = widths[POWER] = 0
    before = below()
    if width >= HEAT_FROM:
        widths[TEMPERATURE], widths[POWER] = heat
    if sum(widths) > width or below() > before + spare:
        widths[TEMPERATURE] = widths[POWER] = 0
    left = width - sum(widths)
    if not spare and any(left < who <= left + widths[BARS] for who in people):
        widths[BARS] = 0
    room = width + GAP
    if sum(widths) > room:
        widths[BARS] = 0
    for column in (UTIL, MEMORY):
        if sum(widths) - max(0, widths[NAME] - LEAST_NAME - GAP) > room:
            widths[column] = 0
    if widths[NAME]:
        widths[NAME] = max(1 + GAP, min(widths[NAME], room - sum(widths) + widths[NAME]))
    left = width - sum(widths)
    beside = [columns.width_of(HEAD[-1]), *(who for who in people if who <= left)]
    _lengthen_bars(widths, entries, left - max(beside))


def _lengthen_bars(widths: list[int], entries: Sequence[Entry], left: int) -> None:
    """Add bars for the load too, and make all longer, where so many columns are left."""
    if not widths[BARS]:
        return
    if left >= BAR + GAP and any(entry.load is not None for entry in entries):
        widths[LOAD_BARS] = BAR + GAP
        left -= BAR + GAP
    bars = [column for column in (BARS, LOAD_BARS) if widths[column]]
    for column in bars:
        widths[column] += max(0, min(LONGEST_BAR - BAR, left // len(bars)))


def _row(cells: Sequence[Line], widths: Sequence[int]) -> Line:
    """Return one line of the table."""
    return columns.row(
        (cell, width - GAP, column in FIGURES)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def _cells(entry: Entry) -> tuple[str, ...]:
    """Return the text of each column; of a bar as many letters as the shortest has.

    Bars for the load come where there is room for them.
    """
    number = f"  {entry.number}" if entry.is_instance else entry.number
    state = entry.state.value if entry.state else ""
    bar = "" if entry.share is None else FULL * BAR
    heat = entry.temperature, entry.power
    return number, state, entry.name, bar, entry.memory, "", entry.util, *heat


def _styled_cells(entry: Entry, cells: Sequence[str], widths: Sequence[int]) -> list[Line]:
    """Return the columns with their styles, as long as there is room for them."""
    state = STATES.get(entry.state, OTHER_STATE) if entry.state else ""
    styles = {STATE: state}
    if entry.is_mine:
        styles |= dict.fromkeys((0, NAME, MEMORY, UTIL), STRONG)
    styled: list[Line] = [
        ((columns.cut(cell, max(0, column_width - GAP)), styles.get(column, "")),)
        for column, (cell, column_width) in enumerate(zip(cells, widths, strict=True))
    ]
    styled[BARS] = _bar(entry.share, entry.taken, widths[BARS] - GAP)
    styled[LOAD_BARS] = _bar(entry.load, None, widths[LOAD_BARS] - GAP)
    return styled


def _bar(share: float | None, taken: float | None, length: int) -> Line:
    """Return a bar: what is in use, in a colour by how much, what is promised, what is left."""
    if share is None or length <= 0:
        return ()
    full = _columns(share, length)
    medium = max(full, _columns(taken or 0.0, length)) - full
    colour_of_load = next(code for least, code in LOADS if share >= least)
    rest = MEDIUM * medium + LIGHT * (length - full - medium)
    return (FULL * full, colour_of_load), (rest, FAINT)


def _columns(share: float, length: int) -> int:
    """Return how many columns of a bar that is; a little memory is not no memory."""
    return round(share * length) or share > 0.001


def _styled(line: Line, *, is_coloured: bool) -> str:
    made = ""
    left = len(text_of(line).rstrip())
    for style, parts in groupby(map(columns.part, line), key=itemgetter(1)):
        words = "".join(words for words, _ in parts)
        shown, left = words[:left], left - len(words[:left])
        code = STYLES.get(style, style)
        is_styled = is_coloured and code and shown and not shown.isspace()
        made += f"\x1b[{code}m{shown}\x1b[0m" if is_styled else shown
    return made
