"""Report a reservation's progress and outcome on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reserve_gpu.commands.output import error_text, print_stderr
from reserve_gpu.render.progress import Live

if TYPE_CHECKING:
    from reserve_gpu.api import Outcome
    from reserve_gpu.model.progress import Progress


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

    def finish(self, outcome: Outcome) -> None:
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
