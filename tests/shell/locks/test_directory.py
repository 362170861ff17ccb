"""The lock directory and its files: what may stand in their place, and be written in them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import MUTEX, LockDirectory
from reserve_gpu.locks.lock import read_record
from reserve_gpu.model.errors import LockError, MutexHeldError
from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.model.requests import ReservationTerms, TicketAhead, WaitRequest
from reserve_gpu.render import notices
from tests.support.locked import (
    OBSTACLES,
    have,
    held,
    is_locked,
    locked,
    obstructed,
    opened,
    texts,
)
from tests.support.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.here import Here

from typing import TYPE_CHECKING

from reserve_gpu.model.devices import State
from tests.support.directory import inodes, replace
from tests.support.locked import (
    obstacles,
)

if TYPE_CHECKING:
    from tests.support.here import Here


UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
GPU0 = f"{UUIDS[0]}.lock"
SHARER: dict[str, Any] = {"part_mib": 1024}
SHARED = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.fixture
def two(here: Here) -> Here:
    """Make two idle GPUs of known UUIDs, and an empty lock directory."""
    here.write(SCENARIO)
    here.locks.mkdir()
    here.locks.chmod(0o1777)
    return here


@pytest.mark.parametrize(("name", "error"), [(GPU0, "NoFreeDeviceError"), (MUTEX, "LockError")])
def test_the_magic_shows_no_traceback(two: Here, name: str, error: str) -> None:
    """In a notebook each obstacle in place of a lock or of the mutex is a short message."""
    shell = two.shell()
    for obstacle in OBSTACLES:
        if obstacle == "device node" and os.geteuid():
            continue
        with obstructed(two.locks / name, obstacle):
            cell = shell.run("%reserve_gpu 0")
        assert cell.error == error, f"{obstacle}: {cell.traceback}"
        lines = "\n".join(cell.traceback)
        assert "Traceback" not in lines
        assert ".py" not in lines


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o777], ids=oct)
def test_files_are_for_all_whatever_the_umask(two: Here, umask: int) -> None:
    """Lock files have mode 0666, the directory 1777, files of one user 0644, whatever the umask."""
    two.locks.rmdir()
    two.log.touch()  # the driver's, which is not to be missing permissions either
    before = os.umask(umask)
    try:
        assert got(count=2) == "0,1"
        assert got("0", memory="1GB") == "0"
    finally:
        os.umask(before)
    assert stat.S_IMODE(two.locks.stat().st_mode) == 0o1777
    own = [f"{uuid}.record-{os.geteuid()}-0" for uuid in UUIDS]
    own.append(f"{UUIDS[0]}.share-{os.geteuid()}-0.lock")
    all_ = dict.fromkeys((MUTEX, *(f"{uuid}.lock" for uuid in UUIDS)), 0o666)
    assert modes(two.locks) == {**all_, **dict.fromkeys(own, 0o644)}


def test_files_are_never_deleted(two: Here) -> None:
    """The files of a lock and of the mutex stay the same through release and reservation."""
    reserve_gpu.reserve()
    before = inodes(two.locks)
    for _ in range(2):
        reserve_gpu.release()
        assert inodes(two.locks) == before
        reserve_gpu.reserve()
        assert inodes(two.locks) == before


@pytest.mark.parametrize(("mode", "is_sole"), [(0o644, True), (0o664, False), (0o646, False)])
def test_a_file_that_others_may_write_to_says_nothing_of_its_owner(
    two: Here, mode: int, *, is_sole: bool
) -> None:
    """A user's own lock file counts as theirs only if nobody else, no group either, can write."""
    (two.locks / "own.lock").touch()
    (two.locks / "own.lock").chmod(mode)
    with LockDirectory(str(two.locks)) as directory:
        owner = files.sole_owner(directory.descriptor, "own.lock")
    assert owner == (os.geteuid() if is_sole else None)


def test_a_mode_that_somebody_has_chosen_stays(two: Here) -> None:
    """A lock file that its owner has opened to a group only is not opened to all."""
    got("0")
    path = two.locks / f"{two.uuid('0')}.lock"
    path.chmod(0o660)
    reserve_gpu.release()
    assert got("0") == "0"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def test_a_link_in_place_of_a_lock_is_not_that_lock(two: Here) -> None:
    """A lock whose file was moved, with a link in its place, keeps nobody off: none follows it."""
    with LockDirectory(str(two.locks)) as directory, directory.mutex():
        lock = directory.acquire("0.lock")
        assert lock
        assert lock.is_valid()
        (two.locks / "0.lock").rename(two.locks / "moved.lock")
        (two.locks / "0.lock").symlink_to("moved.lock")
        assert not lock.is_valid()
        lock.release()


def test_the_kernels_list_names_no_holder_by_a_second_name(two: Here) -> None:
    """A holder is not listed for a GPU whose lock file is a link to that of another GPU."""
    assert got("0") == "0"
    (two.locks / f"{UUIDS[1]}.lock").hardlink_to(two.locks / GPU0)
    with LockDirectory() as directory:
        listed = [len(directory.listed_holders_of(uuid)) for uuid in UUIDS]
    assert listed == [1, 0]


def test_a_shorter_record_covers_a_longer_one(two: Here) -> None:
    """Nobody reads the end of an older record behind a newer one, while that is written either."""
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


@pytest.mark.parametrize("letter", ["a", "\u8bad", "\U0001f680", "\udc80"])
def test_a_record_with_long_texts_is_read(two: Here, letter: str) -> None:
    """A ticket counts however many bytes its texts take, and keeps the names of all before it."""
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


# -- the directory --------------------------------------------------------------------------------


def link_to_elsewhere(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir()
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(link_to_elsewhere, "is a symbolic link, or not a directory", id="link"),
        pytest.param(lambda path: path.symlink_to("no"), "is a symbolic link", id="dangling link"),
        pytest.param(
            lambda path: path.write_bytes(b"years"), "is a symbolic link, or not a", id="file"
        ),
        pytest.param(os.mkfifo, "is a symbolic link, or not a directory", id="pipe"),
        pytest.param(lambda path: path.parent.rmdir(), "No such file", id="no parent"),
    ],
)
def test_a_lock_directory_that_is_none_is_an_error(
    here: Here, make: Callable[[Path], object], says: str
) -> None:
    """What is no directory, or a link to one, is left as it is; it and the way out are named."""
    parent = here.folder / "parent"
    parent.mkdir()
    path = parent / "locks"
    make(path)
    os.environ["RESERVE_GPU_LOCK_DIR"] = str(path)
    before = everything(parent)
    with pytest.raises(LockError) as caught:
        reserve_gpu.reserve()
    assert everything(parent) == before
    assert variables() == {}
    text = str(caught.value)
    assert str(path) in text
    assert says in text
    assert "Set RESERVE_GPU_LOCK_DIR to" in text
    assert (reserve_gpu.status().problem or "") == text


def everything(folder: Path) -> list[tuple[str, int, int]]:
    return [(p.name, p.lstat().st_mode, p.lstat().st_size) for p in sorted(folder.rglob("*"))]


def test_a_directory_where_anybody_can_delete_is_an_error(two: Here) -> None:
    """A directory open to all, without the sticky bit, is refused; how to mend it is said."""
    two.locks.chmod(0o777)
    with pytest.raises(LockError, match=f"any user can delete .* chmod 1777 {two.locks}"):
        reserve_gpu.reserve()
    assert modes(two.locks) == {}
    two.locks.chmod(0o1777)
    assert got() == "0"


def test_a_private_directory_stays_private(here: Here) -> None:
    """A directory that was made for another purpose serves as it is: its mode is not changed."""
    private = here.folder / "private"
    private.mkdir(mode=0o700)
    os.environ["RESERVE_GPU_LOCK_DIR"] = str(private)
    assert got() == "0"
    assert private.stat().st_mode & 0o7777 == 0o700


def test_a_relative_directory_is_refused(here: Here) -> None:
    """A relative lock directory, another one in every working directory, is an error."""
    os.environ["RESERVE_GPU_LOCK_DIR"] = "somewhere"
    with pytest.raises(LockError, match="'somewhere' must be an absolute path"):
        reserve_gpu.reserve()
    assert not (here.folder / "somewhere").exists()


def test_the_home_directory_is_understood(here: Here) -> None:
    """`~` stands for the home directory, and two spellings of a path mean one directory."""
    os.environ["RESERVE_GPU_LOCK_DIR"] = "~/locks/../locks//"
    assert got() == "0"
    os.environ["RESERVE_GPU_LOCK_DIR"] = str(here.home / "locks")
    assert got(count=2) == "0,1"  # what is held there counts as held


# -- files that somebody deletes or replaces ------------------------------------------------------


def the_file(here: Here, *, memory: str | None) -> Path:
    """Return the file that the holder of GPU 0 has locked."""
    return here.locks / (f"{UUIDS[0]}.share-{os.geteuid()}-0.lock" if memory else GPU0)


GONE: dict[str, Callable[[Path], object]] = {
    "file": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name("old")),
    "replaced": replace,
    "directory": lambda path: shutil.rmtree(path.parent),
}
RELOCKED = "The lock file of GPU0 ({path}) was deleted or replaced. GPU0 has been locked again"


@pytest.mark.parametrize("gone", GONE)
@SHARED
def test_a_deleted_lock_frees_nothing(two: Here, gone: str, *, memory: str | None) -> None:
    """Whose lock file was deleted or replaced locks the new one at its next call, and says so."""
    reservation = reserve_gpu.reserve("0", memory=memory, note="mine")
    path = the_file(two, memory=memory)
    GONE[gone](path)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        assert reserve_gpu.reserve("0", memory=memory) is reservation
    assert texts(caught) == [
        f"{RELOCKED.format(path=path)}, and is still reserved for this kernel."
    ]
    assert is_locked(path)
    assert json.loads(path.read_bytes())["note"] == "mine"
    assert stat.S_IMODE(two.locks.stat().st_mode) == 0o1777
    with pytest.raises(AssertionError), two.rival("0"):
        pass
    assert (reserve_gpu.current(), variables()["CUDA_VISIBLE_DEVICES"]) == (reservation, "0")
    reserve_gpu.reserve("0", memory=memory)  # it is said once
    reserve_gpu.release()
    assert held(two) == []


@SHARED
def test_a_deleted_lock_is_locked_anew_by_the_next_cell(two: Here, *, memory: str | None) -> None:
    """At the end of any cell a lock whose file was deleted is locked anew, and a line says so."""
    shell = two.shell()
    shell.run(f"%reserve_gpu 0 {'--memory 1GB' if memory else ''}")
    path = the_file(two, memory=memory)
    with opened(MUTEX) as times:
        assert shell.run("1").stdout == shell.run("1").stderr == ""
    assert times == []  # as long as nothing is amiss nobody else is held up
    path.unlink()
    cell = shell.run("x = 1")
    assert RELOCKED.format(path=path) in cell.stdout + cell.stderr
    assert held(two) == [0]
    cell = shell.run("x = 2")
    assert cell.stdout + cell.stderr == ""


@pytest.mark.parametrize(
    ("then", "left"),
    [({"devices": "0,1"}, [0, 1]), ({"devices": "0"}, [0]), ({"devices": "1"}, [1])],
)
def test_one_of_several_is_locked_anew(two: Here, then: dict[str, Any], left: list[int]) -> None:
    """Of several locks the one whose file was deleted is taken anew, whatever is asked for next."""
    reserve_gpu.reserve("0,1")
    two_inode = (two.locks / f"{UUIDS[1]}.lock").stat().st_ino
    (two.locks / GPU0).unlink()
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="The lock file of GPU0") as caught:
        reserve_gpu.reserve(**then)
    assert len(texts(caught)) == 1
    assert held(two) == left
    assert (two.locks / f"{UUIDS[1]}.lock").stat().st_ino == two_inode


def test_asking_for_more_locks_anew_as_well(two: Here) -> None:
    """Who asks for one more GPU keeps the first, also where its lock file was deleted."""
    reserve_gpu.reserve("0")
    (two.locks / GPU0).unlink()
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="The lock file of GPU0"):
        assert got("0,1") == "0,1"
    assert held(two) == [0, 1]


@pytest.mark.parametrize(
    ("memory", "other"),
    [
        (None, "holder"),
        (None, "sharer"),
        (None, "stranger"),
        ("1GB", "holder"),
        ("1GB", "stranger"),
    ],
)
def test_what_another_has_locked_meanwhile_is_lost(
    two: Here, other: str, *, memory: str | None
) -> None:
    """Who has the new file of a deleted lock has the GPU: its old holder is told who that is."""
    reservation = reserve_gpu.reserve("0", memory=memory)
    before = variables()
    path = the_file(two, memory=memory)
    path.unlink()
    whole = two.locks / GPU0
    taken = (
        have(whole)
        if other == "stranger"
        else two.rival("0", **SHARER if other == "sharer" else {})
    )
    with taken:
        for devices in (None, "0", "0,1"):
            with pytest.raises(LockError) as caught:
                reserve_gpu.reserve(devices, memory=memory)
            text = str(caught.value)
            assert f"The lock file of GPU0 ({path}) was deleted, and the device is now" in text
            assert f"(pid {os.getpid()})" in text
            assert variables() == before
        assert reserve_gpu.current() is reservation
        reservation.release()
        assert held(two) == [0]
    assert held(two) == []


def test_a_lost_lock_is_said_after_a_cell(two: Here) -> None:
    """Whose lock another process has by now is told at the end of the next cell."""
    shell = two.shell()
    shell.run("%reserve_gpu 0")
    (two.locks / GPU0).unlink()
    with two.rival("0"):
        cell = shell.run("x = 1")
    assert "the device is now reserved by" in cell.stdout + cell.stderr
    assert cell.error is None


# -- records --------------------------------------------------------------------------------------


def record(**said: Any) -> bytes:
    return json.dumps({"pid": os.getpid(), "user": "mallory", **said}).encode()


RECORDS = {
    "empty": b"",
    "truncated": b'{"pid": 12, "user": "al',
    "binary": bytes(range(256)),
    "huge": b'{"pid": 12, "note": "' + b"x" * 2_000_000 + b'"}',
    "deep": b"[" * 4000,
    "no object": b"[1, 2]",
    "numbers": b'{"pid": 1e999, "since": -Infinity, "user": NaN}',
    "long number": b'{"pid": ' + b"9" * 4000 + b"}",
    "wrong types": b'{"pid": "12", "user": 7, "notebook": [], "note": {}, "since": "now"}',
    "more wrong types": b'{"pid": true, "user": null, "namespace": [], "since": {}, "seen": 1}',
    "negative": record(pid=-1, since=-1e300),
    "the future": record(since=9e10),
    "control characters": record(user="\x1b[31mred\x07\x00", note="\x1b]0;title\x07"),
    "a line of its own": record(notebook="a.ipynb\n  GPU1: free\r\u2028\x85GPU0: free"),
    "bidirectional": record(notebook="\u202egpj.exe\u2066", note="\u200f\u061c"),
    "half a surrogate": b'{"user": "\\ud800", "note": "\\udfff"}',
    "markup": record(user="<script>alert(1)</script>", note="<img src=x onerror=alert(1)>"),
    "long": record(user="u" * 900, notebook="n" * 900, note="o" * 900),
    "a hostile command": record(command="python\n  GPU1: free\x1b[31m" + "x" * 900, cwd=[1]),
    "not UTF-8": b'{"user": "\xff\xfe"}',
}


@pytest.mark.parametrize("name", RECORDS)
@SHARED
def test_a_record_is_shown_safely_and_changes_nothing(
    two: Here, name: str, *, memory: str | None
) -> None:
    """Whatever a record says, the pid is the kernel's and the text a plain, short line."""
    path = the_file(two, memory=memory)
    with have(path, RECORDS[name]):
        text = refused("0")
        assert got() == "1"
        assert path.read_bytes() == RECORDS[name]
    line = of_gpu(text)
    assert f"pid {os.getpid()}" in line
    assert line.isprintable()
    assert len(line) < 300
    assert "GPU1: free" not in text.split("\n")


@pytest.mark.parametrize("is_true", [False, True])
def test_nothing_vouches_for_a_record(two: Here, *, is_true: bool) -> None:
    """The pid is the kernel's, whatever the record says, and no mark vouches for the rest of it."""
    with have(two.locks / GPU0, record(pid=os.getpid() if is_true else 1, note="ends at noon")):
        line = of_gpu(refused("0"))
    assert f" (pid {os.getpid()})" in line
    assert line.endswith(': "ends at noon"')
    assert "confirmed" not in line
    assert "word" not in line


def test_the_user_of_a_process_is_whom_the_system_names(two: Here) -> None:
    """A record can't put a reservation down to another user than the one whose process holds it."""
    with have(two.locks / GPU0, record(user="mallory")):
        text = refused("0")
    assert f"pid {os.getpid()}" in text
    assert "mallory" not in text


@SHARED
def test_a_record_without_a_lock_is_a_free_gpu(two: Here, *, memory: str | None) -> None:
    """What a dead holder left written, or somebody else wrote, reserves nothing."""
    the_file(two, memory=memory).write_bytes(record(pid=os.getppid()))
    assert got() == "0"


def test_a_record_is_readable_while_the_lock_is_held(two: Here) -> None:
    """The file names the holder, in JSON for whoever looks, and is empty once it is free."""
    reserve_gpu.reserve(note="x" * 5000)
    written = json.loads((two.locks / GPU0).read_bytes())
    assert written["pid"] == os.getpid()
    assert 100 < len(written["note"]) < 1000
    reserve_gpu.release()
    assert (two.locks / GPU0).read_bytes() == b""


# -- the mutex ------------------------------------------------------------------------------------


def test_who_waits_too_long_for_the_mutex_is_told_who_has_it(two: Here) -> None:
    """The mutex is waited for up to a limit; the error names the process that has it."""
    expected = pytest.raises(MutexHeldError, match=rf"process {os.getpid()} of \w+")
    with LockDirectory() as first, LockDirectory() as second, first.mutex(), expected:
        second.mutex(limit_s=0.05).__enter__()


def test_who_is_late_waits_a_second_for_the_mutex(two: Here) -> None:
    """Who may wait no longer for anything else gets a mutex that is free within a second."""
    with LockDirectory() as first:
        held = first.mutex()
        held.__enter__()
        timer = threading.Timer(0.1, held.__exit__, (None, None, None))
        timer.start()
        assert got(wait=0) == "0"
        timer.join()


def test_the_mutex_is_let_go_of_whatever_happens_under_it(two: Here) -> None:
    """A reservation that fails, in whatever way, leaves the mutex free."""
    with have(two.locks / GPU0):
        refused("0")
        assert locked(two.locks) == {GPU0}
    with pytest.raises(reserve_gpu.ImpossibleError):
        reserve_gpu.reserve(count=9)
    with LockDirectory() as directory, pytest.raises(ZeroDivisionError), directory.mutex():
        raise ZeroDivisionError
    assert locked(two.locks) == set()


# -- descriptors ----------------------------------------------------------------------------------


def close_the_lock(here: Here) -> int:
    """Close the descriptor of our lock of GPU 0, as other code may that closes all; its number."""
    number = next(n for n in files._opened if is_the_file(n, here.locks / GPU0))
    os.close(number)
    return number


def is_the_file(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except OSError:  # another test has closed it
        return False


def test_a_number_that_came_to_mean_another_file(two: Here) -> None:
    """After other code has closed all descriptors, what has their numbers is not touched."""
    reserve_gpu.reserve("0", note="mine")
    before = (two.locks / GPU0).read_bytes()
    number = close_the_lock(two)
    letter = two.folder / "letter.txt"
    letter.write_text("dear all")
    opened = os.open(letter, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    assert reserve_gpu.current() is None
    assert reserve_gpu.release() == ()
    assert letter.read_text() == "dear all"
    assert (two.locks / GPU0).read_bytes() == before
    os.close(number)  # it is still open
    assert variables() == {}


def test_a_lock_writes_into_its_own_file_alone(two: Here) -> None:
    """A lock whose number came to mean another file writes, stamps and empties nothing there."""
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


def test_a_lock_that_other_code_has_closed(two: Here) -> None:
    """What other code has closed is locked anew at the next call, and a warning says so."""
    reservation = reserve_gpu.reserve("0")
    close_the_lock(two)
    assert held(two) == []
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        assert reserve_gpu.reserve() is reservation
    assert texts(caught) == [notices.relocked(reservation.devices[0], None)]
    assert held(two) == [0]
    close_the_lock(two)
    with two.rival("0"), pytest.raises(LockError, match="the device is now reserved by"):
        reserve_gpu.reserve()


@obstacles
def test_an_obstacle_in_place_of_a_lock_costs_that_gpu_alone(two: Here, obstacle: str) -> None:
    """What is no lock file is neither followed nor written; it is named, its GPU skipped."""
    path = two.locks / GPU0
    with obstructed(path, obstacle):
        assert got() == "1"
        reserve_gpu.release()
        text = of_gpu(refused("0"))
        (row, _) = reserve_gpu.status().rows
    assert text.startswith((f"unknown: {path} is ", f"unknown: {path} can't be"))
    assert "link" not in obstacle or "is a symbolic link" in text
    assert row.state is State.UNKNOWN
    assert str(path) in (row.reason or "")


@obstacles
def test_an_obstacle_in_place_of_the_mutex_is_an_error(two: Here, obstacle: str) -> None:
    """What stands in place of the mutex stops a reservation, changes no variable, and is named."""
    path = two.locks / MUTEX
    with obstructed(path, obstacle), pytest.raises(LockError) as caught:
        reserve_gpu.reserve()
    assert str(path) in str(caught.value)
    assert variables() == {}
