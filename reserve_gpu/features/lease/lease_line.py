"""Display a lease's state in the cells that have reserved devices, or in the log."""

from __future__ import annotations

from contextlib import suppress

from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.render.frontends import MAGIC, PYTHON
from reserve_gpu.render.progress import Replaceable
from reserve_gpu.system.jupyter_kernel import cells
from reserve_gpu.system.warning_log import warn


class LeaseLine:
    """A line that shows the state of a lease, and is updated in place.

    The session's thread calls `show`, `log` and `close`.
    """

    def __init__(self) -> None:
        self._line: Replaceable | None = None  # the output in the cells that have reserved devices
        self._shown = ""
        self._is_notice = False  # whether the next cell repeats the line
        self._repeated = ""  # the line that the current cell repeated when it started

    def show(self, notice: LeaseNotice) -> None:
        """Show the state of the lease.

        An important notice is shown again in the next cell. If no cell will follow, the notice is
        also logged as a warning.

        Args:
            notice: The state of the lease.
        """
        self._is_notice = False
        text = notice.text(MAGIC if cells().shell else PYTHON)
        self._replace(text)
        is_important = _is_important(notice)
        has_next_cell = bool(cells().shell) and notice.action is not Action.END_PROCESS
        self._is_notice = is_important and has_next_cell
        if is_important and not has_next_cell:
            warn(text)

    def log(self, text: str) -> None:
        """Show and log a problem that has occurred while ending the process.

        Args:
            text: A description of the problem.
        """
        self._is_notice = False
        self._replace(text)
        warn(text)

    def close(self, text: str) -> None:
        """Show a final message, and then stop updating the line in these cells.

        Args:
            text: The final message, or an empty string to keep the current one.
        """
        self._is_notice = False
        if text:
            self._replace(text)
        self._line = None

    def show_in_cell(self) -> None:
        """Also show the line in the current cell, unless the cell has already repeated it."""
        if cells().shell and self._shown != self._repeated:
            # Use a local variable, because the session's thread might set `_line` to None.
            line = self._line = self._line or Replaceable()
            line.show(self._shown)

    def take_notices(self) -> list[str]:
        """Return the notice that the next cell must show, if any, and mark it as shown."""
        self._repeated = self._shown if self._is_notice else ""
        if not self._is_notice:
            return []
        self._is_notice = False
        self._update()  # again, because nbclient ignores updates between cells
        return [self._shown]

    def _replace(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._update()

    def _update(self) -> None:
        if self._line:
            with suppress(Exception):  # the front end has disconnected
                self._line.replace(self._shown)


def _is_important(notice: LeaseNotice) -> bool:
    """Return whether the next cell should repeat a notice.

    Running a cell resets the idle time, so the next cell does not repeat an idle-limit warning.
    """
    if notice.action in (Action.WARN, Action.WARN_AGAIN):
        return not notice.lease.is_by_idleness(notice.at)
    return notice.action not in (Action.LASTS, Action.PUT_OFF)
