"""Report a reservation's progress and outcome on stderr."""

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

READER_LIMIT_S = 2.0  # seconds to wait for a slow reader of stderr while holding a GPU


def print_stderr(text: str, *, is_event: bool = False) -> None:
    """Print text to stderr, because stdout belongs to the command. Ignore a missing reader.

    While holding a GPU, this process waits for a slow reader for up to `READER_LIMIT_S` seconds,
    and then drops the text. Otherwise, a full pipe could keep an idle GPU reserved forever.

    Args:
        text: The text to print.
        is_event: Whether the text is an event. For events, the wait is always limited.
    """
    printer = Printer(sys.stderr)
    printer.print(f"{text}\n", READER_LIMIT_S if is_event or api.current() else math.inf)
    printer.close()


def error_text(error: errors.ReserveGPUError) -> str:
    """Return an error's text for stderr."""
    return error.picture.to_text(sys.stderr) if error.picture else str(error)


class Reporter:
    """Reports a reservation's progress and outcome on stderr.

    A quiet reporter prints only warnings, refusals, and errors.
    """

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._live = Live(sys.stderr)
        self._is_quiet = is_quiet

    def show(self, news: Progress) -> None:
        """Show the progress in the queue, unless this reporter is quiet."""
        if not self._is_quiet:
            self._live.show(news)

    def failed(self, _error: BaseException) -> None:
        """Clear the progress line. The error is not printed here, because the caller prints it."""
        self._live.clear()

    def finish(self, outcome: api.Outcome) -> None:
        """Print the reserved GPUs and warnings, or a refusal that `--optional` allows."""
        self._live.clear()
        lines = [f"Warning: {text}" for text in outcome.warnings]
        lines += [error_text(outcome.excused)] if outcome.excused else []
        if outcome.excused or not self._is_quiet:
            lines.append(outcome.text)
        if lines:
            print_stderr("\n".join(lines))

    def follow(self) -> None:
        """Do nothing. Subclasses can use this method to prepare for becoming the command."""
