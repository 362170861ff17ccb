"""The lock directory: its files, obstacles in their places, records, and lost locks."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import Holders
from reserve_gpu.locks.lock import kernel_device, read_record
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import LockError, MutexHeldError
from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.model.requests import ReservationTerms, TicketAhead, WaitRequest
from tests.support.locked import (
    MUTEX,
    SHARER,
    have,
    held,
    inodes,
    is_locked,
    locked,
    obstacles,
    obstructed,
    opened,
    replace,
    texts,
    watched,
    whole_and_shared,
)
from tests.support.machine import TWO_GPUS, UUIDS
from tests.support.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.here import Here

GPU0, GPU1 = (f"{uuid}.lock" for uuid in UUIDS)


@pytest.fixture
def two(here: Here) -> Here:
    """Make a machine with two idle GPUs of known UUIDs, and an empty lock directory."""
    here.write(TWO_GPUS)
    here.locks.mkdir()
    here.locks.chmod(0o1777)
    return here


def lock_file(here: Here, *, memory: str | None) -> Path:
    """Return the path of the file that the holder of GPU 0 locks."""
    return here.locks / (f"{UUIDS[0]}.share-{os.geteuid()}-0.lock" if memory else GPU0)


def file_modes(folder: Path) -> dict[str, int]:
    """Return the mode of each file in a folder."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


# -- files -----------------------------------------------------------------------------------------


def test_a_device_name_cannot_leave_the_lock_directory(tmp_path: Path) -> None:
    """An invalid UUID from the driver names no file outside the lock directory."""
    with LockDirectory(str(tmp_path / "locks")) as directory:
        for name in ("../a.lock", "/a.lock", ".lock", "a/b.lock"):
            with pytest.raises(LockError, match="name"):
                directory.acquire(name)
        with directory.mutex(), pytest.raises(LockError, match="name"):
            directory.lock_device("../../a", share=False)
    assert not list(tmp_path.rglob("*a.lock"))
    assert not (tmp_path.parent / "a.lock").exists()


@pytest.mark.parametrize("umask", [0o022, 0o777], ids=oct)
def test_the_modes_of_files_do_not_depend_on_the_umask(two: Here, umask: int) -> None:
    """Lock files have mode 0666, the directory 1777, files of one user 0644."""
    two.locks.rmdir()
    two.log.touch()  # the log of the stand-in driver must not get these permissions
    before = os.umask(umask)
    try:
        assert got(count=2) == "0,1"
        assert got("0", memory="1GB") == "0"
    finally:
        os.umask(before)
    assert stat.S_IMODE(two.locks.stat().st_mode) == 0o1777
    own = [f"{uuid}.record-{os.geteuid()}-0" for uuid in UUIDS]
    own.append(f"{UUIDS[0]}.share-{os.geteuid()}-0.lock")
    common = dict.fromkeys((MUTEX, GPU0, GPU1), 0o666)
    assert file_modes(two.locks) == {**common, **dict.fromkeys(own, 0o644)}


def test_a_mode_that_the_owner_has_set_stays(two: Here) -> None:
    """A lock file that its owner has opened to a group only is not opened to all users."""
    got("0")
    path = two.locks / GPU0
    path.chmod(0o660)
    reserve_gpu.release()
    assert got("0") == "0"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.parametrize(("mode", "is_sole"), [(0o644, True), (0o664, False), (0o646, False)])
def test_a_file_that_others_can_write_has_no_sole_owner(
    two: Here, mode: int, *, is_sole: bool
) -> None:
    """A user's own lock file counts as that user's only if no other user or group can write it."""
    (two.locks / "own.lock").touch()
    (two.locks / "own.lock").chmod(mode)
    with LockDirectory(str(two.locks)) as directory:
        owner = files.sole_owner(directory.descriptor, "own.lock")
    assert owner == (os.geteuid() if is_sole else None)


def test_files_are_never_deleted(two: Here) -> None:
    """The files of a lock and of the mutex stay the same through release and reservation."""
    reserve_gpu.reserve()
    before = inodes(two.locks)
    for _ in range(2):
        reserve_gpu.release()
        assert inodes(two.locks) == before
        reserve_gpu.reserve()
        assert inodes(two.locks) == before


def test_the_device_number_is_that_of_the_kernels_lock_list(tmp_path: Path) -> None:
    """The device number of a locked file is the number that /proc/locks shows."""
    with have(tmp_path / "a.lock") as descriptor:
        device = kernel_device(descriptor)
        expected = f" {os.getpid()} {device}:{os.fstat(descriptor).st_ino} "
        assert expected in Path("/proc/locks").read_text()
    with (tmp_path / "a.lock").open() as file:
        assert kernel_device(file.fileno()) is None


@contextmanager
def replacing(path: Path, times: int) -> Iterator[None]:
    """Replace a file this many times, each time between its opening and its locking."""
    left = [times]

    def replace_now(event: str, _: object) -> None:
        if event == "fcntl.flock" and left[0]:
            left[0] -= 1
            replace(path)

    with watched(replace_now):
        yield


def test_a_file_that_is_replaced_before_it_is_locked(tmp_path: Path) -> None:
    """If a file is replaced between its opening and its locking, the new file is locked."""
    path = tmp_path / "a.lock"
    with LockDirectory(str(tmp_path)) as directory:
        with replacing(path, times=3):
            lock = directory.acquire("a.lock")
        assert lock
        assert lock.is_valid()
        assert is_locked(path)
        lock.release()


def test_a_file_that_is_always_replaced_is_an_error(tmp_path: Path) -> None:
    """If a file is replaced again and again, locking it fails."""
    path = tmp_path / "a.lock"
    expected = pytest.raises(LockError, match=f"replacing {path}")
    with LockDirectory(str(tmp_path)) as directory, replacing(path, times=1 << 30), expected:
        directory.acquire("a.lock")


def test_a_link_in_place_of_a_lock_file_is_not_followed(two: Here) -> None:
    """A lock whose file was moved, with a link to it in its place, is not valid."""
    with LockDirectory(str(two.locks)) as directory, directory.mutex():
        lock = directory.acquire("0.lock")
        assert lock
        assert lock.is_valid()
        (two.locks / "0.lock").rename(two.locks / "moved.lock")
        (two.locks / "0.lock").symlink_to("moved.lock")
        assert not lock.is_valid()
        lock.release()


# -- obstacles -------------------------------------------------------------------------------------


@obstacles
def test_an_obstacle_in_place_of_a_lock_file_costs_one_gpu(two: Here, obstacle: str) -> None:
    """A GPU with an obstacle in place of its lock file is unknown; the other GPU is reserved."""
    path = two.locks / GPU0
    with obstructed(path, obstacle):
        assert got() == "1"
        reserve_gpu.release()
        text = of_gpu(refused("0"))
        (row, _) = reserve_gpu.status().rows
    assert str(path) in text
    assert "link" not in obstacle or "symbolic link" in text
    assert row.state is State.UNKNOWN
    assert str(path) in (row.reason or "")


@obstacles
def test_an_obstacle_in_place_of_the_mutex_is_an_error(two: Here, obstacle: str) -> None:
    """An obstacle in place of the mutex's file stops a reservation and changes no variable."""
    path = two.locks / MUTEX
    with obstructed(path, obstacle), pytest.raises(LockError, match=str(path)):
        reserve_gpu.reserve()
    assert variables() == {}


@pytest.mark.parametrize(("name", "error"), [(GPU0, "NoFreeDeviceError"), (MUTEX, "LockError")])
def test_a_cell_shows_an_obstacle_without_a_traceback(two: Here, name: str, error: str) -> None:
    """In a notebook, an obstacle in place of a lock file is a short message."""
    with obstructed(two.locks / name, "directory"):
        cell = two.shell().run("%reserve_gpu 0")
    assert cell.error == error
    assert "Traceback" not in "\n".join(cell.traceback)
    assert ".py" not in "\n".join(cell.traceback)


# -- the directory ---------------------------------------------------------------------------------


def link_to_a_folder(path: Path) -> None:
    folder = path.with_name("elsewhere")
    folder.mkdir()
    path.symlink_to(folder)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(link_to_a_folder, id="link"),
        pytest.param(lambda path: path.symlink_to("no"), id="dangling link"),
        pytest.param(lambda path: path.write_bytes(b"years"), id="file"),
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(lambda path: path.parent.rmdir(), id="no parent"),
    ],
)
def test_an_invalid_lock_directory_is_an_error(here: Here, make: Callable[[Path], object]) -> None:
    """A lock directory that is a link or no directory is left as it is, and named in the error."""

    def everything() -> list[tuple[str, int, int]]:
        return [(p.name, p.lstat().st_mode, p.lstat().st_size) for p in sorted(parent.rglob("*"))]

    parent = here.folder / "parent"
    parent.mkdir()
    path = parent / "locks"
    make(path)
    os.environ["RESERVE_GPU_LOCK_DIR"] = str(path)
    before = everything()
    with pytest.raises(LockError) as caught:
        reserve_gpu.reserve()
    assert everything() == before
    assert variables() == {}
    assert str(path) in str(caught.value)
    assert reserve_gpu.status().problem == str(caught.value)


@pytest.mark.full
def test_a_lock_directory_that_is_removed_is_an_error(tmp_path: Path) -> None:
    """No lock can be acquired in an open directory that was removed."""
    path = tmp_path / "locks"
    with LockDirectory(str(path)) as directory:
        path.rmdir()
        with pytest.raises(LockError, match="locks"):
            directory.acquire("a.lock")


def test_a_directory_in_which_all_users_can_delete_is_an_error(two: Here) -> None:
    """A world-writable directory without the sticky bit is refused, with the command to fix it."""
    two.locks.chmod(0o777)
    with pytest.raises(LockError, match=f"chmod 1777 {two.locks}"):
        reserve_gpu.reserve()
    assert file_modes(two.locks) == {}
    two.locks.chmod(0o1777)
    assert got() == "0"


def test_the_mode_of_a_private_directory_stays(here: Here) -> None:
    """A directory without the sticky bit was made for another purpose, so its mode stays."""
    private = here.folder / "private"
    private.mkdir(mode=0o700)
    os.environ["RESERVE_GPU_LOCK_DIR"] = str(private)
    assert got() == "0"
    assert private.stat().st_mode & 0o7777 == 0o700


def test_a_relative_lock_directory_is_an_error(here: Here) -> None:
    """A relative path would be a different directory in each working directory."""
    os.environ["RESERVE_GPU_LOCK_DIR"] = "somewhere"
    with pytest.raises(LockError, match="'somewhere' must be an absolute path"):
        reserve_gpu.reserve()
    assert not (here.folder / "somewhere").exists()


def test_two_spellings_of_a_path_are_one_lock_directory(here: Here) -> None:
    """`~` is expanded, and `..` and double slashes are resolved."""
    os.environ["RESERVE_GPU_LOCK_DIR"] = "~/locks/../locks//"
    assert got() == "0"
    os.environ["RESERVE_GPU_LOCK_DIR"] = str(here.home / "locks")
    assert got(count=2) == "0,1"  # this adds a GPU to the reservation


# -- deleted and replaced files --------------------------------------------------------------------

LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name("old")),
    "replaced": replace,
    "directory deleted": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@whole_and_shared
def test_a_holder_locks_a_lost_file_again(
    two: Here, lose: Callable[[Path], object], *, memory: str | None
) -> None:
    """A holder whose lock file was deleted or replaced locks it again, and is warned once."""
    reservation = reserve_gpu.reserve("0", memory=memory, note="mine")
    path = lock_file(two, memory=memory)
    lose(path)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        assert reserve_gpu.reserve("0", memory=memory) is reservation
    (warning,) = texts(caught)
    assert str(path) in warning
    assert is_locked(path)
    assert json.loads(path.read_bytes())["note"] == "mine"
    assert stat.S_IMODE(two.locks.stat().st_mode) == 0o1777
    with pytest.raises(AssertionError), two.rival("0"):
        pass
    assert (reserve_gpu.current(), variables()["CUDA_VISIBLE_DEVICES"]) == (reservation, "0")
    reserve_gpu.reserve("0", memory=memory)  # without a warning, which would be an error
    reserve_gpu.release()
    assert held(two) == []


@whole_and_shared
def test_the_next_cell_locks_a_deleted_file_again(two: Here, *, memory: str | None) -> None:
    """At the end of any cell, a deleted lock file is locked again, and the cell shows a warning."""
    shell = two.shell()
    shell.run(f"%reserve_gpu 0 {'--memory 1GB' if memory else ''}")
    path = lock_file(two, memory=memory)
    with opened(MUTEX) as times:
        assert shell.run("1").stdout == shell.run("1").stderr == ""
    assert times == []  # a cell does not delay other processes unless a file is lost
    path.unlink()
    cell = shell.run("x = 1")
    assert str(path) in cell.stdout + cell.stderr
    assert held(two) == [0]
    cell = shell.run("x = 2")
    assert cell.stdout + cell.stderr == ""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [("0,1", "0,1", [0, 1]), ("0,1", "0", [0]), ("0,1", "1", [1]), ("0", "0,1", [0, 1])],
)
def test_only_the_deleted_file_of_several_is_locked_again(
    two: Here, before: str, after: str, expected: list[int]
) -> None:
    """The lock whose file was deleted is acquired again, whatever the next request asks for."""
    reserve_gpu.reserve(before)
    (two.locks / GPU0).unlink()
    others = inodes(two.locks)
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="The lock file of GPU0") as caught:
        assert got(after) == after
    assert len(texts(caught)) == 1
    assert held(two) == expected
    assert others.items() <= inodes(two.locks).items()


@pytest.mark.parametrize(
    ("memory", "other"),
    [
        (None, "holder"),
        (None, "sharer"),
        (None, "unknown"),
        ("1GB", "holder"),
        ("1GB", "unknown"),
    ],
)
def test_a_lock_that_another_process_has_acquired_is_lost(
    two: Here, other: str, *, memory: str | None
) -> None:
    """If another process locks the new file of a deleted lock, the old holder gets an error."""
    reservation = reserve_gpu.reserve("0", memory=memory)
    before = variables()
    path = lock_file(two, memory=memory)
    path.unlink()
    taken = (
        have(two.locks / GPU0)
        if other == "unknown"
        else two.rival("0", **SHARER if other == "sharer" else {})
    )
    with taken:
        for devices in (None, "0", "0,1"):
            with pytest.raises(LockError) as caught:
                reserve_gpu.reserve(devices, memory=memory)
            assert str(path) in str(caught.value)
            assert f"(pid {os.getpid()})" in str(caught.value)
            assert variables() == before
        assert reserve_gpu.current() is reservation
        reservation.release()
        assert held(two) == [0]
    assert held(two) == []


def test_the_next_cell_shows_that_a_lock_is_lost(two: Here) -> None:
    """If another process has acquired a lost lock, the next cell shows the process."""
    shell = two.shell()
    shell.run("%reserve_gpu 0")
    (two.locks / GPU0).unlink()
    with two.rival("0"):
        cell = shell.run("x = 1")
    assert f"pid {os.getpid()}" in cell.stdout + cell.stderr
    assert cell.error is None


# -- records ---------------------------------------------------------------------------------------


def record(**fields: Any) -> bytes:
    return json.dumps({"pid": os.getpid(), "user": "mallory", **fields}).encode()


RECORDS = {
    "empty": b"",
    "truncated": b'{"pid": 12, "user": "al',
    "not UTF-8": b'{"user": "\xff\xfe"}',
    "too long": b'{"pid": 12, "note": "' + b"x" * 2_000_000 + b'"}',
    "deeply nested": b"[" * 4000,
    "list": b"[1, 2]",
    "infinite numbers": b'{"pid": 1e999, "since": -Infinity, "user": NaN}',
    "long number": b'{"pid": ' + b"9" * 4000 + b"}",
    "wrong types": b'{"pid": "12", "user": 7, "notebook": [], "note": {}, "since": "now"}',
    "more wrong types": b'{"pid": true, "user": null, "namespace": [], "since": {}, "seen": 1}',
    "negative numbers": record(pid=-1, since=-1e300),
    "future": record(since=9e10),
    "control characters": record(user="\x1b[31mred\x07\x00", note="\x1b]0;title\x07"),
    "extra line": record(notebook="a.ipynb\n  GPU1: free\r\u2028\x85GPU0: free"),
    "half a surrogate": b'{"user": "\\ud800", "note": "\\udfff"}',
    "long texts": record(user="u" * 900, notebook="n" * 900, note="o" * 900),
    "hostile command": record(command="python\n  GPU1: free\x1b[31m" + "x" * 900, cwd=[1]),
}


@pytest.mark.parametrize("content", RECORDS.values(), ids=RECORDS)
@whole_and_shared
def test_an_untrusted_record_is_shown_as_one_plain_line(
    two: Here, content: bytes, *, memory: str | None
) -> None:
    """Whatever a record contains, the PID comes from the kernel, and the text is short and safe."""
    path = lock_file(two, memory=memory)
    with have(path, content):
        text = refused("0")
        assert got() == "1"
        assert path.read_bytes() == content
    line = of_gpu(text)
    assert f"pid {os.getpid()}" in line
    assert line.isprintable()
    assert len(line) < 300
    assert "GPU1: free" not in text.split("\n")


def test_a_record_cannot_name_another_process_or_user(two: Here) -> None:
    """The PID and user of a holder come from the kernel, whatever the record says."""
    with have(two.locks / GPU0, record(pid=1, user="mallory", note="ends at noon")):
        line = of_gpu(refused("0"))
    assert f" (pid {os.getpid()})" in line
    assert "mallory" not in line
    assert line.endswith(': "ends at noon"')


@whole_and_shared
def test_a_record_in_an_unlocked_file_reserves_nothing(two: Here, *, memory: str | None) -> None:
    """A GPU is free if its file is not locked, whatever a process has written there."""
    lock_file(two, memory=memory).write_bytes(record(pid=os.getppid()))
    assert got() == "0"


def test_a_record_is_readable_while_the_lock_is_held(two: Here) -> None:
    """The lock file contains the holder as JSON, and is empty after the release."""
    reserve_gpu.reserve(note="x" * 5000)
    written = json.loads((two.locks / GPU0).read_bytes())
    assert written["pid"] == os.getpid()
    assert 100 < len(written["note"]) < 1000
    reserve_gpu.release()
    assert (two.locks / GPU0).read_bytes() == b""


def test_a_shorter_record_replaces_a_longer_one(two: Here) -> None:
    """A shorter record covers all of a longer one, and the file does not shrink meanwhile."""
    with LockDirectory(str(two.locks)) as directory, directory.mutex():
        lock = directory.acquire("0.lock")
        assert lock
        for note in ("long " * 20, "short"):
            lock.write(Record(terms=ReservationTerms(note=note)))
            assert read_record(lock.descriptor).terms.note == note
        size = os.fstat(lock.descriptor).st_size
        lock.write(Record(terms=ReservationTerms(note="x")))
        assert os.fstat(lock.descriptor).st_size == size
        lock.release()


@pytest.mark.parametrize("letter", ["a", "\U0001f680", "\udc80"], ids=ascii)
def test_a_record_with_long_texts_is_read(two: Here, letter: str) -> None:
    """A ticket is read however many bytes its texts take, with all tickets that it lists."""
    long = 300 * letter
    who = ProcessInfo(None, long, long, long, long, long, None, long, long, long)
    names = (f"queue-4294967294-{number}.lock" for number in range(512))
    before = "\n".join(sorted(str(TicketAhead(name, 10**18, 1e9)) for name in names))
    wanted = frozenset(f"{UUIDS[0][:-3]}{number:03}" for number in range(128))
    asks = WaitRequest(long, 2, wanted, before)
    with LockDirectory(str(two.locks)) as directory, directory.mutex():
        lock = directory.acquire("0.lock")
        assert lock
        lock.write(Record(who, ReservationTerms(note=long), asks, label="GPU0"))
        read = read_record(lock.descriptor)
        lock.release()
    assert read.asks
    assert read.asks[1:] == asks[1:]
    assert {len(text) for text in (*read.who[1:6], read.terms.note) if text} <= {150, 300}
    assert read.label == "GPU0"


# -- holders ---------------------------------------------------------------------------------------


def test_a_process_younger_than_the_lock_is_not_its_holder() -> None:
    """If a later process has the PID of a holder that has ended, it is not named as the holder."""
    holders = Holders("/", files.NONE)
    assert holders.keeper(os.getpid(), os.stat("/usr/bin/env")) is None


def test_a_process_without_the_file_is_not_its_holder(tmp_path: Path) -> None:
    """The holder is the process that has the file open, even if the file is newer than the PID."""
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with have(path):
            path.touch()
            holders = Holders(str(tmp_path), files.NONE)
            assert holders.keeper(other.pid, path.stat()) == os.getpid()
        holders = Holders(str(tmp_path), files.NONE)
        assert holders.keeper(other.pid, path.stat()) is None


def test_a_second_name_of_a_lock_file_has_no_listed_holder(two: Here) -> None:
    """A holder is not listed for a GPU whose lock file is a link to that of another GPU."""
    assert got("0") == "0"
    (two.locks / GPU1).hardlink_to(two.locks / GPU0)
    with LockDirectory() as directory:
        listed = [len(directory.listed_holders_of(uuid)) for uuid in UUIDS]
    assert listed == [1, 0]


# -- the mutex -------------------------------------------------------------------------------------


def test_a_mutex_that_is_held_too_long_is_an_error(two: Here) -> None:
    """After the limit, the error names the process that holds the mutex."""
    expected = pytest.raises(MutexHeldError, match=rf"process {os.getpid()} of \w+")
    with LockDirectory() as first, LockDirectory() as second, first.mutex(), expected:
        second.mutex(limit_s=0.05).__enter__()


def test_a_request_with_an_elapsed_timeout_still_waits_for_the_mutex(two: Here) -> None:
    """A request with `wait=0` waits for a mutex that is released within a second."""
    with LockDirectory() as first:
        mutex = first.mutex()
        mutex.__enter__()
        timer = threading.Timer(0.1, mutex.__exit__, (None, None, None))
        timer.start()
        assert got(wait=0) == "0"
        timer.join()


def test_a_failed_reservation_releases_the_mutex(two: Here) -> None:
    """The mutex is free after any error of a reservation."""
    with have(two.locks / GPU0):
        refused("0")
        assert locked(two.locks) == {GPU0}
    with pytest.raises(reserve_gpu.ImpossibleError):
        reserve_gpu.reserve(count=9)
    with LockDirectory() as directory, pytest.raises(ZeroDivisionError), directory.mutex():
        raise ZeroDivisionError
    assert locked(two.locks) == set()


# -- descriptors -----------------------------------------------------------------------------------


def close_the_lock(here: Here) -> int:
    """Close the descriptor of GPU 0's lock, as other code might do, and return its number."""

    def is_of_gpu0(number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), (here.locks / GPU0).stat())
        except OSError:  # another test has closed it
            return False

    number = next(filter(is_of_gpu0, files._opened))
    os.close(number)
    return number


def test_a_reused_descriptor_of_a_closed_lock_is_not_touched(two: Here) -> None:
    """If other code has closed a lock's descriptor, a new file with its number is not changed."""
    reserve_gpu.reserve("0", note="mine")
    before = (two.locks / GPU0).read_bytes()
    number = close_the_lock(two)
    letter = two.folder / "letter.txt"
    letter.write_text("dear all")
    opened_as = os.open(letter, os.O_RDWR)
    if opened_as != number:
        os.dup2(opened_as, number)
        os.close(opened_as)
    assert reserve_gpu.current() is None
    assert reserve_gpu.release() == ()
    assert letter.read_text() == "dear all"
    assert (two.locks / GPU0).read_bytes() == before
    os.close(number)  # fails if the release closed it
    assert variables() == {}


def test_a_lock_writes_only_into_its_own_file(two: Here) -> None:
    """A lock whose descriptor now belongs to another file does not write to or touch that file."""
    letter = two.folder / "letter.txt"
    letter.write_text("dear all")
    before = letter.stat().st_mtime_ns
    with LockDirectory() as directory:
        lock = directory.acquire("a.lock")
    assert lock
    with letter.open("r+") as file:
        os.dup2(file.fileno(), lock.descriptor)
    number = lock.descriptor
    lock.write(Record(terms=ReservationTerms(note="mine")))
    lock.stamp()
    lock.release()
    assert (letter.read_text(), letter.stat().st_mtime_ns) == ("dear all", before)
    os.close(number)


def test_a_lock_that_other_code_has_closed_is_acquired_again(two: Here) -> None:
    """The next call acquires a lock again that other code has closed, and warns."""
    reservation = reserve_gpu.reserve("0")
    close_the_lock(two)
    assert held(two) == []
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        assert reserve_gpu.reserve() is reservation
    (warning,) = texts(caught)
    assert "GPU0" in warning
    assert str(two.locks) not in warning  # the file was not deleted
    assert held(two) == [0]
    close_the_lock(two)
    with two.rival("0"), pytest.raises(LockError, match=f"pid {os.getpid()}"):
        reserve_gpu.reserve()
