"""Shows until when something is held: in the cells that have reserved it, else in the log."""

from __future__ import annotations

from contextlib import suppress

from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.render.frontends import MAGIC, PYTHON
from reserve_gpu.render.progress import Replaceable
from reserve_gpu.system.jupyter_kernel import cells
from reserve_gpu.system.warning_log import warn


class LeaseLine:
    """One line about a lease, which is replaced where it stands.

    show and close are called on the session's thread.
    """

    def __init__(self) -> None:
        self._line: Replaceable | None = None  # in the cells that have reserved
        self._shown = ""
        self._is_notice = False  # the next cell is to tell what is shown
        self._told = ""  # by this cell, at its begin

    def show(self, notice: LeaseNotice) -> None:
        """Show the state of the lease.

        The next cell repeats an important notice. A process without cells logs it.
        """
        self._is_notice = False  # of what was shown before
        text = notice.text(MAGIC if cells().shell else PYTHON)
        self._replace(text)
        is_worth_it = _is_for_next_cell(notice)
        has_next_cell = bool(cells().shell) and notice.action is not Action.END_PROCESS
        self._is_notice = is_worth_it and has_next_cell
        if is_worth_it and not has_next_cell:
            warn(text)

    def log(self, text: str) -> None:
        """Show a problem at the end of the process, and log it."""
        self._is_notice = False
        self._replace(text)
        warn(text)

    def close(self, text: str) -> None:
        """Show nothing more in these cells; the text, if there is one, is their last word."""
        self._is_notice = False
        if text:
            self._replace(text)
        self._line = None

    def show_in_cell(self) -> None:
        """Show the line in this cell too, if it is one that has not told it."""
        if cells().shell and self._shown != self._told:
            line = self._line = self._line or Replaceable()  # which may be over meanwhile
            line.show(self._shown)

    def take_notices(self) -> list[str]:
        """Return what the next cell has to tell."""
        self._told = self._shown if self._is_notice else ""
        if not self._is_notice:
            return []
        self._is_notice = False
        self._update()  # once more, as nbclient passes over what comes between two cells
        return [self._shown]

    def _replace(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._update()

    def _update(self) -> None:
        if self._line:
            with suppress(Exception):  # the front end is gone
                self._line.replace(self._shown)


def _is_for_next_cell(notice: LeaseNotice) -> bool:
    if notice.action in (Action.WARN, Action.WARN_AGAIN):  # of idleness: the next cell is use
        return not notice.lease.is_by_idleness(notice.at)
    return notice.action not in (Action.LASTS, Action.PUT_OFF)
