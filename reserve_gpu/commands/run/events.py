"""Write reservation events as lines of JSON, for `run --json` and `run --events`."""

from __future__ import annotations

import errno
import math
import os
import time
from typing import TYPE_CHECKING

from reserve_gpu.commands.run import after_exec
from reserve_gpu.commands.run.after_exec import READER_LIMIT_S, Sender
from reserve_gpu.commands.run.reporter import Reporter
from reserve_gpu.model.errors import RequestError, ReserveGPUError
from reserve_gpu.model.progress import Progress, Waiting
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import contacts, messages
from reserve_gpu.render.progress import state_of
from reserve_gpu.reservation.session import session

if TYPE_CHECKING:
    from argparse import Namespace

    from reserve_gpu.api import Outcome

STDERR = 2


class Events(Reporter):
    """Writes reservation events to a file descriptor.

    If the reader stops reading, the reservation is delayed only briefly.
    """

    def __init__(self, descriptor: int) -> None:
        """Create a reporter.

        Args:
            descriptor: The file descriptor to write to.

        Raises:
            OSError: The file descriptor is not writable.
        """
        self._sender = Sender(descriptor)
        self._last_state: object = None

    def show(self, news: Progress) -> None:
        """Write a queue event if the state of the wait has changed."""
        if not isinstance(news, Waiting) or self._last_state == state_of(news):
            return
        self._last_state, first = state_of(news), news.first and news.first.holder
        self._sender.send(
            "waiting",
            asks=messages.request_text(news.request),
            place=news.place,
            waited_s=round(news.waited_s, 3),
            limit_s=None if math.isinf(news.limit_s) else news.limit_s,
            first=first and {"user": first.user, "name": first.name, "since": first.since},
            first_free=contacts.first_end(news.rows, time.time()),
        )

    def finish(self, outcome: Outcome) -> None:
        """Write an event: the reserved GPUs and warnings, or a refusal that `--optional` allows."""
        held = session().holding
        if outcome.excused:
            self._sender.send("refused", READER_LIMIT_S, **outcome.excused.to_dict())
            return
        self._sender.send(
            "reserved",
            READER_LIMIT_S,
            pid=os.getpid(),
            devices=[{"label": each.label, "uuid": each.uuid} for each in held.devices],
            memory_promised_mib=held.terms.memory_limit_mib,
            until=held.lease.until,
            environ=session().environ,
            warnings=outcome.warnings,
        )

    def failed(self, error: BaseException) -> None:
        """Write the refusal, unless events go to stderr, where the caller prints the error."""
        if isinstance(error, ReserveGPUError) and self._sender.descriptor != STDERR:
            self._sender.send("refused", READER_LIMIT_S, **error.to_dict())

    def follow(self) -> None:
        """Start a process to write later events, because this process will become the command."""
        if session().devices:
            after_exec.start(self._sender, session().holding)


def of_arguments(arguments: Namespace) -> Events:
    """Return the reporter that `--json` or `--events` selects.

    Raises:
        RequestError: The file or file descriptor is not writable.
    """
    target = arguments.events or str(STDERR)
    try:
        if not target.isdecimal():
            return Events(_open(target))
        # The command must not inherit the descriptor, unless it is a standard stream.
        os.set_inheritable(int(target), int(target) <= STDERR)
        return Events(int(target))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "No such file descriptor"
        raise RequestError(f"--events {sanitize(target)}: {reason}.") from error


def _open(path: str) -> int:
    """Open a file or a FIFO for appending, without waiting for a reader."""
    flags = os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, os.O_WRONLY | flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        # The FIFO has no reader yet. If opened for both reading and writing, the FIFO buffers the
        # events until there is a reader.
        return os.open(path, os.O_RDWR | flags)
