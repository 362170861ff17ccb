"""Lock files: test which are locked, lock them, put obstacles in their places, watch openings."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.model.requests import Lease
from tests.support.machine import UUIDS

if TYPE_CHECKING:
    import warnings
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.support.here import Here

# Every field of a record in a lock file, and values that a user might forge for it.
RECORD_FIELDS = (
    *(*ProcessInfo._fields, *Lease._fields, *Record._fields[3:]),
    *("note", "part_mib", "part_unit"),  # of a ReservationTerms
    *("asks", "needs", "wants", "behind"),  # of a WaitRequest
)
FORGED_VALUES = (0, 1e-9, 4e9, "GPU1", [UUIDS[1]])
MUTEX = "mutex.lock"
PRECIOUS = b"years of work\n"

# Functions that create something else in place of a lock file.
OBSTACLES: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("../precious.txt"),
    "second name of a file": lambda path: path.hardlink_to(path.parent.parent / "precious.txt"),
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
}
# Fields of the record of a part's holder.
SHARER: dict[str, Any] = {"part_mib": 1024}
whole_and_shared = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
# CI runs the layer `process` as root, and the default layer as an ordinary user.
AS_ROOT = (
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
)
obstacles = pytest.mark.parametrize("obstacle", OBSTACLES)


def needs_root(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test unless it runs as root, and put it into the layer `process`."""
    for mark in AS_ROOT:
        test = mark(test)
    return test


@contextmanager
def obstructed(path: Path, obstacle: str) -> Iterator[None]:
    """Put an obstacle in place of a lock file, and check that it and its link target survive."""
    precious = path.parent.parent / "precious.txt"
    precious.write_bytes(PRECIOUS)
    path.parent.mkdir(exist_ok=True)
    OBSTACLES[obstacle](path)
    before = path.lstat()
    yield
    after = path.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert precious.read_bytes() == PRECIOUS
    path.rmdir() if obstacle == "directory" else path.unlink()


def is_locked(path: Path) -> bool:
    """Return whether any process has locked the file with flock(2)."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def locked(folder: Path) -> set[str]:
    """Return the names of the locked files in a lock directory."""
    with suppress(FileNotFoundError):
        files = [path for path in folder.iterdir() if stat.S_ISREG(path.lstat().st_mode)]
        return {path.name for path in files if is_locked(path)}
    return set()


def held(here: Here) -> list[int]:
    """Return the indices of the GPUs that any process holds, alone or shared."""
    names = locked(here.locks)
    count = here.scenario.read_text().split().count("gpu")
    uuids = [here.uuid(str(index)) for index in range(count)]
    return [i for i, uuid in enumerate(uuids) if any(name.startswith(uuid) for name in names)]


def make_older(path: Path, since_s: float, idle_s: float | None = None) -> None:
    """Make a reservation older, in the record of its lock file.

    Args:
        path: The lock file. This also changes the file with the owner's record.
        since_s: The age of the reservation.
        idle_s: The seconds since the last cell, or None if no cell has run.
    """
    then = time.time() - since_s
    for each in (path, *path.parent.glob(f"{path.stem}.record-*")):
        if not each.stat().st_size:  # the file of an earlier owner
            continue
        with each.open("r+") as file:  # fs.protected_regular refuses O_CREAT on such a file
            record = json.loads(file.read())
            fields = {name: record[name] for name in record if not name.endswith("_boot")}
            file.seek(0)
            file.write(json.dumps({**fields, "since": then, "written": then}))
            file.truncate()
        os.utime(each, (time.time(), then if idle_s is None else time.time() - idle_s))


WRITE_LOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


@contextmanager
def have(path: Path, content: bytes = b"") -> Iterator[int]:
    """Lock a file as a holder that owns it does, after creating it with this content."""
    path.parent.mkdir(mode=0o1777, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WRITE_LOCK)
        os.truncate(descriptor, 0)
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


_watchers: list[Callable[[str, tuple[Any, ...]], object]] = []


@contextmanager
def watched(watcher: Callable[[str, tuple[Any, ...]], object]) -> Iterator[None]:
    """Call the watcher with each audit event of this process, such as `open`, and its arguments.

    An audit hook can't be removed, so all watchers share one:
    https://docs.python.org/3/library/audit_events.html
    """
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_notify)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


_hooked: list[bool] = []


def _notify(event: str, arguments: tuple[Any, ...]) -> None:
    for watcher in _watchers:
        watcher(event, arguments)


@contextmanager
def opened(name: str) -> Iterator[list[str]]:
    """Yield a list with the path of each file of that name that this process opens."""
    times: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event == "open" else None
        if isinstance(path, str) and os.path.basename(path) == name:
            times.append(path)

    with watched(note):
        yield times


def texts(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """Return the texts of warnings, except the one that every reservation in a container shows."""
    every = [str(warning.message) for warning in caught]
    return [text for text in every if not text.startswith("this container sees only")]


def inodes(folder: Path) -> dict[str, int]:
    """Return the inode of each file in a folder."""
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def replace(path: Path) -> None:
    """Put a new, empty file in place of a file."""
    draft = path.with_name("draft")
    draft.touch()
    draft.replace(path)
