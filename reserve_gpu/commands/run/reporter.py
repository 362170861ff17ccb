"""What `reserve-gpu run` prints on stderr about a reservation."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from reserve_gpu import api
from reserve_gpu.render.progress import Live
from reserve_gpu.system.nonblocking import Printer

if TYPE_CHECKING:
    from reserve_gpu.model import errors
    from reserve_gpu.model.progress import Progress

READER_LIMIT_S = 2.0  # for the reader of stderr, while a GPU is held


def say(text: str, *, is_event: bool = False) -> None:
    """Print on stderr, as stdout is the command's. That nobody can read it is no failure.

    A process that holds a GPU waits for its reader only for a short time, and then goes on without
    the text: else a full pipe would keep the GPU from the command.

    Args:
        text: What to print.
        is_event: The text is an event, for which nothing ever waits for long.
    """
    printer = Printer(sys.stderr)
    printer.print(f"{text}\n", READER_LIMIT_S if is_event or api.current() else math.inf)
    printer.close()


def error_text(error: errors.ReserveGPUError) -> str:
    """Return the error as it is shown on stderr."""
    return error.picture.to_text(sys.stderr) if error.picture else str(error)


class Reporter:
    """Prints how a wait stands and its outcome on stderr; with is_quiet no success."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._live = Live(sys.stderr)
        self._is_quiet = is_quiet

    def show(self, news: Progress) -> None:
        """Show how a wait stands."""
        if not self._is_quiet:
            self._live.show(news)

    def failed(self, _error: BaseException) -> None:
        """Take away what is shown: the error is said where all of them are."""
        self._live.clear()

    def came(self, outcome: api.Outcome) -> None:
        """Say what is held now, or why nothing is."""
        self._live.clear()
        lines = [f"Warning: {text}" for text in outcome.warnings]
        lines += [error_text(outcome.excused)] if outcome.excused else []
        if outcome.excused or not self._is_quiet:
            lines.append(outcome.text)
        if lines:
            say("\n".join(lines))

    def follow(self) -> None:
        """Leave the rest to the command, which this process becomes now."""
