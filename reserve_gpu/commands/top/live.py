"""reserve-gpu top: the status live in a terminal, until q."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.commands.output import Output
from reserve_gpu.model.errors import DriverError, RequestError, own_line
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import columns, pictures, terminal
from reserve_gpu.render.frontends import SHELL, read_here
from reserve_gpu.render.phrases import COMMAND_LIMIT, FAINT, Line, gib
from reserve_gpu.render.progress import Live
from reserve_gpu.reservation.status import looking

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.render.status_view import Status


EVERY_S = 1.0
ESCAPE = "\x1b"
ENDS = ("q", ESCAPE)
LEAST_ROOM = 4  # lines: a blank one, the title, a process, and how many more there are


def _elsewhere() -> str:
    return f"{own_line('status')} shows the same once."


def add_arguments(_parser: ArgumentParser) -> None:
    """Add nothing: it has no arguments."""


def run(_arguments: Namespace) -> Output:
    """Show the status until q. Raises RequestError where there is no terminal that could."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RequestError(f"A live picture needs a terminal; {_elsewhere()}")
    try:
        import curses
    except ImportError:  # Windows
        raise RequestError(
            f"This Python has no curses, which a live picture needs; {_elsewhere()}"
        ) from None
    is_coloured = terminal.is_coloured(os.environ, is_terminal=True)
    # So that the terminal is left as it was.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with Live(sys.stderr) as live, looking(live.show) as look, suppress(KeyboardInterrupt):
            first = look()  # what is wrong from the start is said as by any other command
            live.clear()  # before the screen is another one
            curses.wrapper(lambda screen: Top(screen, look, is_coloured=is_coloured).run(first))
    except curses.error as error:
        name = sanitize(os.environ.get("TERM", ""))
        text = f"This terminal can't show a live picture (TERM={name}: {error}); {_elsewhere()}"
        raise RequestError(text) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    return Output()


def processes(rows: Sequence[DeviceStatus], room: int) -> list[Line]:
    """Return a line for each process on a device, those with the most memory first.

    room: so many lines at most, the title and a blank line among them; else none.
    """
    found = [(row, process) for row in rows for process in (*row.processes, *row.graphics)]
    found.sort(key=lambda each: -(each[1].memory_mib or 0))
    if room < LEAST_ROOM or not found:
        return []
    lines: list[Line] = [("",), (("processes", FAINT),)]
    shown_ = found if len(found) <= room - len(lines) else found[: room - len(lines) - 1]
    for row, process in shown_:
        memory = "" if process.memory_mib is None else gib(process.memory_mib)
        who = f"{sanitize(process.user or '?')}  {sanitize(process.command or '?', COMMAND_LIMIT)}"
        lines.append((f"{row.label:<6}{memory:>10}  {process.kind:<8}  {process.pid:>8}  {who}",))
    if rest := len(found) - len(shown_):
        lines.append((f"{rest} more",))
    return lines


class Top:
    """The live picture on a screen of curses. look: at the machine."""

    def __init__(self, screen: Any, look: Callable[[], Status], *, is_coloured: bool) -> None:
        import curses

        self._curses, self._screen, self._look = curses, screen, look
        self._above = 0  # lines that are scrolled away
        self._attributes: dict[str, int] = {}
        with suppress(curses.error):  # a terminal that can't hide its cursor
            curses.curs_set(0)
        if is_coloured and curses.has_colors():
            curses.use_default_colors()
            for colour_ in range(1, 7):
                curses.init_pair(colour_, colour_, -1)
            self._attributes = {"1": curses.A_BOLD, "2": curses.A_DIM}
            self._attributes |= {f"3{n}": curses.color_pair(n) for n in range(1, 7)}

    def run(self, seen: Status | DriverError) -> None:
        """Show the status, and look again each second, until a key ends it."""
        due = time.monotonic() + EVERY_S
        while True:
            rows = list(self._lines(seen))
            self._draw(rows)
            key = self._key(due - time.monotonic())
            if key in ENDS:
                return
            page = self._screen.getmaxyx()[0] - 1
            steps = {"KEY_DOWN": 1, "KEY_UP": -1, "KEY_NPAGE": page, "KEY_PPAGE": -page}
            ends = {"KEY_HOME": 0, "KEY_END": len(rows)}
            self._above = ends.get(key, self._above + steps.get(key, 0))
            if time.monotonic() >= due:
                due = time.monotonic() + EVERY_S
                try:
                    seen = self._look()
                except DriverError as error:  # it may come back
                    seen = error

    def _lines(self, seen: Status | DriverError) -> Iterator[Line]:
        """Yield the lines to show: of what went wrong, or of the machine."""
        height, width = self._screen.getmaxyx()
        if isinstance(seen, DriverError):
            yield from terminal.rows(pictures.of_line(str(seen)).layout, width - 1)
            return
        picture = seen._replace(frontend=read_here(SHELL), is_all=True).picture().layout
        lines = list(terminal.rows(picture, width - 1))
        lines = list(terminal.rows(picture, width - 1, spare=max(0, height - 1 - len(lines))))
        yield from lines
        yield from processes(seen.rows, height - 1 - len(lines))

    def _key(self, left_s: float) -> str:
        """Return the key that is pressed within that time, or its name, or nothing."""
        self._screen.timeout(max(0, round(left_s * 1000)))
        keys: list[str] = []
        with suppress(self._curses.error):  # no more of them
            keys.append(self._screen.getkey())
            self._screen.timeout(0)
            while keys[0] == ESCAPE:  # what comes with it is one key: Alt-x, or one without a name
                keys.append(self._screen.getkey())
        return "".join(keys)

    def _draw(self, lines: Sequence[Line]) -> None:
        height, width = self._screen.getmaxyx()
        room = max(1, height - 1)
        self._above = max(0, min(self._above, len(lines) - room))
        self._screen.erase()
        for y, line in enumerate(lines[self._above : self._above + room]):
            x = 0
            for part in line:
                words, style = columns.part(part)
                self._write(y, x, words, terminal.STYLES.get(style, style))
                x += columns.width_of(words)
        keys = f"{time.strftime('%H:%M:%S')}   q quit"
        keys += "   arrows, PgUp, PgDn, Home, End: more" if len(lines) > room else ""
        self._write(height - 1, 0, columns.cut(keys, width - 1), "2")
        self._screen.refresh()

    def _write(self, y: int, x: int, words: str, code: str) -> None:
        attribute = 0
        for number in code.split(";"):
            attribute |= self._attributes.get(number, 0)
        with suppress(self._curses.error):  # a window that is being made smaller
            self._screen.addstr(y, x, words, attribute)
