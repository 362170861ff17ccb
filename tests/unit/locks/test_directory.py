"""The lock directory and its files: what may stand in their place, and be written in them."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import files
from reserve_gpu.locks.directory import LockDirectory, _mutex_message
from reserve_gpu.locks.holders import Holders
from reserve_gpu.locks.lock import kernel_device
from reserve_gpu.model.errors import LockError
from tests.support.locked import (
    have,
    is_locked,
    watched,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


from tests.support.directory import replace


def test_a_name_can_not_leave_the_directory(tmp_path: Path) -> None:
    """A UUID that is none, from whatever driver, names no file outside of the lock directory."""
    with LockDirectory(str(tmp_path / "locks")) as directory:
        for name in ("../a.lock", "/a.lock", ".lock", "a/b.lock"):
            with pytest.raises(LockError, match="name"):
                directory.acquire(name)
        with directory.mutex(), pytest.raises(LockError, match="name"):
            directory.lock_device("../../a", share=False)
    assert not list(tmp_path.rglob("*a.lock"))
    assert not (tmp_path.parent / "a.lock").exists()


@pytest.mark.full
def test_a_lock_directory_removed_before_the_lock(tmp_path: Path) -> None:
    """A directory that disappears once it is open is an error, not a lock that nobody sees."""
    path = tmp_path / "locks"
    with LockDirectory(str(path)) as directory:
        path.rmdir()
        with pytest.raises(LockError, match="locks"):
            directory.acquire("a.lock")


def test_the_list_of_locks_calls_a_file_system(tmp_path: Path) -> None:
    """What the kernel calls the file system of a locked file stands in its list of locks."""
    with have(tmp_path / "a.lock") as descriptor:
        device = kernel_device(descriptor)
        expected = f" {os.getpid()} {device}:{os.fstat(descriptor).st_ino} "
        assert expected in Path("/proc/locks").read_text()
    with (tmp_path / "a.lock").open() as file:
        assert kernel_device(file.fileno()) is None


@contextmanager
def replacing(path: Path, times: int) -> Iterator[None]:
    """Replace a file as often when it is to be locked: it is open then, and not yet locked."""
    left = [times]

    def replace_now(event: str, _: object) -> None:
        if event == "fcntl.flock" and left[0]:
            left[0] -= 1
            replace(path)

    with watched(replace_now):
        yield


def test_a_file_replaced_while_it_is_locked(tmp_path: Path) -> None:
    """A lock is held on the file that others will find, though another was opened at first."""
    path = tmp_path / "a.lock"
    with LockDirectory(str(tmp_path)) as directory:
        with replacing(path, times=3):
            lock = directory.acquire("a.lock")
        assert lock
        assert lock.is_valid()
        assert is_locked(path)
        lock.release()


def test_a_file_replaced_again_and_again_is_an_error(tmp_path: Path) -> None:
    """Who can never lock the file that others find gives up and says so."""
    path = tmp_path / "a.lock"
    expected = pytest.raises(LockError, match=rf"processes keep replacing {path}")
    with LockDirectory(str(tmp_path)) as directory, replacing(path, times=1 << 30), expected:
        directory.acquire("a.lock")


def test_a_process_that_is_younger_than_a_lock_is_not_its_holder() -> None:
    """The number of a holder that has ended may be another process's, which is not named for it."""
    holders = Holders("/", files.NONE)
    assert holders.keeper(os.getpid(), os.stat("/usr/bin/env")) is None


def test_a_process_that_has_not_the_file_is_not_its_holder(tmp_path: Path) -> None:
    """Who has the file locked is named, not who got the number of the one that locked it.

    The file may be newer than that process: anybody can touch it.
    """
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with have(path):
            path.touch()
            holders = Holders(str(tmp_path), files.NONE)
            assert holders.keeper(other.pid, path.stat()) == os.getpid()
        holders = Holders(str(tmp_path), files.NONE)
        assert holders.keeper(other.pid, path.stat()) is None


@pytest.mark.parametrize(("waited_s", "is_hanging"), [(0.1, False), (9.9, False), (30, True)])
def test_only_who_has_waited_for_long_reads_of_a_driver_that_hangs(
    waited_s: float, *, is_hanging: bool
) -> None:
    """Others who reserve for a moment are no sign of a driver that hangs."""
    text = _mutex_message(os.getpid(), waited_s)
    assert f"in progress for {waited_s:.0f} s; process {os.getpid()} of" in text
    assert "is making the current one." in text
    assert ("the NVIDIA driver has hung" in text) is is_hanging
