"""Reading histories: all lines since a moment, of all whose history this user may read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from reserve_gpu import proc
from reserve_gpu.history import places
from reserve_gpu.history.log_lines import LINE_LIMIT, LogLine, month, parsed
from reserve_gpu.history.log_writer import MONTH, PAGE, PAGE_LIMIT
from reserve_gpu.history.totals import Logged

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE_LIMIT = 1 << 30  # bytes
AHEAD_S = 86400.0  # a clock may have been wrong by so much, and its time zone another
MOST_ON_PAGES = 100_000  # lines of reservations that last, of one user


def exists() -> bool:
    """Tell whether there is any history that this user may read."""
    for folder, _ in places.to_read():
        os.close(folder)
        return True
    return False


def since(moment: float, now: float) -> Iterator[Logged]:
    """Yield all lines of what began between these moments, in seconds since the epoch."""
    for folder, uid in places.to_read():
        try:
            yield from _of_folder(folder, uid, moment, now)
        finally:
            os.close(folder)


def _of_folder(folder: int, uid: int, moment: float, now: float) -> Iterator[Logged]:
    user, latest = proc.user_name(uid), now + AHEAD_S
    names = sorted(os.listdir(folder))
    last: set[tuple[str, str | None, float]] = set()  # lines of pages, which may be appended by now
    pages = _lines(folder, uid, filter(PAGE.fullmatch, names), PAGE_LIMIT)
    for entry in islice(pages, MOST_ON_PAGES):
        last.add((entry.id, entry.gpu, entry.start))
        if moment <= entry.start <= latest:
            yield Logged(user, entry)
    first = month(max(0.0, moment - AHEAD_S))
    months = (name for name in filter(MONTH.fullmatch, names) if name[:7] >= first)
    for entry in _lines(folder, uid, months):
        if moment <= entry.start <= latest and not (
            last and (entry.id, entry.gpu, entry.start) in last
        ):
            yield Logged(user, entry)


def _lines(
    folder: int, uid: int, names: Iterator[str], limit: int = FILE_LIMIT
) -> Iterator[LogLine]:
    """Yield the lines of these files. limit: a file of more bytes is none of ours."""
    for name in names:
        with suppress(OSError):
            file = os.open(
                name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
            )
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(file)
                is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if is_plain and status.st_uid == uid and status.st_size <= limit:
                    # Of a line that is too long these are pieces, which are none of ours.
                    lines = iter(partial(opened.readline, LINE_LIMIT + 1), b"")
                    yield from filter(None, map(parsed, lines))
