"""Writing into a history. Whatever can't be written is an OSError or a LockError, never a loss.

A reservation that lasts has a file of its own, its page, which this process has locked: its last
lines, which are written anew each minute. At the end of an hour, and of the reservation, they are
appended to the file of the month. What a killed process leaves is a page that nobody has locked:
the next reservation of this user ends it so.
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
PAGE_LIMIT = 1 << 20  # bytes
OWN_MODE = 0o600


class Page:
    """The file of one reservation that lasts; this process has it locked.

    folder, descriptor: of its folder, and of the file. name: in that folder.
    """

    def __init__(self, folder: int, descriptor: int, name: str) -> None:
        self.folder, self.descriptor, self.name = folder, descriptor, name

    @classmethod
    def new(cls, folder: int) -> Page:
        """Begin a page. folder: its descriptor, which the page closes. Raises OSError, LockError.

        It gets its name once it is locked: else who ends lost pages would take it for one.
        """
        own_id = secrets.token_hex(8)
        first, name = f"{own_id}.new", f"{own_id}.open"
        descriptor = _opened(folder, first, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        flock(descriptor, first)
        os.rename(first, name, src_dir_fd=folder, dst_dir_fd=folder)
        return cls(folder, descriptor, name)

    @property
    def id(self) -> str:
        """Return what tells this reservation from all others."""
        return self.name.partition(".")[0]

    def write(self, entries: Sequence[LogLine]) -> None:
        """Write these lines in place of those that are there. Raises OSError."""
        data = "".join(f"{entry.to_json()}\n" for entry in entries).encode()
        os.pwrite(self.descriptor, data, 0)
        os.ftruncate(self.descriptor, len(data))
        os.utime(self.descriptor)

    def turn(self, entries: Sequence[LogLine]) -> None:
        """Let these lines stand, and begin anew. Raises OSError."""
        append(self.folder, entries)
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Close the file, with which another process may go on."""
        files.close(self.descriptor)
        os.close(self.folder)

    def remove(self) -> None:
        """Remove the file, and close it."""
        with suppress(OSError):
            os.unlink(self.name, dir_fd=self.folder)
        self.close()


def append(folder: int, entries: Sequence[LogLine]) -> None:
    """Append the lines to the file of their month. Raises OSError, HistoryError."""
    for name, those in groupby(entries, lambda entry: month(entry.start)):
        data = "".join(f"{entry.to_json()}\n" for entry in those).encode()
        file = _opened(folder, f"{name}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with files.closing(file):
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # a full disk has cut a line
                data = b"\n" + data
            os.write(file, data)
        if not size:
            _forget_old(folder, name)


def close_lost(folder: int) -> None:
    """End what processes of this user have left that were killed. Raises OSError."""
    for name in filter(PAGE.fullmatch, os.listdir(folder)):
        with suppress(OSError, HistoryError):
            file = _opened(folder, name, os.O_RDWR)
            with files.closing(file):
                if flock(file, name):
                    _end_lost(folder, os.pread(file, PAGE_LIMIT, 0))
                    os.unlink(name, dir_fd=folder)


def _end_lost(folder: int, page: bytes) -> None:
    """Append the last lines of a page, unless its process was killed after it had done so."""
    entries = filter(None, map(parsed, page.splitlines()))
    lost = [entry._replace(how=entry.how or End.LOST) for entry in entries]
    if lost and not _has(folder, lost[0]):
        append(folder, lost)


def _has(folder: int, entry: LogLine) -> bool:
    """Tell whether the file of the month has that line, whatever its end."""
    with suppress(FileNotFoundError):
        file = _opened(folder, f"{month(entry.start)}.jsonl", os.O_RDONLY)
        with os.fdopen(os.dup(file), "rb") as opened:
            files.close(file)
            mark = entry.id.encode()
            those = (parsed(line) for line in opened if mark in line)
            return any(e and (e.id, e.start) == (entry.id, entry.start) for e in those)
    return False


def _forget_old(folder: int, newest: str) -> None:
    """Remove the files of months that are kept no more: a year before the newest one is kept."""
    oldest = f"{int(newest[:4]) - 1}{newest[4:]}"  # of the year before
    for name in filter(MONTH.fullmatch, os.listdir(folder)):
        if name < oldest:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _opened(folder: int, name: str, flags: int) -> int:
    """Open a file of this user's; returns a descriptor, which no child inherits.

    Raises OSError, and HistoryError for what is not a plain file that this user alone can change.
    """
    with no_fork:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, OWN_MODE, dir_fd=folder)
        files.remember(file)
    status = os.fstat(file)
    is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_own and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return file
    files.close(file)
    raise HistoryError(f"{name} is not a plain file of this user's")
