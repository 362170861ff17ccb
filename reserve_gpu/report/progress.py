"""The one live display of a wait or a check, gone when that is over.

What it says comes from messages; here is where it goes: to a notebook, a terminal, or a log. Only
the functions that name IPython need it, so the command line shows the same without.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from reserve_gpu.report import messages
from reserve_gpu.report.words import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.display import DisplayHandle
    from typing_extensions import Self

    from reserve_gpu.model import Waiting

CLEAR_ROW = "\r\x1b[K"  # back to the first column, and delete what stands there


class Timed(Protocol):
    """Something under way that says in words how it stands, and for how long it has run."""

    @property
    def waited_s(self) -> float:
        """Seconds so far."""


class Frame(NamedTuple):
    """What is shown at one moment: lines, the first above the others; the same in one short row.

    news: what is worth a line in a log when it changes, None for nothing.
    """

    lines: Sequence[str]
    brief: str
    news: Any = None

    @property
    def row(self) -> str:
        """All lines in one: the headline, then the others."""
        first, *others = self.lines
        return f"{first} {'; '.join(others)}".rstrip()


class Live:
    """Shows how things stand: replaced in place in a notebook and a terminal, else a line on news.

    A context manager; at its end the display is taken away, where that can be done.
    stream: where to show it; None for wherever this IPython shows what cells print.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._screen = _screen(stream)
        self._second: int | None = None
        self._frame: Frame | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._frame is not None:
            self._screen.show(None)

    def show(self, waiting: Waiting) -> None:
        """Show how a wait stands; news is another place in the queue, another holder or state."""
        devices = [(r.label, r.state, r.holder and r.holder.pid) for r in waiting.refusals]
        lines, brief = messages.waiting(waiting), messages.waiting_briefly(waiting)
        self._show(waiting.waited_s, Frame(lines, brief, (waiting.place, devices)))

    def show_check(self, progress: Timed) -> None:
        """Show how a check stands; it takes seconds, not hours, so nothing of it is news to log."""
        self._show(progress.waited_s, Frame([str(progress)], str(progress)))

    def _show(self, waited_s: float, frame: Frame) -> None:
        """Show what is new, at most once in every second that is counted.

        A front end that is not looking lets all that is sent to it pile up.
        """
        before, self._second = self._second, int(waited_s)
        if self._second != before and frame != self._frame:
            self._frame = frame
            self._screen.show(frame)


def for_people() -> Live | None:
    """The display that a call from Python shows by itself; None where nobody would see it."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if get_ipython() is not None:
            return Live()
    stream = sys.stderr  # None in a process without one
    return Live(stream) if stream and stream.isatty() else None


class Terminal:
    """One row that is rewritten, and empty at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, frame: Frame | None) -> None:
        """Write the row anew, None for an empty one."""
        row, columns = "", self._columns() - 1  # some terminals wrap in the last one
        if frame is not None:
            row = frame.row if _width(frame.row) <= columns else _cut(frame.brief, columns)
        _print(f"{CLEAR_ROW}{row}", self._stream)

    def _columns(self) -> int:
        with suppress(OSError, ValueError):
            if columns := os.get_terminal_size(self._stream.fileno()).columns:
                return columns
        return shutil.get_terminal_size().columns


class Log:
    """What can't be taken back: a line at the beginning, and one when there is news."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._news: Any = None

    def show(self, frame: Frame | None) -> None:
        """Write one line, if there is news; what is written stays."""
        if frame is not None and frame.news != self._news:
            self._news = frame.news
            _print(f"{frame.row}\n", self._stream)


class Notebook:
    """A display that the front end replaces in place; its last state, an empty one, is saved."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def show(self, frame: Frame | None) -> None:
        """Replace the display, None by an empty one."""
        from IPython.display import DisplayHandle

        data = {"text/plain": ""}
        if frame is not None:
            data = {"text/plain": "\n  ".join(frame.lines), "text/html": _html(frame.lines)}
        if self._handle is None:
            # Kept before it is shown, so that it is cleared too if showing it is interrupted.
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
            self._handle.display(data, raw=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)  # type: ignore[no-untyped-call]


def _html(lines: Sequence[str]) -> str:
    """In HTML, as JupyterLab breaks a long line of plain text in the middle of words."""
    first, *others = map(escape, lines)
    hanging = "padding-left:2.5em;text-indent:-1.5em"
    rest = "".join(f"<div style='{hanging}'>{other}</div>" for other in others)
    return f"<div style='padding-left:.5em'>{first}{rest}</div>"


def _width(row: str) -> int:
    """In columns of a terminal, of which some letters take two."""
    from unicodedata import east_asian_width

    return sum(1 + (east_asian_width(letter) in "WF") for letter in row)


def _cut(row: str, columns: int) -> str:
    """As much of the row as has room, with three dots where it was cut."""
    if _width(row) <= columns:
        return row
    widths = accumulate(map(_width, row))
    kept = [letter for letter, width in zip(row, widths, strict=True) if width <= columns - 3]
    return f"{''.join(kept).rstrip()}..."


def _print(text: str, stream: TextIO) -> None:
    with suppress(OSError):  # nobody reads the stream any more; the wait goes on
        try:
            print(text, end="", file=stream, flush=True)
        except UnicodeEncodeError:  # a note may have letters that the stream lacks
            known = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
            print(known, end="", file=stream, flush=True)


def _screen(stream: TextIO | None) -> Terminal | Log | Notebook:
    """A notebook in front of which somebody sits, a terminal that can rewrite a row, else a log."""
    if stream is None:
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if hasattr(shell, "kernel") and _is_watched(shell):
            return Notebook()
        stream = sys.stdout
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Terminal(stream) if is_terminal else Log(stream)


def _is_watched(shell: Any) -> bool:
    """Whether the cell was run by a client that could answer a question.

    Those that run notebooks unattended can't: nbclient (`jupyter execute`, `nbconvert --execute`,
    papermill) and ipyparallel. What they keep of a display is its last state, or each of them.
    https://jupyter-client.readthedocs.io/en/stable/messaging.html#execute
    """
    content = shell.get_parent().get("content", {})
    return bool(content.get("allow_stdin"))
