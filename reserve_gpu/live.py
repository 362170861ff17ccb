"""The one live display of a wait or a check, gone when that is over.

What it says is said elsewhere; here is where it goes: to a notebook, a terminal, or a log. Only the
functions that name IPython need it, so the command line shows the same without.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from reserve_gpu import awaited
from reserve_gpu.device import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.display import DisplayHandle
    from typing_extensions import Self

    from reserve_gpu.awaited import Wait
    from reserve_gpu.checklist import Progress


class Live:
    """Shows how things stand: replaced in place in a notebook and a terminal, else a line on news.

    A context manager; at its end the display is taken away, where that can be done.
    stream: where to show it; None for wherever this IPython shows what cells print.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._screen = _of_ipython() if stream is None else _of_stream(stream)
        self._second: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.clear()

    def show(self, wait: Wait) -> None:
        """Show how a wait stands; news is another place in line, and another holder or state."""
        if self._is_another_second(wait.waited_s):
            news = [(r.label, r.state, r.holder and r.holder.pid) for r in wait.refusals]
            brief = awaited.waiting_briefly(wait)
            self._screen.show(Shown(awaited.waiting(wait), brief, (wait.place, news)))

    def show_check(self, progress: Progress) -> None:
        """Show how a check stands; it takes seconds, not hours, so nothing of it is news to log."""
        if self._is_another_second(progress.waited_s):
            self._screen.show(Shown([str(progress)], str(progress)))

    def _is_another_second(self, waited_s: float) -> bool:
        """Whether what counts seconds says another one now; nothing need change more often."""
        before, self._second = self._second, int(waited_s)
        return self._second != before


class Shown(Value):
    """What is shown: lines, the first above the others; the same in one short row.

    news: what of it is worth a line in a log where it changes, None for nothing.
    """

    lines: Sequence[str]
    brief: str
    news: Any = None


class Screen(Protocol):
    """Where things are shown."""

    def show(self, shown: Shown) -> None:
        """Show this in place of what was shown before, if that can be done."""

    def clear(self) -> None:
        """Take away what is shown."""


class Terminal:
    """One row that is rewritten."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._row = ""

    def show(self, shown: Shown) -> None:
        """Write the row anew, if it says something else now."""
        from rich.cells import set_cell_size

        columns = self._columns() - 1  # some terminals wrap in the last one
        row = awaited.one_line(shown.lines)
        if _width(row) > columns:
            row = shown.brief
        if _width(row) > columns:
            row = f"{set_cell_size(row, max(0, columns - 3)).rstrip()}..."
        self._write(row)

    def clear(self) -> None:
        """Leave an empty row."""
        self._write("")

    def _write(self, row: str) -> None:
        if row != self._row:
            self._row = row
            _print(f"\r\x1b[K{row}", self._stream)

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

    def show(self, shown: Shown) -> None:
        """Write one line, if there is news."""
        if shown.news != self._news:
            self._news = shown.news
            _print(f"{awaited.one_line(shown.lines)}\n", self._stream)

    def clear(self) -> None:
        """Leave everything: it is a log."""


class Notebook:
    """A display that the front end replaces in place; its last state is what is saved."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._lines: Sequence[str] = ()

    def show(self, shown: Shown) -> None:
        """Replace the display, if it says something else now: what is sent may pile up unread."""
        if (lines := shown.lines) != self._lines:
            self._lines = lines
            self._replace({"text/plain": "\n  ".join(lines), "text/html": _html(lines)})

    def clear(self) -> None:
        """Leave an empty display."""
        if self._handle is not None:
            self._replace({"text/plain": ""})

    def _replace(self, data: dict[str, str]) -> None:
        from IPython.display import DisplayHandle

        if self._handle is None:  # known before it is shown: interrupted there it is cleared too
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
            self._handle.display(data, raw=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)  # type: ignore[no-untyped-call]


def _html(lines: Sequence[str]) -> str:
    """In HTML, as JupyterLab breaks a long line of plain text in the midst of words."""
    first, *others = map(escape, lines)
    hanging = "padding-left:2.5em;text-indent:-1.5em"
    rest = "".join(f"<div style='{hanging}'>{other}</div>" for other in others)
    return f"<div style='padding-left:.5em'>{first}{rest}</div>"


def _width(row: str) -> int:
    """How many columns a row takes."""
    if row.isascii():  # rich would keep it: the last 4,096 rows that it was asked about
        return len(row)
    from rich.cells import cell_len  # some letters are two columns wide

    return cell_len(row)


def _print(text: str, stream: TextIO) -> None:
    with suppress(OSError):  # whoever read it has gone; the wait goes on
        try:
            print(text, end="", file=stream, flush=True)
        except UnicodeEncodeError:  # a note may have letters that are unknown here
            known = text.encode(stream.encoding, "backslashreplace").decode(stream.encoding)
            print(known, end="", file=stream, flush=True)


def _of_stream(stream: TextIO) -> Screen:
    """A terminal that can rewrite a row, else a log."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Terminal(stream) if is_terminal else Log(stream)


def _of_ipython() -> Screen:
    """A notebook in front of which somebody sits, else whatever cells print to."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return Notebook() if hasattr(shell, "kernel") and _is_watched(shell) else _of_stream(sys.stdout)


def _is_watched(shell: Any) -> bool:
    """Whether the cell was run by a client that could answer a question.

    Those that run notebooks unattended can't: nbclient (`jupyter execute`, `nbconvert --execute`,
    papermill) and ipyparallel. What they keep of a display is its last state, or each of them.
    https://jupyter-client.readthedocs.io/en/stable/messaging.html#execute
    """
    content = shell.get_parent().get("content", {})
    return bool(content.get("allow_stdin"))
