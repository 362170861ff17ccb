"""Messages about the lock directory, its files and the mutex."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import files
from reserve_gpu.locks.directory import (
    LONG_S,
    _hard_link_message,
    _mutex_message,
    _unclear_lock_message,
)
from reserve_gpu.locks.lock import cause

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

FOLDER = "/locks"
PATH = f"{FOLDER}/GPU-0.lock"


def directory(number: int) -> str:
    """Return the message of an error when the lock directory is opened."""
    return files._directory_message(FOLDER, OSError(number, os.strerror(number)))


def file(number: int, name: str = "no file") -> str:
    """Return the message of an error when a lock file with the status of `/etc/NAME` is opened."""
    etc = os.open("/etc", os.O_RDONLY)
    try:
        return files._file_message(PATH, OSError(number, os.strerror(number)), etc, name)
    finally:
        os.close(etc)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(directory(errno.ELOOP), id="directory is a link"),
        pytest.param(directory(errno.ENOENT), id="directory has no parent"),
        pytest.param(directory(errno.EMFILE), id="too many open files of this process"),
        pytest.param(file(errno.EMFILE), id="too many open files, at a file"),
        pytest.param(file(errno.ELOOP), id="file is a link"),
        pytest.param(file(errno.EISDIR), id="file is a directory"),
        pytest.param(file(errno.ENOSPC), id="file cannot be created"),
        pytest.param(file(errno.EACCES, "passwd"), id="file is not writable for this user"),
        pytest.param(file(errno.EAGAIN, "passwd"), id="another user has a lease on the file"),
        pytest.param(file(errno.ENXIO, "passwd"), id="file is a socket"),
        pytest.param(cause(errno.EOPNOTSUPP, FOLDER), id="no flock on this file system"),
        pytest.param(cause(errno.EPERM, FOLDER), id="flock is denied"),
        pytest.param(
            _hard_link_message(PATH, "GPU-1.lock", os.stat("/etc/passwd")), id="second name"
        ),
        pytest.param(_unclear_lock_message(PATH, "GPU-1.lock", None), id="unclear second name"),
        pytest.param(_mutex_message(None, LONG_S - 0.1), id="mutex is held"),
        pytest.param(_mutex_message(None, LONG_S), id="mutex is held for long"),
    ],
)
def test_a_message_about_locks(snapshot: SnapshotAssertion, text: str) -> None:
    assert text == snapshot
