"""Render a layout as text, for a terminal, a log or a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TextIO

from reserve_gpu.model.devices import State
from reserve_gpu.render import columns
from reserve_gpu.render.columns import FULL, GAP, LIGHT, MEDIUM
from reserve_gpu.render.phrases import FAINT, MARK, QUEUE_TITLE, STRONG, TAKEN, TITLES, TYPED, Line
from reserve_gpu.render.phrases import plain as text_of
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reserve_gpu.render.layout import Entry, Layout

# SGR (Select Graphic Rendition) codes, from ECMA-48.
STYLES = {STRONG: "1", FAINT: "2", MARK: "1;36", TYPED: "1"}
STATES = {State.FREE: "1;32", **dict.fromkeys(TAKEN, "1;33"), State.BUSY: "1;31"}
OTHER_STATE = "1;35"
SHORTEST_BAR, BAR, LONGEST_BAR = 3, 6, 20  # columns
# The lowest share for each bar color (red, yellow and green), as in a notebook's <meter>.
LOADS = ((0.9, "31"), (0.5, "33"), (0.0, "32"))
HEAD = (*TITLES[:3], "", TITLES[3], "", *TITLES[4:])  # columns of bars have no title
STATE, NAME, BARS, MEMORY, LOAD_BARS, UTIL, TEMPERATURE, POWER = range(1, 9)
FIGURES = (MEMORY, UTIL, TEMPERATURE, POWER)
# The minimum width for showing temperature and power. A live display in a terminal with 120 columns
# uses only 119.
HEAT_FROM = 119
LEAST_NAME = 6  # minimum width of the name; other columns are left out to make room
INDENT = 5
PLAIN_COLUMNS = 4000  # width without a terminal, large enough that no line wraps


def plain(layout: Layout) -> str:
    """Render a layout as text without colors or line wrapping."""
    unwrapped = "\n".join(text_of(line).rstrip() for line in rows(layout, PLAIN_COLUMNS))
    return _encodable(unwrapped, sys.stdout)


def text(layout: Layout, stream: TextIO | None = None) -> str:
    """Render a layout as text for a stream, wrapped to the width of a terminal.

    Colored text in a pipe is also wrapped if COLUMNS is set, because another program will show it
    in a terminal. For example, `watch` sets COLUMNS to its terminal's width.

    Args:
        layout: The content to render.
        stream: The output stream. Defaults to standard output.
    """
    stream = stream or sys.stdout
    on_terminal = is_terminal(stream)
    has_colors = is_colored(os.environ, is_terminal=on_terminal)
    has_width = on_terminal or (has_colors and "COLUMNS" in os.environ)
    width = size(stream)[0] if has_width else PLAIN_COLUMNS
    wrapped = "\n".join(lines(layout, width, is_colored=has_colors, breaks_commands=False))
    return _encodable(wrapped, stream)


def is_colored(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Return whether to use colors.

    NO_COLOR (https://no-color.org) takes precedence over FORCE_COLOR (https://force-color.org). A
    variable that is set to an empty string has no effect.

    Args:
        environ: This process's environment variables.
        is_terminal: Whether the output is a terminal.
    """
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (is_terminal and environ.get("TERM") != "dumb")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal.

    A stream without an `isatty` method, such as some replacements for `sys.stdout`, does not count
    as one.
    """
    return hasattr(stream, "isatty") and stream.isatty()


def size(stream: TextIO) -> tuple[int, int]:
    """Return the terminal's width in columns and its height in lines."""
    with suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
        if size.columns and size.lines:
            return size
    return shutil.get_terminal_size()


def lines(
    layout: Layout, width: int, *, is_colored: bool, breaks_commands: bool = True
) -> list[str]:
    """Render a layout as lines of text.

    Args:
        layout: The content to render.
        width: The width of the terminal in columns.
        is_colored: Whether to add color codes.
        breaks_commands: Whether to wrap long commands. Otherwise, a command that does not fit gets
            a line of its own, even if that line is too long, so that users don't copy and run only
            the first half.
    """
    wrapped = rows(layout, width, breaks_commands=breaks_commands)
    return [_colored(line) if is_colored else text_of(line).rstrip() for line in wrapped]


def _encodable(text: str, stream: TextIO) -> str:
    """Replace each character that the stream can't encode with a question mark."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def rows(
    layout: Layout, width: int, *, breaks_commands: bool = True, spare: int = 0
) -> Iterator[Line]:
    """Render a layout as styled lines.

    Args:
        layout: The content to render.
        width: The width of the terminal in columns.
        breaks_commands: Whether to wrap long commands.
        spare: The number of additional lines that the terminal has room for.
    """
    yield from _sentences(layout.head, width, breaks_commands=breaks_commands)
    if layout.entries:
        yield from _table(layout.entries, width, spare)
    if layout.queue:
        yield ((QUEUE_TITLE, FAINT),)
    for line in layout.queue:
        yield from columns.wrapped(line, width, indent=1)
    for sheet in layout.sheets:
        with no_fork:
            from reserve_gpu.render import tables  # only a report has such tables

        yield from tables.rows(sheet, width)
    yield from _sentences(layout.foot, width, breaks_commands=breaks_commands)
    for section in layout.sections:
        yield ("",)
        yield from rows(section, width, breaks_commands=breaks_commands)


def _sentences(lines: Sequence[Line], width: int, *, breaks_commands: bool) -> Iterator[Line]:
    """Wrap the lines above or below a table."""
    for line in lines:
        is_command = bool(line) and columns.part(line[-1])[1] == TYPED
        if breaks_commands or not is_command or columns.width_of_line(line) <= width:
            yield from columns.wrapped(line, width)
            continue
        if introduction := line[:-1]:
            yield from columns.wrapped(introduction, width)
        yield (line[-1],)


def _table(entries: Sequence[Entry], width: int, spare: int) -> Iterator[Line]:
    """Yield the column titles, and then a line for each device.

    A holder that does not fit next to its device gets its own line.
    """
    rows = [_cells(entry) for entry in entries]
    widths = _widths(rows)
    if width < PLAIN_COLUMNS:
        _fit(widths, entries, width, spare)
    room = width - sum(widths)
    has_who = any(0 < columns.width_of_line(entry.who) <= room for entry in entries)
    rooms = (max(0, width - GAP) for width in widths)
    titles = [((columns.cut(*each), FAINT),) for each in zip(HEAD, rooms, strict=False)]
    yield (*_row(titles, widths), (HEAD[-1] if has_who else "", FAINT))
    for entry, cells in zip(entries, rows, strict=True):
        who, below = entry.who, list(entry.more)
        if who and columns.width_of_line(who) > room:
            who, below = (), [entry.who, *below]
        yield (*_row(_styled_cells(entry, cells, widths), widths), *who)
        for line in below:
            yield from columns.wrapped(line, width, indent=INDENT + 2 * entry.is_instance)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column, including the gap after it, or 0 for an empty column."""
    widths = []
    for title, *cells in zip(HEAD, *rows, strict=False):
        widest = max(map(columns.width_of, cells))
        widths.append(max(widest, columns.width_of(title)) + GAP if widest else 0)
    return widths


def _fit(widths: list[int], entries: Sequence[Entry], width: int, spare: int) -> None:
    """Fit the table into the terminal, and lengthen the bars if there is room.

    Columns that do not fit are left out or narrowed. It is more useful to show a holder next to its
    device than to show the bars or the temperature. So bars become shorter, and then disappear.

    Args:
        widths: The width of each column. This function changes the list in place.
        entries: The devices.
        width: The width of the terminal in columns.
        spare: The number of additional lines that the terminal has room for.
    """
    holder_widths = [columns.width_of_line(entry.who) for entry in entries]

    def count_wrapped() -> int:
        """Return the number of holders that do not fit next to their device."""
        return sum(holder > width - sum(widths) for holder in holder_widths)

    heat = widths[TEMPERATURE], widths[POWER]
    widths[TEMPERATURE] = widths[POWER] = 0
    wrapped_without_heat = count_wrapped()
    if width >= HEAT_FROM:
        widths[TEMPERATURE], widths[POWER] = heat
    if sum(widths) > width or count_wrapped() > wrapped_without_heat + spare:
        widths[TEMPERATURE] = widths[POWER] = 0
    _shorten_bars(widths, count_wrapped)
    room = width + GAP
    if sum(widths) > room:
        widths[BARS] = 0
    for column in (UTIL, MEMORY):
        if sum(widths) - max(0, widths[NAME] - LEAST_NAME - GAP) > room:
            widths[column] = 0
    if widths[NAME]:
        widths[NAME] = max(1 + GAP, min(widths[NAME], room - sum(widths) + widths[NAME]))
    if not count_wrapped():
        longest = max(columns.width_of(HEAD[-1]), *holder_widths)
        _lengthen_bars(widths, entries, width - sum(widths) - longest)


def _shorten_bars(widths: list[int], count_wrapped: Callable[[], int]) -> None:
    """Shorten or remove the bars if more holders then fit next to their device.

    Args:
        widths: The width of each table column. This function changes the list in place.
        count_wrapped: A function that counts the holders that do not fit.
    """
    bars = range(widths[BARS], SHORTEST_BAR + GAP - 1, -1)
    widths[BARS] = 0
    least = count_wrapped()
    for bar in bars:
        widths[BARS] = bar
        if count_wrapped() == least:
            return
    widths[BARS] = 0


def _lengthen_bars(widths: list[int], entries: Sequence[Entry], rest: int) -> None:
    """Use any spare terminal columns to add utilization bars and lengthen all bars.

    Args:
        widths: The width of each table column. This function changes the list in place.
        entries: The devices.
        rest: The number of unused terminal columns.
    """
    if not widths[BARS]:
        return
    if rest >= BAR + GAP and any(entry.load is not None for entry in entries):
        widths[LOAD_BARS] = BAR + GAP
        rest -= BAR + GAP
    bars = [column for column in (BARS, LOAD_BARS) if widths[column]]
    for column in bars:
        widths[column] += max(0, min(LONGEST_BAR - BAR, rest // len(bars)))


def _row(cells: Sequence[Line], widths: Sequence[int]) -> Line:
    return columns.row(
        (cell, width - GAP, column in FIGURES)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def _cells(entry: Entry) -> tuple[str, ...]:
    """Return the text of each column, with a memory bar of the minimum length.

    Utilization bars are empty at this point, and are added later if there is room.
    """
    number = f"  {entry.number}" if entry.is_instance else entry.number
    state = entry.state.value if entry.state else ""
    bar = "" if entry.share is None else FULL * BAR
    heat = entry.temperature, entry.power
    return number, state, entry.name, bar, entry.memory, "", entry.util, *heat


def _styled_cells(entry: Entry, cells: Sequence[str], widths: Sequence[int]) -> list[Line]:
    """Return the styled cells, truncated to the widths of their columns."""
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
    """Return a bar that shows the used and reserved shares, colored by the used share."""
    if share is None or length <= 0:
        return ()
    full = _columns(share, length)
    medium = max(full, _columns(taken or 0.0, length)) - full
    color_of_load = next(code for least, code in LOADS if share >= least)
    rest = MEDIUM * medium + LIGHT * (length - full - medium)
    return (FULL * full, color_of_load), (rest, FAINT)


def _columns(share: float, length: int) -> int:
    """Return a share's width in terminal columns, which is at least 1 for a share above 0.001."""
    return round(share * length) or share > 0.001


def _colored(line: Line) -> str:
    result = ""
    rest = len(text_of(line).rstrip())
    for style, parts in groupby(map(columns.part, line), key=itemgetter(1)):
        words = "".join(words for words, _ in parts)
        shown, rest = words[:rest], rest - len(words[:rest])
        code = STYLES.get(style, style)
        is_styled = code and shown and not shown.isspace()
        result += f"\x1b[{code}m{shown}\x1b[0m" if is_styled else shown
    return result
