"""Write this process's reservations and waits to the user's history.

Logging must not interfere with a reservation. An entry that can't be written is lost, and only the
first such failure is logged as a warning. No decision depends on the history.
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
from reserve_gpu.system import procfs
from reserve_gpu.system.warning_log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Unpack

    from reserve_gpu.reservation.holding import Change, Holding
    from reserve_gpu.system.executor import T, Ts

IS_LOGGED = "is_logged"  # fact that says whether another process is logging the reservation
EXIT_LIMIT_S = 1.0  # timeout for writing the last lines when the process exits, in seconds

_warned: list[str] = []  # the first failure in this process; later failures are not reported


class History(Feature):
    """Logs this process's reservations, one at a time. Logging failures are never raised."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._recorder: Recorder | None = None
        self._changes: list[Change] = []  # reservation changes that have not been logged yet
        at_exit(partial(owner.run_within, EXIT_LIMIT_S, self._exit))

    def changed(self, change: Change) -> None:
        """Queue the change, so that `step` logs it when the mutex is not held.

        If the home directory hangs, logging would otherwise block while holding the mutex.
        """
        self._changes.append(change)

    def waited(self, wait: Wait) -> None:
        """Log a finished wait in the queue."""
        tried(_append_wait, wait)

    def step(self) -> float | None:
        """Log any reservation changes, and log device use when a check is due."""
        self._catch_up()
        if self._recorder is None:
            return None
        if pause_s := self._recorder.pause_s:  # don't look up joined processes when no check is due
            return pause_s
        pids = joining.own_pids(self._recorder.held)
        pause_s, is_used = tried(self._recorder.step, pids) or (EVERY_S, None)
        if is_used is not None:
            self.owner.last_look = UseLook(procfs.now(), time.monotonic(), is_used)
        return pause_s

    def leaves(self, how: Leaving) -> Mapping[str, Fact]:
        """Let a background process continue the log if a command replaces this process.

        A kernel that takes over the reservation logs it itself.
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
        """Finish logging the previous reservation, and start logging the current one."""
        before, held, how = change.before, change.held, change.how
        if held and before and _is_same(before, held):
            if self._recorder:
                self._recorder.held = held
            return
        self._end(End.RESTART if held and held.kept_until else how)
        if held and not (held.joined or held.kept_until or held.facts.get(IS_LOGGED) is True):
            self._recorder = tried(_recorder_of, held, change)

    def _end(self, how: End) -> None:
        """Log how the current reservation ended, if it is being logged."""
        recorder, self._recorder = self._recorder, None
        if recorder:
            tried(recorder.end, how)

    def _exit(self) -> None:
        self._catch_up()
        self._end(End.EXIT)


def tried(function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]) -> T | None:
    """Call a function, and suppress any exception that it raises.

    Only the first exception in this process is logged, as a warning.

    Args:
        function: The function to call.
        arguments: The function's arguments.

    Returns:
        The function's result, or None if it raises an exception.
    """
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001
        if not _warned:
            _warned.append(str(error))
            reason = sanitize(str(error), REASON_LIMIT)
            warn(f"The usage history is incomplete: {reason}.")
        return None


def at_exit(function: Callable[[], object]) -> None:
    """Register a function to call when this process exits, but not when a forked child exits.

    Args:
        function: The function to register.
    """
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            with suppress(ReserveGPUError):  # the process can't start a thread
                function()

    atexit.register(end)


def _is_same(before: Holding, held: Holding) -> bool:
    """Return whether the history treats two `Holding` objects as the same reservation."""
    old, new = ((h.devices, h.terms.memory_limit_mib, h.kept_until) for h in (before, held))
    return old == new


def _recorder_of(held: Holding, change: Change) -> Recorder | None:
    """Start logging a reservation, and return its recorder, or None if no history is kept.

    Raises:
        OSError: The history can't be written.
        ReserveGPUError: The history can't be written.
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
