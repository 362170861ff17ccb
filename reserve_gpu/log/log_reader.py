"""Read the lines of all histories that this user has permission to read."""

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

AHEAD_S = 86400.0  # tolerance in seconds for wrong clocks and other time zones
MOST_LINES = 200_000  # maximum lines read per user: twice what eight GPUs produce in a year


class Logged(NamedTuple):
    """A line of a history, and the user who wrote it.

    Attributes:
        user: The name of the user.
        entry: The line.
    """

    user: str
    entry: LogLine


def exists() -> bool:
    """Return whether there is a history that this user has permission to read."""
    return any(True for _ in places.to_read())


def since(
    moment: float, now: float, cut: set[str], most_lines: int = MOST_LINES
) -> Iterator[Logged]:
    """Yield the lines whose period starts between two times, including those of open reservations.

    Args:
        moment: The earlier time in seconds since the epoch.
        now: The current time in seconds since the epoch.
        cut: A set to which the names of users with more than `most_lines` lines are added.
        most_lines: The maximum number of lines to read per user, newest files first.
    """
    budgets: dict[int, int] = {}  # lines that may still be read, by UID; negative if cut off
    for folder, uid in places.to_read():
        budgets.setdefault(uid, most_lines)
        yield from _read_folder(folder, uid, moment, now, budgets)
        if budgets[uid] < 0:
            cut.add(procfs.user_name(uid))


def _read_folder(
    folder: int, uid: int, moment: float, now: float, budgets: dict[int, int]
) -> Iterator[Logged]:
    user, latest = procfs.user_name(uid), now + AHEAD_S
    names = sorted(os.listdir(folder), reverse=True)
    pages = _lines(folder, uid, filter(PAGE.fullmatch, names), budgets)
    # Pages are read before the files of months. If a page's lines are appended to such a file in
    # between, they are read twice, and the appended lines count because they are newer.
    open_lines = {(entry.id, entry.gpu, entry.start): entry for entry in pages}
    first = month(max(0.0, moment - AHEAD_S))
    months = (name for name in filter(MONTH.fullmatch, names) if name[:7] >= first)
    for entry in _lines(folder, uid, months, budgets):
        if open_lines:
            open_lines.pop((entry.id, entry.gpu, entry.start), None)
        if moment <= entry.start <= latest:
            yield Logged(user, entry)
    for entry in open_lines.values():
        if moment <= entry.start <= latest:
            yield Logged(user, entry)


def _lines(
    folder: int, uid: int, names: Iterator[str], budgets: dict[int, int]
) -> Iterator[LogLine]:
    """Yield the valid lines of these files until the user's budget of lines is used up."""
    for name in names:
        with suppress(OSError):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(file)
                is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                # A line that is too long is read in pieces, which do not parse.
                lines = iter(partial(opened.readline, LINE_LIMIT + 1), b"")
                for line in lines if is_plain and status.st_uid == uid else ():
                    budgets[uid] -= 1
                    if budgets[uid] < 0:
                        return
                    if entry := parsed(line):
                        yield entry
