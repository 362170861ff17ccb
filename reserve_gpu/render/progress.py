"""Live displays of a wait or a check, in a notebook, a terminal or a log.

A display is removed at the end of the wait or check. The `pictures` module builds its content. The
countdown of a reservation is a `Replaceable` line, which stays in its cell.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TextIO

from reserve_gpu.model.progress import Progress, Slow, Waiting
from reserve_gpu.render import columns, messages, pictures, terminal
from reserve_gpu.render.frontends import is_watched
from reserve_gpu.system import ipython_shell
from reserve_gpu.system.nonblocking import Printer

CLEAR = "\x1b[J"  # delete from the cursor to the end of the screen


class Frame(NamedTuple):
    """One state of a display.

    Attributes:
        picture: The GPU table. If it does not fit, its summary in one line is shown.
        news: A log gets a line whenever this value changes. If it is None, a log gets no line.
    """

    picture: pictures.Picture
    news: Any = None


class Live(AbstractContextManager["Live"]):
    """A context manager that shows the progress of a wait or a check, and removes it at the end.

    A notebook and a terminal replace the display in place. A log gets a line for each change, and
    keeps it.

    Args:
        stream: The output stream. None means the output of the current IPython session.

    Attributes:
        has_waited: Whether a wait for a device was shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.has_waited = False
        self._stream = stream
        self._screen: Terminal | Log | Notebook | None = None  # created at its first use
        self._second: int | None = None  # waited seconds of the last frame
        self._is_over = False

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove the display. Later frames are ignored."""
        if self._screen:
            self._screen.show(None)
            self._screen.close()
        self._is_over = True

    def show(self, news: Progress) -> None:
        """Show the progress of a wait, or of a slow call into the driver.

        A log gets a line if the place in the queue, a holder or a state changes.
        """
        if isinstance(news, Slow):
            self._show(news.waited_s, Frame(pictures.of_line(messages.slow(news)), Slow))
            return
        self.has_waited = True
        self._show(news.waited_s, Frame(pictures.wait(news), state_of(news)))

    def show_check(self, line: str, waited_s: float) -> None:
        """Show the progress of a check. A check takes only seconds, so a log gets no updates."""
        self._show(waited_s, Frame(pictures.of_line(line)))

    def _show(self, waited_s: float, frame: Frame) -> None:
        """Show a frame, unless one was already shown in the same second."""
        if self._is_over:
            return
        previous, self._second = self._second, int(waited_s)
        if self._second != previous:
            self._screen = self._screen or _screen(self._stream)
            self._screen.show(frame)


def state_of(waiting: Waiting) -> object:
    """Return the parts of a wait whose change is worth a line in a log."""
    return waiting.place, [(r.label, r.state, [h.pid for h in r.holders]) for r in waiting.rows]


def for_people() -> Live | None:
    """Return the display for a call from Python, or None if no person would see it."""
    if ipython_shell.current_shell() is not None:
        return Live()
    stream = sys.stderr  # None if this process has no stderr
    return Live(stream) if stream and stream.isatty() else None


class Terminal:
    """A display that rewrites its lines in place, and removes them at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._printer = stream, Printer(stream)
        self._is_coloured = terminal.is_coloured(os.environ, is_terminal=True)
        # The lines of the current frame. The cursor is below them, so the ^C that a terminal echoes
        # does not damage them.
        self._lines: list[str] = []

    def show(self, frame: Frame | None) -> None:
        """Replace the last frame, or remove it if the new frame is None.

        If the table is too high for the terminal, only its summary is written. If no line has
        changed, nothing is written. A frame is skipped while the terminal's output is stopped.
        """
        lines: list[str] = []
        if frame is not None:
            width, height = terminal.size(self._stream)
            width -= 1  # some terminals wrap in the last column
            lines = terminal.lines(frame.picture.layout, width, is_coloured=self._is_coloured)
            if len(lines) >= height:
                lines = [columns.cut(frame.picture.brief, width, "...")]
        if lines == self._lines:
            return
        back = f"\x1b[{len(self._lines)}A" if self._lines else ""
        text = f"\r{back}{CLEAR}" + "".join(f"{line}\n" for line in lines)
        if self._printer.print(text):
            self._lines = lines

    def close(self) -> None:
        """Stop the display."""
        self._printer.close()


class Log:
    """A display on a stream that can't be rewritten: the table, then a line for each change."""

    def __init__(self, stream: TextIO) -> None:
        self._printer = Printer(stream)
        self._news: Any = None

    def show(self, frame: Frame | None) -> None:
        """Write the frame if its news differs from the last frame."""
        if frame is not None and frame.news != self._news:
            text = str(frame.picture) if self._news is None else frame.picture.brief
            if self._printer.print(f"{text}\n"):
                self._news = frame.news

    def close(self) -> None:
        """Stop the display."""
        self._printer.close()


class Notebook:
    """A display that the notebook replaces in place.

    `show(None)` clears the display at the end, so a saved notebook contains an empty output.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._frame: Frame | None = None

    def show(self, frame: Frame | None) -> None:
        """Replace the last frame, or clear the display if the new frame is None.

        An unchanged frame is not sent again, because messages pile up while no client reads them.
        """
        if self._handle and frame == self._frame:
            return
        self._frame = frame
        data = {"text/plain": ""}
        if frame is not None:
            data = {"text/plain": str(frame.picture), "text/html": frame.picture._repr_html_()}
        if self._handle is None:
            # The handle is stored first, so that an interrupt in display() does not prevent a later
            # call from clearing the display.
            self._handle = ipython_shell.new_handle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """Do nothing. The kernel's connection stays open."""


class Replaceable:
    """A line that is shown in one or several cells, and can be replaced in all of them.

    A terminal can't replace a line, so each line stays.
    https://jupyter-client.readthedocs.io/en/stable/messaging.html#update-display-data
    """

    def __init__(self) -> None:
        self._publisher: Any = None
        self._known = {"display_id": os.urandom(16).hex()}

    def show(self, text: str) -> None:
        """Show the line in the current cell."""
        if not ipython_shell.has_kernel():
            print(text)
            return
        publisher = ipython_shell.current_shell().display_pub
        publisher.publish({"text/plain": text}, transient=self._known)
        # A %%capture in a later cell must not capture the replacement of this line.
        if not (self._publisher and ipython_shell.is_capturing(publisher)):
            self._publisher = publisher

    def replace(self, text: str) -> None:
        """Replace the line in all cells that show it."""
        if self._publisher:
            self._publisher.publish({"text/plain": text}, transient=self._known, update=True)


def _screen(stream: TextIO | None) -> Terminal | Log | Notebook:
    """Return the display for a stream: a notebook that a person reads, a terminal, or a log."""
    if stream is None:
        if ipython_shell.has_kernel() and is_watched():
            return Notebook()
        stream = sys.stdout
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Terminal(stream) if is_terminal else Log(stream)
