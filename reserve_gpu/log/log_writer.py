"""Write this user's history.

Each open reservation has its own file, called a page, which the reserving process keeps locked. The
page holds the lines for the current hour and is rewritten every minute. At the end of each hour,
and when the reservation ends, these lines are appended to a monthly file. A process that is killed
leaves behind an unlocked page. The user's next reservation appends that page's lines to the monthly
file, and removes the page.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

from reserve_gpu.locks import files
from reserve_gpu.locks.lock import flock
from reserve_gpu.log.log_lines import LogLine, month, parsed
from reserve_gpu.model.errors import HistoryError
from reserve_gpu.model.requests import End
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = re.compile(r"[0-9a-f]{16}\.open")
MONTH = re.compile(r"[0-9]{4}-[0-9]{2}\.jsonl")
PAGE_LIMIT = 1 << 20  # maximum number of bytes read from a page
OWN_MODE = 0o600


class Page:
    """The locked file that holds a reservation's current lines.

    Attributes:
        folder: The file descriptor of the history folder.
        descriptor: The page's file descriptor.
        name: The page's file name.
    """

    def __init__(self, folder: int, descriptor: int, name: str) -> None:
        self.folder, self.descriptor, self.name = folder, descriptor, name

    @classmethod
    def new(cls, folder: int) -> Page:
        """Create a page.

        The file is locked before it gets its final name, so that `close_lost` does not mistake it
        for a killed process's page.

        Args:
            folder: The file descriptor of the history folder. Closing the page also closes this
                descriptor.

        Raises:
            OSError: The file can't be created.
            LockError: The file can't be locked.
            HistoryError: The file is not a regular file that only this user can change.
        """
        own_id = secrets.token_hex(8)
        first, name = f"{own_id}.new", f"{own_id}.open"
        descriptor = _opened(folder, first, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        flock(descriptor, first)
        os.rename(first, name, src_dir_fd=folder, dst_dir_fd=folder)
        return cls(folder, descriptor, name)

    @property
    def id(self) -> str:
        """Return the reservation's unique ID."""
        return self.name.partition(".")[0]

    def write(self, entries: Sequence[LogLine]) -> None:
        """Replace the page's lines.

        Raises:
            OSError: The page can't be written.
        """
        data = "".join(f"{entry.to_json()}\n" for entry in entries).encode()
        os.pwrite(self.descriptor, data, 0)
        os.ftruncate(self.descriptor, len(data))
        os.utime(self.descriptor)

    def turn(self, entries: Sequence[LogLine]) -> None:
        """Append the lines to the monthly file, and empty the page.

        Raises:
            OSError: A file can't be written.
            HistoryError: The monthly file is not a regular file that only this user can change.
        """
        append(self.folder, entries)
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Close the page without removing it, so that another process can continue it."""
        files.close(self.descriptor)
        os.close(self.folder)

    def remove(self) -> None:
        """Remove and close the page."""
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self.folder)
        self.close()


def append(folder: int, entries: Sequence[LogLine]) -> None:
    """Append each line to the history file for its month.

    Args:
        folder: The file descriptor of the history folder.
        entries: The lines, ordered by start time.

    Raises:
        OSError: A file can't be written.
        HistoryError: A file is not a regular file that only this user can change.
    """
    for name, group in groupby(entries, lambda entry: month(entry.start)):
        data = "".join(f"{entry.to_json()}\n" for entry in group).encode()
        file = _opened(folder, f"{name}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with files.closing(file):
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # a full disk truncated the last line
                data = b"\n" + data
            os.write(file, data)
        if not size:
            _forget_old(folder, name)


def close_lost(folder: int) -> None:
    """Append the lines from pages left behind by killed processes, and remove those pages.

    Args:
        folder: The file descriptor of this user's history folder.

    Raises:
        OSError: The folder can't be listed.
    """
    for name in filter(PAGE.fullmatch, os.listdir(folder)):
        with suppress(OSError, HistoryError):
            file = _opened(folder, name, os.O_RDWR)
            with files.closing(file):
                if flock(file, name):
                    _end_lost(folder, os.pread(file, PAGE_LIMIT, 0))
                    os.unlink(name, dir_fd=folder)


def _end_lost(folder: int, page: bytes) -> None:
    """Append a killed process's page to the history, unless that process already did so."""
    entries = filter(None, map(parsed, page.splitlines()))
    lost = [entry._replace(how=entry.how or End.LOST) for entry in entries]
    if lost and not _has(folder, lost[0]):
        append(folder, lost)


def _has(folder: int, entry: LogLine) -> bool:
    """Return whether the monthly file already has a line with the same ID and start."""
    with suppress(FileNotFoundError):
        file = _opened(folder, f"{month(entry.start)}.jsonl", os.O_RDONLY)
        with os.fdopen(os.dup(file), "rb") as opened:
            files.close(file)
            mark = entry.id.encode()
            matches = (parsed(line) for line in opened if mark in line)
            return any(e and (e.id, e.start) == (entry.id, entry.start) for e in matches)
    return False


def _forget_old(folder: int, newest: str) -> None:
    """Remove the monthly files that are more than a year older than the newest one."""
    oldest = f"{int(newest[:4]) - 1}{newest[4:]}"  # the same month of the previous year
    for name in filter(MONTH.fullmatch, os.listdir(folder)):
        if name < oldest:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _opened(folder: int, name: str, flags: int) -> int:
    """Open one of this user's files, and return a descriptor that forked children close.

    Raises:
        OSError: The file can't be opened.
        HistoryError: The file is not a regular file that only this user can change.
    """
    with no_fork:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, OWN_MODE, dir_fd=folder)
        files.remember(file)
    status = os.fstat(file)
    is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_own and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return file
    files.close(file)
    raise HistoryError(f"{name} is not a regular file that only you can write to")
