"""The `reserve-gpu top` command: show the status in a terminal, and refresh it every second."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.commands.output import Output
from reserve_gpu.model.errors import DriverError, RequestError, command_line
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import columns, pictures, terminal
from reserve_gpu.render.frontends import SHELL, for_this_process
from reserve_gpu.render.phrases import COMMAND_LIMIT, FAINT, Line, gib
from reserve_gpu.render.progress import Live
from reserve_gpu.reservation.status import status_reader

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.render.status_view import Status


REFRESH_S = 1.0  # seconds between status updates
ESCAPE = "\x1b"
QUIT_KEYS = ("q", ESCAPE)
MIN_LINES = 4  # lines in the shortest process list: blank, title, one process, "N more"


def _status_hint() -> str:
    return f"To see the status once: {command_line('status')}"


def add_arguments(_parser: ArgumentParser) -> None:
    """Do nothing, because `top` takes no arguments."""


def run(_arguments: Namespace) -> Output:
    """Show the status until the user quits.

    Raises:
        RequestError: There is no terminal, or curses can't use it.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RequestError(f"reserve-gpu top needs a terminal. {_status_hint()}")
    try:
        import curses
    except ImportError:  # Python on Windows has no curses
        raise RequestError(
            "reserve-gpu top needs the curses module, which this Python installation lacks. "
            f"{_status_hint()}"
        ) from None
    is_colored = terminal.is_colored(os.environ, is_terminal=True)
    # On SIGTERM, SystemExit lets curses.wrapper restore the terminal.
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with (
            Live(sys.stderr) as live,
            status_reader(live.show) as read,
            suppress(KeyboardInterrupt),
        ):
            first = read()  # outside curses, so that errors are printed as usual
            live.clear()  # before curses switches to the terminal's alternate screen
            curses.wrapper(lambda screen: Top(screen, read, is_colored=is_colored).run(first))
    except curses.error as error:
        name = sanitize(os.environ.get("TERM", ""))
        text = f"reserve-gpu top can't use this terminal (TERM={name}: {error}). {_status_hint()}"
        raise RequestError(text) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
    return Output()


def processes(rows: Sequence[DeviceStatus], width: int, max_lines: int) -> list[Line]:
    """Return lines that list the processes on all devices, sorted by memory use.

    Args:
        rows: The status of each device.
        width: The width of the terminal in columns.
        max_lines: The maximum number of lines, including a blank line and the title. If there is
            too little space for one process, no lines are returned.
    """
    pairs = [(row, process) for row in rows for process in (*row.processes, *row.background)]
    pairs.sort(key=lambda pair: -(pair[1].memory_mib or 0))
    if max_lines < MIN_LINES or not pairs:
        return []
    lines: list[Line] = [("",), (("processes", FAINT),)]
    available = max_lines - len(lines)
    shown = pairs if len(pairs) <= available else pairs[: available - 1]
    users = [sanitize(process.user or "?") for _, process in shown]
    user_width = max(map(columns.width_of, users))
    for (row, process), user in zip(shown, users, strict=True):
        memory = "" if process.memory_mib is None else gib(process.memory_mib)
        start = f"{row.label:<6}{memory:>10}  {process.kind:<8}  {process.pid:>8}"
        padding = " " * (user_width - columns.width_of(user))
        command = sanitize(process.command or "?", COMMAND_LIMIT)
        lines.append((columns.cut(f"{start}  {user}{padding}  {command}", width),))
    if hidden := len(pairs) - len(shown):
        lines.append((f"{hidden} more",))
    return lines


class Top:
    """The live status on a curses screen.

    Args:
        screen: The curses window.
        read: A function that reads the status of the machine.
        is_colored: Whether to use colors if the terminal supports them.
    """

    def __init__(self, screen: Any, read: Callable[[], Status], *, is_colored: bool) -> None:
        import curses

        self._curses, self._screen, self._read = curses, screen, read
        self._scroll = 0  # number of lines scrolled off the top
        self._attributes: dict[str, int] = {}
        with suppress(curses.error):  # the terminal can't hide its cursor
            curses.curs_set(0)
        if is_colored and curses.has_colors():
            curses.use_default_colors()
            for color_ in range(1, 7):
                curses.init_pair(color_, color_, -1)
            self._attributes = {"1": curses.A_BOLD, "2": curses.A_DIM}
            self._attributes |= {f"3{n}": curses.color_pair(n) for n in range(1, 7)}

    def run(self, status: Status | DriverError) -> None:
        """Show the status, and refresh it every second, until the user presses a quit key."""
        due = time.monotonic() + REFRESH_S
        while True:
            rows = list(self._lines(status))
            self._draw(rows)
            key = self._key(due - time.monotonic())
            if key in QUIT_KEYS:
                return
            page = self._screen.getmaxyx()[0] - 1
            steps = {"KEY_DOWN": 1, "KEY_UP": -1, "KEY_NPAGE": page, "KEY_PPAGE": -page}
            targets = {"KEY_HOME": 0, "KEY_END": len(rows)}
            self._scroll = targets.get(key, self._scroll + steps.get(key, 0))
            if time.monotonic() >= due:
                due = time.monotonic() + REFRESH_S
                try:
                    status = self._read()
                except DriverError as error:  # the driver might recover, so keep trying
                    status = error

    def _lines(self, status: Status | DriverError) -> Iterator[Line]:
        """Yield the lines that show the status, or the driver's error."""
        height, width = self._screen.getmaxyx()
        if isinstance(status, DriverError):
            yield from terminal.rows(pictures.of_text(str(status)).layout, width - 1)
            return
        picture = status._replace(frontend=for_this_process(SHELL), is_all=True).picture().layout
        lines = list(terminal.rows(picture, width - 1))
        lines = list(terminal.rows(picture, width - 1, spare=max(0, height - 1 - len(lines))))
        yield from lines
        yield from processes(status.rows, width - 1, height - 1 - len(lines))

    def _key(self, timeout_s: float) -> str:
        """Return the pressed key or its curses name, or an empty string after the timeout."""
        self._screen.timeout(max(0, round(timeout_s * 1000)))
        keys: list[str] = []
        with suppress(self._curses.error):  # no further key is pending
            keys.append(self._screen.getkey())
            self._screen.timeout(0)
            # Alt-x, or a key that curses can't name, arrives as Esc followed by other characters.
            while keys[0] == ESCAPE:
                keys.append(self._screen.getkey())
        return "".join(keys)

    def _draw(self, lines: Sequence[Line]) -> None:
        height, width = self._screen.getmaxyx()
        visible = max(1, height - 1)
        self._scroll = max(0, min(self._scroll, len(lines) - visible))
        self._screen.erase()
        for y, line in enumerate(lines[self._scroll : self._scroll + visible]):
            x = 0
            for part in line:
                text, style = columns.part(part)
                self._write(y, x, text, terminal.STYLES.get(style, style))
                x += columns.width_of(text)
        keys = f"{time.strftime('%H:%M:%S')}   q quit"
        keys += "   arrows, PgUp, PgDn, Home, End: scroll" if len(lines) > visible else ""
        self._write(height - 1, 0, columns.cut(keys, width - 1), "2")
        self._screen.refresh()

    def _write(self, y: int, x: int, text: str, code: str) -> None:
        attribute = 0
        for number in code.split(";"):
            attribute |= self._attributes.get(number, 0)
        with suppress(self._curses.error):  # the terminal is being resized
            self._screen.addstr(y, x, text, attribute)
