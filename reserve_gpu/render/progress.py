"""Live displays of a wait or a check, in a notebook, a terminal or a log.

When the wait or check is over, its display is removed from the notebook or terminal. The `pictures`
module builds the GPU tables to display. A reservation's countdown is a `Replaceable` line, which
stays in its cell.
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

CLEAR = "\x1b[J"  # erase from the cursor to the end of the screen


class Frame(NamedTuple):
    """The content of a live display at one moment.

    Attributes:
        picture: The GPU table. If the table does not fit, its one-line summary is shown instead.
        news: A value that is compared between refreshes. A line is written to a log when the value
            changes, unless it is None.
    """

    picture: pictures.Picture
    news: Any = None


class Live(AbstractContextManager["Live"]):
    """A context manager that shows the progress of a wait or a check.

    In a notebook or a terminal, the display is updated in place and removed at the end. A log gets
    a line for each change, and these lines stay.

    Args:
        stream: The output stream, or None for the output of the current IPython session.

    Attributes:
        has_waited: Whether a wait for a device has been shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.has_waited = False
        self._stream = stream
        self._screen: Terminal | Log | Notebook | None = None  # created when it is first used
        self._second: int | None = None  # seconds waited when the last frame was shown
        self._is_over = False

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove the display, and ignore later frames."""
        if self._screen:
            self._screen.show(None)
            self._screen.close()
        self._is_over = True

    def show(self, news: Progress) -> None:
        """Show the progress of a wait or of a slow driver call.

        A log gets a line when the position in the queue, a holder or a device's state changes.
        """
        if isinstance(news, Slow):
            self._show(news.waited_s, Frame(pictures.of_text(messages.slow(news)), Slow))
            return
        self.has_waited = True
        here = "this process" if self._stream else "this kernel"
        self._show(news.waited_s, Frame(pictures.wait(news, here), state_of(news)))

    def show_check(self, line: str, waited_s: float) -> None:
        """Show the progress of a check.

        A check takes only a few seconds, so nothing is written to a log.
        """
        self._show(waited_s, Frame(pictures.of_text(line)))

    def _show(self, waited_s: float, frame: Frame) -> None:
        """Show a frame, unless another frame was shown during the same second of the wait."""
        if self._is_over:
            return
        previous, self._second = self._second, int(waited_s)
        if self._second != previous:
            self._screen = self._screen or _screen(self._stream)
            self._screen.show(frame)


def state_of(waiting: Waiting) -> object:
    """Return the parts of the wait's state that should be logged when they change."""
    return waiting.place, [(r.label, r.state, [h.pid for h in r.holders]) for r in waiting.rows]


def for_people() -> Live | None:
    """Return a live display for a call from Python, or None if no person would see it."""
    if ipython_shell.current_shell() is not None:
        return Live()
    stream = sys.stderr  # None if stderr is closed
    return Live(stream) if stream and stream.isatty() else None


class Terminal:
    """A live display that rewrites its lines in a terminal, and removes them at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._printer = stream, Printer(stream)
        self._is_colored = terminal.is_colored(os.environ, is_terminal=True)
        # The lines of the current frame. The cursor stays below them, so the ^C that a terminal
        # echoes does not overwrite them.
        self._lines: list[str] = []

    def show(self, frame: Frame | None) -> None:
        """Replace the last frame, or remove it if the new frame is None.

        If the table is too tall for the terminal, only its summary is shown. Nothing is written if
        no line has changed. While the user has paused the terminal's output, frames are dropped.
        """
        lines: list[str] = []
        if frame is not None:
            width, height = terminal.size(self._stream)
            width -= 1  # some terminals wrap a line that fills the last column
            lines = terminal.lines(frame.picture.layout, width, is_colored=self._is_colored)
            if len(lines) >= height:
                lines = [columns.cut(frame.picture.brief, width, "...")]
        if lines == self._lines:
            return
        back = f"\x1b[{len(self._lines)}A" if self._lines else ""
        text = f"\r{back}{CLEAR}" + "".join(f"{line}\n" for line in lines)
        if self._printer.print(text):
            self._lines = lines

    def close(self) -> None:
        """Stop writing to the stream."""
        self._printer.close()


class Log:
    """A display for a stream that can't be rewritten.

    The stream gets the table first, and then a line for each change.
    """

    def __init__(self, stream: TextIO) -> None:
        self._printer = Printer(stream)
        self._news: Any = None

    def show(self, frame: Frame | None) -> None:
        """Write the frame if its `news` differs from that of the last frame."""
        if frame is not None and frame.news != self._news:
            text = str(frame.picture) if self._news is None else frame.picture.brief
            if self._printer.print(f"{text}\n"):
                self._news = frame.news

    def close(self) -> None:
        """Stop writing to the stream."""
        self._printer.close()


class Notebook:
    """A live display that is updated in place in a notebook.

    At the end, `show(None)` clears the display, so a saved notebook contains only an empty output.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._frame: Frame | None = None

    def show(self, frame: Frame | None) -> None:
        """Replace the last frame, or clear the display if the new frame is None.

        An unchanged frame is not sent again, because messages pile up when no client is reading
        them.
        """
        if self._handle and frame == self._frame:
            return
        self._frame = frame
        data = {"text/plain": ""}
        if frame is not None:
            data = {"text/plain": str(frame.picture), "text/html": frame.picture._repr_html_()}
        if self._handle is None:
            # Store the handle first, so that a later call can clear the display even if display()
            # is interrupted.
            self._handle = ipython_shell.new_handle()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        """Do nothing, because the kernel's connection stays open."""


class Replaceable:
    """A line that is shown in one or more cells, and can be replaced in all of them.

    In a terminal, the line can't be replaced and stays unchanged.
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
        # A %%capture in a later cell must not capture updates to this line.
        if not (self._publisher and ipython_shell.is_capturing(publisher)):
            self._publisher = publisher

    def replace(self, text: str) -> None:
        """Replace the line in all cells that show it."""
        if self._publisher:
            self._publisher.publish({"text/plain": text}, transient=self._known, update=True)


def _screen(stream: TextIO | None) -> Terminal | Log | Notebook:
    """Return the display for a stream: a notebook, a terminal, or a log.

    If the stream is None, the notebook is used if a person can see it, and otherwise stdout.
    """
    if stream is None:
        if ipython_shell.has_kernel() and is_watched():
            return Notebook()
        stream = sys.stdout
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Terminal(stream) if is_terminal else Log(stream)
