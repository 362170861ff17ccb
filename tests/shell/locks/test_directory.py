"""The lock directory: its files, obstacles in their places, records, and lost locks."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
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
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.model.requests import ReservationTerms, TicketAhead, WaitRequest
from tests.support.locked import (
    MUTEX,
    SHARER,
    have,
    held,
    is_locked,
    obstacles,
    obstructed,
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


# -- the directory ---------------------------------------------------------------------------------


def link_to_a_folder(path: Path) -> None:
    folder = path.with_name("elsewhere")
    folder.mkdir()
    path.symlink_to(folder)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(link_to_a_folder, id="link"),
        pytest.param(lambda path: path.write_bytes(b"years"), id="file"),
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


@pytest.mark.parametrize(
    ("memory", "other"),
    [(None, "holder"), (None, "sharer"), ("1GB", "holder")],
)
def test_a_lock_that_another_process_has_acquired_is_lost(
    two: Here, other: str, *, memory: str | None
) -> None:
    """If another process locks the new file of a deleted lock, the old holder gets an error."""
    reservation = reserve_gpu.reserve("0", memory=memory)
    before = variables()
    path = lock_file(two, memory=memory)
    path.unlink()
    with two.rival("0", **SHARER if other == "sharer" else {}):
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


# -- records ---------------------------------------------------------------------------------------


def record(**fields: Any) -> bytes:
    return json.dumps({"pid": os.getpid(), "user": "mallory", **fields}).encode()


RECORDS = {
    "truncated": b'{"pid": 12, "user": "al',
    "deeply nested": b"[" * 4000,
    "wrong types": b'{"pid": "12", "user": 7, "notebook": [], "note": {}, "since": "now"}',
    "control characters": record(user="\x1b[31mred\x07\x00", note="\x1b]0;title\x07"),
    "extra line": record(notebook="a.ipynb\n  GPU1: free\r\u2028\x85GPU0: free"),
    "long texts": record(user="u" * 900, notebook="n" * 900, note="o" * 900),
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


def test_a_record_with_long_texts_is_read(two: Here) -> None:
    """A ticket is read however many bytes its texts take, with all tickets that it lists."""
    long = 300 * "\U0001f680"
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


# -- descriptors -----------------------------------------------------------------------------------


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
