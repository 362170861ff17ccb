"""The one live display: of a wait or a check, gone when that is over.

Also the line that counts a reservation down, which stays where it stands. What a display shows
comes from pictures; here is where it goes: to a notebook, a terminal, or a log.
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
    """What is shown at one moment: a picture, with a brief line where there is no room for it.

    news: what is worth a line in a log when it changes, None for nothing.
    """

    picture: pictures.Picture
    news: Any = None


class Live(AbstractContextManager["Live"]):
    """Shows how things stand: replaced in place in a notebook and a terminal, else a line on news.

    A context manager; at its end the display is taken away, where that can be done.
    stream: where to show it; None for wherever this IPython shows what cells print.
    has_waited: Whether a wait for a device was shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.has_waited = False
        self._stream = stream
        self._screen: Terminal | Log | Notebook | None = None  # made at its first use
        self._second: int | None = None  # of what was shown last
        self._is_over = False

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Take away what is shown, and show nothing more."""
        if self._screen:
            self._screen.show(None)
            self._screen.close()
        self._is_over = True

    def show(self, news: Progress) -> None:
        """Show how a wait stands, or what the driver takes long for.

        News for a log is another place in the queue, another holder or state.
        """
        if isinstance(news, Slow):
            self._show(news.waited_s, Frame(pictures.of_line(messages.slow(news)), Slow))
            return
        self.has_waited = True
        self._show(news.waited_s, Frame(pictures.wait(news), stands(news)))

    def show_check(self, line: str, waited_s: float) -> None:
        """Show how a check stands; it takes seconds, not hours, so nothing of it is news to log."""
        self._show(waited_s, Frame(pictures.of_line(line)))

    def _show(self, waited_s: float, frame: Frame) -> None:
        """Show it, at most once in every second that is counted."""
        if self._is_over:
            return
        before, self._second = self._second, int(waited_s)
        if self._second != before:
            self._screen = self._screen or _screen(self._stream)
            self._screen.show(frame)


def stands(waiting: Waiting) -> object:
    """Return the parts of a wait whose change is news."""
    return waiting.place, [(r.label, r.state, [h.pid for h in r.holders]) for r in waiting.rows]


def for_people() -> Live | None:
    """Return the display for a call from Python, None where nobody would see it."""
    if ipython_shell.current_shell() is not None:
        return Live()
    stream = sys.stderr  # None in a process without one
    return Live(stream) if stream and stream.isatty() else None


class Terminal:
    """Lines that are rewritten in place, and gone at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._printer = stream, Printer(stream)
        self._is_coloured = terminal.is_coloured(os.environ, is_terminal=True)
        # As they were written, all above the cursor: the ^C that a terminal shows breaks none.
        self._lines: list[str] = []

    def show(self, frame: Frame | None) -> None:
        """Write the picture in place of the last one; None takes that away.

        If the picture is too high, only its brief line is written. If no line has changed, nothing
        is written. A frame that finds the terminal stopped is skipped.
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
        """Show nothing more."""
        self._printer.close()


class Log:
    """A stream that can't be rewritten: the picture at first, then a line for each news."""

    def __init__(self, stream: TextIO) -> None:
        self._printer = Printer(stream)
        self._news: Any = None

    def show(self, frame: Frame | None) -> None:
        """Write the frame, if there is news."""
        if frame is not None and frame.news != self._news:
            text = str(frame.picture) if self._news is None else frame.picture.brief
            if self._printer.print(f"{text}\n"):
                self._news = frame.news

    def close(self) -> None:
        """Show nothing more."""
        self._printer.close()


class Notebook:
    """A display that the front end replaces in place; its last state, an empty one, is saved."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._frame: Frame | None = None

    def show(self, frame: Frame | None) -> None:
        """Replace the display, None by an empty one.

        The same frame is not sent twice: with no client to read them, messages pile up.
        """
        if self._handle and frame == self._frame:
            return
        self._frame = frame
        data = {"text/plain": ""}
        if frame is not None:
            data = {"text/plain": str(frame.picture), "text/html": frame.picture._repr_html_()}
        if self._handle is None:
            # Kept before it is shown, so that it is cleared too if showing it is interrupted.
            self._handle = ipython_shell.new_handle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """Show nothing more."""


class Replaceable:
    """A line that is shown in one cell or several, and is replaced in all of them.

    A terminal can't replace it, so there each line stays.
    https://jupyter-client.readthedocs.io/en/stable/messaging.html#update-display-data
    """

    def __init__(self) -> None:
        self._publisher: Any = None
        self._known = {"display_id": os.urandom(16).hex()}

    def show(self, text: str) -> None:
        """Show it in this cell."""
        if not ipython_shell.has_kernel():
            print(text)
            return
        publisher = ipython_shell.current_shell().display_pub
        publisher.publish({"text/plain": text}, transient=self._known)
        # A later cell's %%capture must not catch what replaces this line.
        if not (self._publisher and ipython_shell.is_capturing(publisher)):
            self._publisher = publisher

    def replace(self, text: str) -> None:
        """Replace it where it stands."""
        if self._publisher:
            self._publisher.publish({"text/plain": text}, transient=self._known, update=True)


def _screen(stream: TextIO | None) -> Terminal | Log | Notebook:
    """Return a notebook that is watched, a terminal that can rewrite a row, else a log."""
    if stream is None:
        if ipython_shell.has_kernel() and is_watched():
            return Notebook()
        stream = sys.stdout
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Terminal(stream) if is_terminal else Log(stream)
