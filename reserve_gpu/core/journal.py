"""The journal: what this very process writes into its user's history.

Nothing here may disturb a reservation: what can't be logged is lost, with one warning in the log.
What is logged decides nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.calls import Late
from reserve_gpu.core import guests
from reserve_gpu.core.recorder import EVERY_S, Recorder
from reserve_gpu.core.request import rules
from reserve_gpu.errors import ReserveGPUError
from reserve_gpu.locks.record import myself
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.model import End

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from reserve_gpu.calls import T, Ts
    from reserve_gpu.core import follower
    from reserve_gpu.core.held import Change, Held
else:
    follower = Late("core.follower")  # which only a command needs

EXIT_LIMIT_S = 1.0  # for the last lines of a process that ends

_warned: list[str] = []  # once in a process


class Journal:
    """What this process notes: of one reservation at a time. Nothing here raises anything."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def follow(self, change: Change) -> None:
        """Log what has become of what was held, and begin to log what is held now."""
        before, held, how, _, _ = change
        if held and before and _is_same(before, held):
            if self._recorder:
                self._recorder.held = held
            return
        self.end(End.RESTART if held and held.kept_until else how)
        if held and not (held.guest or held.kept_until or held.is_logged_elsewhere):
            self._recorder = tried(_begun, held, change)

    def step(self) -> tuple[float | None, bool | None]:
        """Log what is due.

        Returns the seconds until the next look, and whether the devices were used; None for either
        that is not known.
        """
        if self._recorder is None:
            return None, None
        if pause_s := self._recorder.pause_s:  # who has joined is not asked for nothing
            return pause_s, None
        own = guests.own_pids(self._recorder.held)
        return tried(self._recorder.step, own) or (EVERY_S, None)

    def end(self, how: End) -> None:
        """Log that what was held is held no more."""
        recorder, self._recorder = self._recorder, None
        if recorder:
            tried(recorder.end, how)

    def leave(self, *, is_kernel: bool) -> bool:
        """Leave the page to a process that logs for the program which this process becomes.

        is_kernel: that program logs by itself. Returns whether there is such a process.
        """
        recorder, self._recorder = self._recorder, None
        if recorder and is_kernel:
            recorder.page.remove()
        return bool(recorder and not is_kernel and tried(follower.start, recorder))


def tried(function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> T | None:
    """Call the function; what goes wrong there is said once in the log, and disturbs nothing."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001
        if not _warned:
            _warned.append(str(error))
            log = logging.getLogger("reserve_gpu")
            log.warning("The history of what you use is not complete: %s", error)
        return None


def at_exit(function: Callable[[], object]) -> None:
    """Have the function called when this very process ends by itself."""
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            with suppress(ReserveGPUError):  # no thread can be had
                function()

    atexit.register(end)


def _is_same(before: Held, held: Held) -> bool:
    """Tell whether both are one reservation to a history."""
    mine, others = ((h.devices, h.part_mib, h.kept_until) for h in (before, held))
    return mine == others


def _begun(held: Held, change: Change) -> Recorder | None:
    """Begin to log what is held; None if no history is kept. Raises OSError, ReserveGPUError."""
    folder = places.to_write(rules())
    if folder is None:
        return None
    try:
        log_writer.close_lost(folder)
        return Recorder(log_writer.Page.new(folder), held, change.now, change.at)
    except BaseException:
        os.close(folder)
        raise


def log_wait(asks: str, began: float, waited_s: float, how: End) -> None:
    """Log a wait in the queue. asks: for what. began: in seconds since the epoch."""
    who = myself()
    line = LogLine(Kind.WAITED, f"{os.getpid()}", began, began, began + waited_s, waited_s)
    line = line._replace(asks=asks, name=who.notebook or who.command, how=how)
    tried(_appended, line)


def _appended(line: LogLine) -> None:
    folder = places.to_write(rules())
    if folder is not None:
        try:
            log_writer.append(folder, [line])
        finally:
            os.close(folder)
