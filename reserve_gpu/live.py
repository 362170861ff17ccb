"""The one line that tells what this kernel waits for, and that is gone when the wait is over."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from reserve_gpu import report

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from typing_extensions import Self

    from reserve_gpu.device import Wait

EVERY_S = 1.0  # a line that counts seconds need not change more often


class Live:
    """Shows a wait: replaced in place in a notebook and a terminal, else printed when it changes.

    A context manager; at its end the line is taken away, where that can be done.
    """

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._last: Any = None
        self._due = 0.0
        self._is_notebook = hasattr(get_ipython(), "kernel")
        self._is_terminal = not self._is_notebook and sys.stdout.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is None:
            return
        if self._is_notebook:
            self._display("")
        elif self._is_terminal:
            self._rewrite("")

    def show(self, wait: Wait) -> None:
        """Show how the wait stands, in place of what was shown before."""
        news = wait.place, [(refusal.label, refusal.state) for refusal in wait.refusals]
        if news == self._last and time.monotonic() < self._due:
            return
        is_news, self._last = news != self._last, news
        self._due = time.monotonic() + EVERY_S
        text = report.waiting(wait)
        if self._is_notebook:
            self._display(text)
        elif self._is_terminal:
            self._rewrite(text)
        elif is_news:
            print(text, flush=True)

    def _display(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(_Line(text), display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(_Line(text))  # type: ignore[no-untyped-call]

    def _rewrite(self, text: str) -> None:
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{text[: columns - 1]}", end="", flush=True)


class _Line:
    """A line of plain text for a notebook."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": self._text}
