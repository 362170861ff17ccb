"""Reading histories: all lines since a moment, of all whose history this user may read."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.log import places
from reserve_gpu.log.log_lines import LINE_LIMIT, LogLine, month, parsed
from reserve_gpu.log.log_writer import MONTH, PAGE
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator

AHEAD_S = 86400.0  # a clock may have been wrong by so much, and its time zone another
MOST_LINES = 200_000  # that are read of one user: twice what eight GPUs come to in a year


class Logged(NamedTuple):
    """A line, and whose history it is in."""

    user: str
    entry: LogLine


def exists() -> bool:
    """Tell whether there is any history that this user may read."""
    return any(True for _ in places.to_read())


def since(
    moment: float, now: float, cut: set[str], most_lines: int = MOST_LINES
) -> Iterator[Logged]:
    """Yield the lines of what began between these moments, in seconds since the epoch.

    cut: gets the users who have more lines than the most that are read: of them the newest count.
    """
    left: dict[int, int] = {}  # lines that may still be read of each user; below 0: more
    for folder, uid in places.to_read():
        left.setdefault(uid, most_lines)
        yield from _of_folder(folder, uid, moment, now, left)
        if left[uid] < 0:
            cut.add(procfs.user_name(uid))


def _of_folder(
    folder: int, uid: int, moment: float, now: float, left: dict[int, int]
) -> Iterator[Logged]:
    user, latest = procfs.user_name(uid), now + AHEAD_S
    names = sorted(os.listdir(folder), reverse=True)
    pages = _lines(folder, uid, filter(PAGE.fullmatch, names), left)
    # A page that is read before the files of months may be appended to them in between. Then the
    # appended line counts: it is the newer one.
    open_lines = {(entry.id, entry.gpu, entry.start): entry for entry in pages}
    first = month(max(0.0, moment - AHEAD_S))
    months = (name for name in filter(MONTH.fullmatch, names) if name[:7] >= first)
    for entry in _lines(folder, uid, months, left):
        if open_lines:
            open_lines.pop((entry.id, entry.gpu, entry.start), None)
        if moment <= entry.start <= latest:
            yield Logged(user, entry)
    for entry in open_lines.values():
        if moment <= entry.start <= latest:
            yield Logged(user, entry)


def _lines(folder: int, uid: int, names: Iterator[str], left: dict[int, int]) -> Iterator[LogLine]:
    """Yield the lines of these files, as many as may be read."""
    for name in names:
        with suppress(OSError):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(file)
                is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                # Of a line that is too long these are pieces, which are none of ours.
                lines = iter(partial(opened.readline, LINE_LIMIT + 1), b"")
                for line in lines if is_plain and status.st_uid == uid else ():
                    left[uid] -= 1
                    if left[uid] < 0:
                        return
                    if entry := parsed(line):
                        yield entry
