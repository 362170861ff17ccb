"""The journal: what this very process writes into its user's history.

Nothing here may disturb a reservation: what can't be logged is lost, with one warning in the log.
What is logged decides nothing.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from reserve_gpu.allocation.request import rules
from reserve_gpu.features.history import command_log
from reserve_gpu.features.history.recorder import EVERY_S, Recorder
from reserve_gpu.locks.lock import myself
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.model.errors import REASON_LIMIT, ReserveGPUError
from reserve_gpu.model.requests import End, Fact
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.reservation import joining
from reserve_gpu.reservation.feature import Feature, Leaving, Owner, UseLook, Wait
from reserve_gpu.system.warning_log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from reserve_gpu.reservation.holding import Change, Holding
    from reserve_gpu.system.executor import T, Ts

IS_LOGGED = "is_logged"  # the fact that another process logs what is used
EXIT_LIMIT_S = 1.0  # for the last lines of a process that ends

_warned: list[str] = []  # once in a process


class History(Feature):
    """What this process logs: of one reservation at a time. Nothing here raises anything."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._recorder: Recorder | None = None
        self._changes: list[Change] = []  # to be logged
        at_exit(partial(owner.run_within, EXIT_LIMIT_S, self._exit))

    def changed(self, change: Change) -> None:
        """Log it later: the home of a user may hang, and nobody may have the mutex then."""
        self._changes.append(change)

    def waited(self, wait: Wait) -> None:
        """Log a wait in the queue."""
        tried(_append_wait, wait)

    def step(self) -> float | None:
        """Log what has changed, and what is used where that is due."""
        self._catch_up()
        if self._recorder is None:
            return None
        if pause_s := self._recorder.pause_s:  # who has joined is not asked for nothing
            return pause_s
        own = joining.own_pids(self._recorder.held)
        pause_s, is_used = tried(self._recorder.step, own) or (EVERY_S, None)
        if is_used is not None:
            self.owner.last_look = UseLook(time.time(), time.monotonic(), is_used)
        return pause_s

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Leave the page to a process that logs for the program which this process becomes.

        A kernel logs by itself.
        """
        self._catch_up()
        if how is Leaving.RESTART:
            return {}
        recorder, self._recorder = self._recorder, None
        if recorder and how is Leaving.KERNEL:
            recorder.page.remove()
        is_logged = recorder and how is Leaving.COMMAND and tried(command_log.start, recorder)
        return {IS_LOGGED: bool(is_logged)}

    def _catch_up(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            self._follow(change)

    def _follow(self, change: Change) -> None:
        """Log what has become of what was held, and begin to log what is held now."""
        before, held, how = change.before, change.held, change.how
        if held and before and _is_same(before, held):
            if self._recorder:
                self._recorder.held = held
            return
        self._end(End.RESTART if held and held.kept_until else how)
        if held and not (held.joined or held.kept_until or held.facts.get(IS_LOGGED) is True):
            self._recorder = tried(_begun, held, change)

    def _end(self, how: End) -> None:
        """Log that what was held is held no more."""
        recorder, self._recorder = self._recorder, None
        if recorder:
            tried(recorder.end, how)

    def _exit(self) -> None:
        self._catch_up()
        self._end(End.EXIT)


def tried(function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> T | None:
    """Call the function; what goes wrong there is said once in the log, and disturbs nothing."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001
        if not _warned:
            _warned.append(str(error))
            why = sanitize(str(error), REASON_LIMIT)
            warn(f"The history of what you use is not complete: {why}")
        return None


def at_exit(function: Callable[[], object]) -> None:
    """Have the function called when this very process ends by itself."""
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            with suppress(ReserveGPUError):  # no thread can be had
                function()

    atexit.register(end)


def _is_same(before: Holding, held: Holding) -> bool:
    """Tell whether both are one reservation to a history."""
    mine, others = ((h.devices, h.terms.memory_limit_mib, h.kept_until) for h in (before, held))
    return mine == others


def _begun(held: Holding, change: Change) -> Recorder | None:
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


def _append_wait(wait: Wait) -> None:
    who = myself()
    end = wait.began + wait.waited_s
    line = LogLine(Kind.WAITED, f"{os.getpid()}", wait.began, wait.began, end, wait.waited_s)
    line = line._replace(asks=wait.asks, how=wait.how, agent=who.agent, job=who.job)
    line = line._replace(name=who.notebook or who.command)
    folder = places.to_write(rules())
    if folder is not None:
        try:
            log_writer.append(folder, [line])
        finally:
            os.close(folder)
