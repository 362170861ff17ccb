"""Write the reservations and waits of this process to its user's history.

Logging must not disturb a reservation. If an entry can't be written, it is lost, and the first
failure is logged as a warning. No decision depends on the history.
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
from reserve_gpu.locks.lock import describe_this_process
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

IS_LOGGED = "is_logged"  # name of the fact that another process logs the reservation
EXIT_LIMIT_S = 1.0  # timeout for writing the last lines at the end of a process, in seconds

_warned: list[str] = []  # the first failure in this process; later ones are not reported


class History(Feature):
    """Logs the reservations of this process, one at a time. Its methods never raise."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._recorder: Recorder | None = None
        self._changes: list[Change] = []  # changes of the reservation that are not logged yet
        at_exit(partial(owner.run_within, EXIT_LIMIT_S, self._exit))

    def changed(self, change: Change) -> None:
        """Queue the change for `step`, because a hung home directory must not block the mutex."""
        self._changes.append(change)

    def waited(self, wait: Wait) -> None:
        """Log a wait in the queue."""
        tried(_append_wait, wait)

    def step(self) -> float | None:
        """Log changes of the reservation, and the use of its devices if that is due."""
        self._catch_up()
        if self._recorder is None:
            return None
        if pause_s := self._recorder.pause_s:  # don't look up joined processes if nothing is due
            return pause_s
        pids = joining.own_pids(self._recorder.held)
        pause_s, is_used = tried(self._recorder.step, pids) or (EVERY_S, None)
        if is_used is not None:
            self.owner.last_look = UseLook(time.time(), time.monotonic(), is_used)
        return pause_s

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Let a background process continue the log of a command. A kernel logs for itself."""
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
        """Log the end of the previous reservation, and start the log of the current one."""
        before, held, how = change.before, change.held, change.how
        if held and before and _is_same(before, held):
            if self._recorder:
                self._recorder.held = held
            return
        self._end(End.RESTART if held and held.kept_until else how)
        if held and not (held.joined or held.kept_until or held.facts.get(IS_LOGGED) is True):
            self._recorder = tried(_recorder_of, held, change)

    def _end(self, how: End) -> None:
        """Log the end of the reservation that is being logged."""
        recorder, self._recorder = self._recorder, None
        if recorder:
            tried(recorder.end, how)

    def _exit(self) -> None:
        self._catch_up()
        self._end(End.EXIT)


def tried(function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> T | None:
    """Call a function, and log only the first failure of this process as a warning.

    Args:
        function: The function.
        arguments: Its arguments.

    Returns:
        The result, or None if the function raises.
    """
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001
        if not _warned:
            _warned.append(str(error))
            reason = sanitize(str(error), REASON_LIMIT)
            warn(f"The usage history is incomplete: {reason}")
        return None


def at_exit(function: Callable[[], object]) -> None:
    """Register a function that is called when this process exits, but not when a child exits.

    Args:
        function: The function.
    """
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            with suppress(ReserveGPUError):  # the process can't start a thread
                function()

    atexit.register(end)


def _is_same(before: Holding, held: Holding) -> bool:
    """Return whether the history treats both as the same reservation."""
    old, new = ((h.devices, h.terms.memory_limit_mib, h.kept_until) for h in (before, held))
    return old == new


def _recorder_of(held: Holding, change: Change) -> Recorder | None:
    """Start to log a reservation, and return its recorder; None if the user keeps no history.

    Raises OSError and ReserveGPUError.
    """
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
    process = describe_this_process()
    end = wait.began + wait.waited_s
    line = LogLine(Kind.WAITED, f"{os.getpid()}", wait.began, wait.began, end, wait.waited_s)
    line = line._replace(asks=wait.asks, how=wait.how, agent=process.agent, job=process.job)
    line = line._replace(name=process.notebook or process.command)
    folder = places.to_write(rules())
    if folder is not None:
        try:
            log_writer.append(folder, [line])
        finally:
            os.close(folder)
