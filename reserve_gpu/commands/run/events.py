"""`run --json` and `--events`: the events of a reservation, each a line of JSON."""

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
from reserve_gpu.render.progress import stands
from reserve_gpu.reservation.session import session

if TYPE_CHECKING:
    from argparse import Namespace

    from reserve_gpu.api import Outcome

STDERR = 2


class Events(Reporter):
    """Writes events to a descriptor; a reader that does not read them delays nothing for long."""

    def __init__(self, descriptor: int) -> None:
        """Open the descriptor's events. Raises OSError."""
        self._sender = Sender(descriptor)
        self._stands: object = None

    def show(self, news: Progress) -> None:
        """Write the progress of a wait when it has changed."""
        if not isinstance(news, Waiting) or self._stands == stands(news):
            return
        self._stands, first = stands(news), news.first and news.first.holder
        self._sender.tell(
            "waiting",
            asks=messages.asked(news.request),
            place=news.place,
            waited_s=round(news.waited_s, 3),
            limit_s=None if math.isinf(news.limit_s) else news.limit_s,
            first=first and {"user": first.user, "name": first.name, "since": first.since},
            first_free=contacts.first_end(news.rows, time.time()),
        )

    def came(self, outcome: Outcome) -> None:
        """Write the acquired GPUs and warnings, or the reason for none."""
        held = session().holding
        if outcome.excused:
            self._sender.tell("refused", READER_LIMIT_S, **outcome.excused.to_dict())
            return
        self._sender.tell(
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
        """Write the refusal, except on stderr, where the command line prints it in any case."""
        if isinstance(error, ReserveGPUError) and self._sender.descriptor != STDERR:
            self._sender.tell("refused", READER_LIMIT_S, **error.to_dict())

    def follow(self) -> None:
        """Have what comes later told by another process, as this one becomes the command."""
        if session().devices:
            after_exec.start(self._sender, session().holding)


def of_arguments(arguments: Namespace) -> Events:
    """Return the writer for --json and --events. Raises RequestError."""
    word = arguments.events or str(STDERR)
    try:
        if not word.isdecimal():
            return Events(_opened(word))
        os.set_inheritable(int(word), int(word) <= STDERR)  # else the command would keep it open
        return Events(int(word))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "there is no such descriptor"
        raise RequestError(f"--events {sanitize(word)}: {reason}.") from error


def _opened(path: str) -> int:
    """Open a file for events. A FIFO keeps them until it has a reader. Raises OSError."""
    flags = os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, os.O_WRONLY | flags, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.open(path, os.O_RDWR | flags)
