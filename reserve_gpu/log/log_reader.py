"""Read the lines of every history that this user has permission to read."""

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

AHEAD_S = 86400.0  # tolerance in seconds for wrong clocks and different time zones
MOST_LINES = 200_000  # maximum lines read per user; eight GPUs produce about 100,000 in a year


class Logged(NamedTuple):
    """A history line and its user.

    Attributes:
        user: The user's name.
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
    """Yield the lines whose period starts at a given time or later.

    This includes the lines of reservations that are still open.

    Args:
        moment: The earliest start of a line's period, in seconds since the epoch.
        now: The current time in seconds since the epoch. Lines that start more than a day later are
            ignored.
        cut: A set to which the function adds the names of users with more than `most_lines` lines.
        most_lines: The maximum number of lines to read per user. The newest files are read first.
    """
    # The number of lines that can still be read, keyed by UID. Negative if lines were left out.
    budgets: dict[int, int] = {}
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
    # Read the pages, which hold the current hour's lines, before the monthly files. If a page is
    # appended to a monthly file between the two reads, its lines are read twice. The copies in the
    # monthly file are used, because they are newer.
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
    """Yield the valid lines in these files until the user's line budget is used up."""
    for name in names:
        with suppress(OSError):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(file, "rb") as opened:
                status = os.fstat(file)
                is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                # A line that is too long is read in pieces, which fail to parse.
                lines = iter(partial(opened.readline, LINE_LIMIT + 1), b"")
                for line in lines if is_plain and status.st_uid == uid else ():
                    budgets[uid] -= 1
                    if budgets[uid] < 0:
                        return
                    if entry := parsed(line):
                        yield entry
