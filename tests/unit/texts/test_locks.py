"""Messages about the lock directory, its files and the mutex."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.locks import directory as directories
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import (
    LONG_S,
    LockDirectory,
    _hard_link_message,
    _mutex_message,
    _unclear_lock_message,
)
from reserve_gpu.locks.holders import MOST_OF_ONE_USER, Holders
from reserve_gpu.locks.lock import cause, flock
from reserve_gpu.model.errors import LockError
from tests.support.locked import obstructed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syrupy.assertion import SnapshotAssertion

FOLDER = "/locks"
NAME = "GPU-0.lock"
PATH = f"{FOLDER}/{NAME}"
CLOSED = 1 << 20  # no open file has this descriptor


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


def error_of(function: Callable[..., object], *arguments: Any) -> str:
    """Return the text of the LockError that a function raises."""
    with pytest.raises(LockError) as caught:
        function(*arguments)
    return str(caught.value)


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
        pytest.param(error_of(files.finish, CLOSED, PATH, 0o644), id="mode cannot be set"),
        pytest.param(error_of(flock, CLOSED, PATH), id="file cannot be locked"),
        pytest.param(error_of(Holders(FOLDER, CLOSED).listing), id="directory cannot be listed"),
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


def test_files_that_cannot_be_locked(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A wrong name, files of other kinds, and a user's 65th file."""
    path = tmp_path / "locks" / NAME
    with LockDirectory(str(path.parent)) as locks, ExitStack() as stack:
        texts = [error_of(locks.acquire, f"../{NAME}")]
        for obstacle in ("pipe", "second name of a file"):
            with obstructed(path, obstacle):
                texts.append(error_of(locks.acquire, NAME))
        with locks.mutex():
            for _ in range(MOST_OF_ONE_USER):
                stack.callback(locks.acquire_any_user_file("queue").release)
            texts.append(error_of(locks.acquire_any_user_file, "queue"))
    assert [text.replace(str(path.parent), FOLDER) for text in texts] == snapshot


def test_no_lock_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Other users can delete files, the path is relative, no path is usable, and it is macOS."""
    tmp_path.chmod(0o777)
    texts = [error_of(files.open_directory, str(tmp_path)).replace(str(tmp_path), FOLDER)]
    monkeypatch.setenv("RESERVE_GPU_LOCK_DIR", "locks")
    texts.append(error_of(LockDirectory))
    monkeypatch.delenv("RESERVE_GPU_LOCK_DIR")
    monkeypatch.setattr(directories, "PLACES", ("/proc", "/sys"))
    texts.append(error_of(LockDirectory))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert [*texts, error_of(LockDirectory)] == snapshot
