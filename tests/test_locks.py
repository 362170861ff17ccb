"""The lock directory and its files: what may stand in their place, and be written in them."""

from __future__ import annotations

import errno
import json
import os
import platform
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
from reserve_gpu.locks.directory import MUTEX, LockDirectory, _mutex_message
from reserve_gpu.locks.holders import Holders
from reserve_gpu.locks.lock import kernel_device, read_record
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import LockError, MutexHeldError
from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.model.requests import ReservationTerms, TicketAhead, WaitRequest
from reserve_gpu.render import notices
from tests.locked import (
    OBSTACLES,
    have,
    held,
    is_locked,
    locked,
    obstacles,
    obstructed,
    opened,
    texts,
    watched,
)
from tests.machine import TAKE_THE_MUTEX, Child, Machine
from tests.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.here import Here

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
GPU0 = f"{UUIDS[0]}.lock"
SHARER: dict[str, Any] = {"part_mib": 1024}
SHARED = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


@pytest.fixture
def two(here: Here) -> Here:
    """Make two idle GPUs of known UUIDs, and an empty lock directory."""
    here.write(SCENARIO)
    here.locks.mkdir()
    here.locks.chmod(0o1777)
    return here


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


# -- what may stand in the place of a file --------------------------------------------------------


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


# The interpreter calls the hook when the file was not there a moment ago and is to be made.
MADE_MEANWHILE = """
from reserve_gpu.locks.directory import LockDirectory
def hook(event, arguments):
    if event == "open" and arguments[0] == "a.lock" and arguments[2] & os.O_EXCL:
        with open(os.path.join(directory.path, "a.lock"), "w"):
            pass
sys.addaudithook(hook)
with LockDirectory() as directory:
    lock = directory.acquire("a.lock")
lock.held()
"""


@pytest.mark.process
def test_a_file_that_somebody_makes_meanwhile(machine: Machine) -> None:
    """Of two who find no lock file and make it, the second one takes the first one's."""
    with machine.child() as child:
        assert child.run(MADE_MEANWHILE).value is True


@pytest.mark.promise
@pytest.mark.process
def test_the_file_of_a_killed_holder_is_used_again(two: Here) -> None:
    """What a holder that was killed has left is taken by the next one, under the same name."""
    with two.child() as child:
        assert child.reserve().value == "0"
        before = inodes(two.locks)
        assert held(two) == [0]
    assert held(two) == []
    assert (two.locks / GPU0).read_bytes()  # who it was is still written there
    assert got() == "0"
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


@pytest.mark.process
def test_who_has_locked_a_file_another_way_is_no_holder(two: Here) -> None:
    """A process that has a lock file locked by lockf(3), which holds nothing, is not named."""
    with two.child() as child, LockDirectory(str(two.locks)) as directory:
        path = two.locks / "0.lock"
        path.touch()
        child.run(f"import fcntl; file = open({str(path)!r}, 'r+')")
        child.run("fcntl.lockf(file, fcntl.LOCK_EX)")
        with directory.mutex():
            assert not directory.holders.lists("0.lock")
        child.run("fcntl.lockf(file, fcntl.LOCK_UN); fcntl.flock(file, fcntl.LOCK_EX)")
        with directory.mutex():
            assert directory.holders.lists("0.lock")


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


# -- file systems ---------------------------------------------------------------------------------

MOUNTS = {
    "ro": "-o size=1m,mode=1777",
    "used": "-o size=1m,mode=1777",
    "full": "-o size=8k,mode=1777",
    "inodes": "-o nr_inodes=1,mode=1777",
    "lower": "-o mode=0755",
    "upper": "-o mode=0755",
}


def needs_mounts() -> None:
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounts need root, and a system that allows them")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Make a child that alone sees some file systems, in the folders of MOUNTS."""
    needs_mounts()
    machine = Machine(tmp_path_factory.mktemp("mounted"))
    machine.write(SCENARIO)
    lines = [f"mkdir {name}; mount -t tmpfs {how} none {name}" for name, how in MOUNTS.items()]
    files = " ".join(f"used/{name}.lock" for name in (*UUIDS, "mutex"))
    lines += [
        f"touch {files}; chmod 666 {files}",
        "mount -o remount,ro ro; mount -o remount,ro used; head -c 8192 /dev/zero >full/full",
        "mkdir lower/l upper/u upper/w overlay",
        (
            "mount -t overlay -o lowerdir=lower/l,upperdir=upper/u,workdir=upper/w,xino=off none "
            "overlay || touch no-overlay"
        ),
    ]
    script = "\n".join(["set -e", *lines, 'exec "$@"'])
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
    child = Child(machine.environ(), machine.folder, *prefix)
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def locks_in(child: Child, name: str) -> Iterator[None]:
    """Have the child use a folder for its locks."""
    child.run(f"os.environ['RESERVE_GPU_LOCK_DIR'] = os.path.abspath({name!r})")
    yield
    assert child.run("reserve_gpu.release()").error is None


@pytest.mark.process
@pytest.mark.parametrize(
    ("folder", "code"), [("ro", errno.EROFS), ("used", errno.EROFS), ("inodes", errno.ENOSPC)]
)
def test_a_directory_that_takes_no_lock_is_an_error(mounted: Child, folder: str, code: int) -> None:
    """On a read-only file system, or where no file can be made, nothing is reserved; it is said."""
    with locks_in(mounted, folder):
        refused = mounted.reserve()
        assert mounted.visible() is None
    assert refused.error == "LockError"
    assert f"/{folder}" in refused.text
    assert os.strerror(code) in refused.text


@pytest.mark.process
def test_a_full_lock_directory_loses_the_record_not_the_lock(mounted: Child) -> None:
    """Where no byte more can be written the lock holds, and the kernel names the holder."""
    ask = (
        "import subprocess; subprocess.run([sys.executable, '-c', "
        "'import reserve_gpu; reserve_gpu.reserve(0)'], stderr=subprocess.PIPE, text=True, "
        "env={k: v for k, v in os.environ.items() if not k.startswith('CUDA')}).stderr"
    )
    with locks_in(mounted, "full"):
        assert mounted.reserve().value == "0"
        text = mounted.run(ask).value
    assert "NoFreeDeviceError" in text
    assert f"pid {mounted.pid}" in text


@pytest.mark.process
def test_where_stat_and_the_list_of_locks_differ(mounted: Child) -> None:
    """On a file system that the kernel's list calls by another number a holder is found in it."""
    if mounted.run("os.path.exists('no-overlay')").value:
        pytest.skip("this system allows no overlay")
    look = """
from reserve_gpu.locks.directory import LockDirectory, lock_name
from reserve_gpu.locks.lock import kernel_device
uuid = reserve_gpu.current().devices[0].uuid
with LockDirectory() as directory:
    with directory.mutex():
        holders = directory.holders_of(uuid)
    missing = directory.unlisted(["mutex.lock", *(h.file for h in holders)])  # as who waits asks
    number = os.stat(directory.path + "/mutex.lock").st_dev
    lock = directory.acquire("another.lock")
    called = kernel_device(lock.descriptor)
    lock.release()
device = f"{os.major(number):02x}:{os.minor(number):02x}"
[[(h.pid, h.seen) for h in holders], list(missing), called, device]
"""
    with locks_in(mounted, "overlay"):
        for memory in (None, "1GB"):
            assert mounted.reserve(f"0, memory={memory!r}").value == "0"
            holders, missing, called, number = mounted.run(look).value
            assert called != number
            assert missing == ["mutex.lock"]
            assert holders == [[mounted.pid, True]]


def test_the_list_of_locks_calls_a_file_system(tmp_path: Path) -> None:
    """What the kernel calls the file system of a locked file stands in its list of locks."""
    with have(tmp_path / "a.lock") as descriptor:
        device = kernel_device(descriptor)
        expected = f" {os.getpid()} {device}:{os.fstat(descriptor).st_ino} "
        assert expected in Path("/proc/locks").read_text()
    with (tmp_path / "a.lock").open() as file:
        assert kernel_device(file.fileno()) is None


# A filter that lets the kernel answer flock(2) in this process as a file system without it does:
# https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html. The last one counts.
WITHOUT_FLOCK = """
import ctypes, struct
refuse, allow = (0x06, 0, 0, 0x50000 | {code}), (0x06, 0, 0, 0x7FFF0000)
lines = (0x20, 0, 0, 0), (0x15, 0, 1, {number}), refuse, allow
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0)
"""
FLOCK = {"x86_64": 73, "aarch64": 32}


@pytest.mark.process
@pytest.mark.skipif(platform.machine() not in FLOCK, reason="only on x86-64 and 64-bit ARM")
def test_a_file_system_without_flock_is_an_error(machine: Machine) -> None:
    """Where files can't be locked nothing is reserved, and the way out is named."""
    with machine.child() as child:
        for code in (errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS):
            number = FLOCK[platform.machine()]
            if child.run(WITHOUT_FLOCK.format(number=number, code=code)).value != 0:
                pytest.skip("this system allows no seccomp filter")
            refused = child.reserve()
            assert child.visible() is None
            assert refused.error == "LockError"
            assert (
                f"{machine.locks}/mutex.lock can't be locked: {os.strerror(code)}" in refused.text
            )
            assert "Put the lock directory on a local file system" in refused.text


# Modes of /run/lock, /dev/shm and /tmp, and where the locks go.
PLACES = [
    ("1777 1777 1777", "/run/lock/reserve_gpu"),
    ("0755 1777 1777", "/dev/shm/reserve_gpu"),
    ("0777 1777 1777", "/dev/shm/reserve_gpu"),  # not sticky: anybody could delete what is there
    ("1775 0755 1777", "/tmp/reserve_gpu"),
    ("0755 0755 0755", None),
]
MOUNT = """
import subprocess
import pynvml
from reserve_gpu.locks.directory import LockDirectory, default_path
for path in ("/run", "/dev/shm", "/tmp"):
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
os.mkdir("/run/lock")
del os.environ["RESERVE_GPU_LOCK_DIR"]
def at(modes):
    for path, mode in zip(("/run/lock", "/dev/shm", "/tmp"), modes.split()):
        os.chmod(path, int(mode, 8))
    return default_path()
"""


@pytest.mark.process
def test_the_default_directory_is_where_all_may_write(machine: Machine) -> None:
    """The first of the common places that is world-writable and sticky is taken, if one is."""
    needs_mounts()
    child = Child(machine.environ(), machine.folder, "unshare", "--mount")
    try:
        assert child.run(MOUNT).error is None
        for places, expected in PLACES:
            answer = child.run(f"at({places!r})")
            assert answer.value == expected
            assert (answer.error == "LockError") == (expected is None)
            assert expected or "RESERVE_GPU_LOCK_DIR" in answer.text
        assert child.run("at('1777 1777 1777'); os.listdir('/run/lock')").value == []
        child.run("with LockDirectory() as directory: directory.acquire('a.lock')")
        made = child.run("[oct(os.stat('/run/lock/reserve_gpu').st_mode), os.listdir('/run/lock')]")
        assert made.value == ["0o41777", ["reserve_gpu"]]
        configured = "os.environ['RESERVE_GPU_LOCK_DIR'] = '/else'; default_path()"
        assert child.run(configured).value == "/else"
    finally:
        child.kill()


# -- files that somebody deletes or replaces ------------------------------------------------------


def the_file(here: Here, *, memory: str | None) -> Path:
    """Return the file that the holder of GPU 0 has locked."""
    return here.locks / (f"{UUIDS[0]}.share-{os.geteuid()}-0.lock" if memory else GPU0)


def replace(path: Path) -> None:
    draft = path.with_name("draft")
    draft.touch()
    draft.replace(path)


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


@pytest.mark.process
def test_a_lock_that_another_process_takes_over(two: Here) -> None:
    """The process that has taken a GPU meanwhile is named by its pid."""
    reserve_gpu.reserve("0")
    (two.locks / GPU0).unlink()
    with two.child() as other:
        assert other.reserve("0").value == "0"
        with pytest.raises(LockError, match=rf"\(pid {other.pid}\)"):
            reserve_gpu.reserve()


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


# -- the lock decides -----------------------------------------------------------------------------


@pytest.mark.process
@SHARED
def test_what_the_list_of_locks_says_decides_nothing(two: Here, *, memory: str | None) -> None:
    """Who has a GPU is asked of its lock, whatever the kernel's list leaves out or still names.

    The list is no snapshot: while others lock and unlock it may miss some. A child sees ours.
    """
    needs_mounts()
    listed = two.folder / "locks.txt"
    listed.touch()
    script = f'mount --bind {listed} /proc/locks; exec "$@"'
    child = Child(two.environ(), two.folder, "unshare", "--mount", "sh", "-ec", script, "sh")
    look = "[(row.state.value, len(row.holders)) for row in reserve_gpu.status().rows]"
    try:
        assert child.run("open('/proc/locks').read()").value == ""
        with two.rival("0", **SHARER if memory else {}):
            assert child.reserve("0").error == "NoFreeDeviceError"
            assert child.run(look).value == [["reserved", 1], ["free", 0]]
            assert child.reserve().value == "1"
            child.run("reserve_gpu.release()")
            listed.write_text(Path("/proc/locks").read_text())
            assert f" {os.getpid()} " in listed.read_text()
        assert child.run(look).value == [["free", 0], ["free", 0]]
        assert child.reserve().value == "0"
    finally:
        child.kill()


# Finds holders and tickets, and checks how many bytes that reads.
LOOK = """
from reserve_gpu.locks.directory import LockDirectory
def read_bytes():
    return int(open('/proc/self/io').readline().split()[1])
def look():
    before = read_bytes()
    rows = [(row.state.value, len(row.holders)) for row in reserve_gpu.status().rows]
    with LockDirectory() as locks, locks.mutex():
        tickets = [ticket.name for ticket in locks.tickets()]
        own = [holder.pid for holder in locks.holders_by(os.geteuid(), {uuids!r})]
    with LockDirectory() as locks:
        kept = locks.are_listed([f"{uuid}.lock" for uuid in {uuids!r}[1:]], os.getpid())
        told = locks.unlisted([]) is not None
    return rows, tickets, own, kept, told, read_bytes() - before < 4 * 2**20
"""


@pytest.mark.process
@SHARED
def test_a_long_list_of_locks_is_read_up_to_a_limit(two: Here, *, memory: str | None) -> None:
    """If the kernel's list is too long, the locks and this user's open files name the holders.

    Every user can make the list long. The test counts the bytes that a look reads.
    """
    needs_mounts()
    listed = two.folder / "locks.txt"
    listed.write_text("1: POSIX  ADVISORY  WRITE 1 00:19:47 0 EOF\n" * 200_000)
    script = f'mount --bind {listed} /proc/locks; exec "$@"'
    child = Child(two.environ(), two.folder, "unshare", "--mount", "sh", "-ec", script, "sh")
    ticket = f"queue-{os.geteuid()}-0.lock"
    uuids = [two.uuid("0"), two.uuid("1")]
    try:
        assert child.run(LOOK.replace("{uuids!r}", repr(uuids))).error is None
        with two.rival("0", **SHARER if memory else {}), have(two.locks / ticket):
            assert child.reserve("0").error == "NoFreeDeviceError"
            assert child.reserve("1").value == "1"
            pid = child.run("os.getpid()").value
            rows, tickets, own, *rest = child.run("look()").value
            assert rows == [["reserved", 1], ["reserved", 1]]
            assert tickets == [ticket]
            assert pid in own
            assert rest == [True, False, True]
            child.run("reserve_gpu.release()")
            child.send("reserve_gpu.reserve('0', wait=30)")
        assert child.answer().error is None
        child.run("reserve_gpu.release()")
        rows, tickets, own, *rest = child.run("look()").value
        assert (rows, tickets, own) == ([["free", 0], ["free", 0]], [], [])
        assert rest == [False, False, True]
    finally:
        child.kill()


@pytest.mark.process
@SHARED
def test_a_lock_that_the_list_of_locks_does_not_show(two: Here, *, memory: str | None) -> None:
    """In a container, where the list shows no lock from outside, a GPU that is held is not free."""
    container = ("unshare", "--pid", "--mount-proc", "--kill-child")
    if os.geteuid() or subprocess.run([*container, "true"], check=False).returncode:
        pytest.skip("namespaces need root, and a system that allows them")
    with two.rival("0", **SHARER if memory else {}):
        child = Child(two.environ(), two.folder, *container)
        try:
            assert child.reserve("0").error == "NoFreeDeviceError"
            assert child.reserve().value == "1"
            with pytest.raises(AssertionError), two.rival("1", **SHARER if memory else {}):
                pass
        finally:
            child.kill()


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


# -- the mutex ------------------------------------------------------------------------------------


def test_who_waits_too_long_for_the_mutex_is_told_who_has_it(two: Here) -> None:
    """The mutex is waited for up to a limit; the error names the process that has it."""
    expected = pytest.raises(MutexHeldError, match=rf"process {os.getpid()} of \w+")
    with LockDirectory() as first, LockDirectory() as second, first.mutex(), expected:
        second.mutex(limit_s=0.05).__enter__()


@pytest.mark.parametrize(("waited_s", "is_hanging"), [(0.1, False), (9.9, False), (30, True)])
def test_only_who_has_waited_for_long_reads_of_a_driver_that_hangs(
    waited_s: float, *, is_hanging: bool
) -> None:
    """Others who reserve for a moment are no sign of a driver that hangs."""
    text = _mutex_message(os.getpid(), waited_s)
    assert f"in progress for {waited_s:.0f} s; process {os.getpid()} of" in text
    assert "is making the current one." in text
    assert ("the NVIDIA driver has hung" in text) is is_hanging


def test_who_is_late_waits_a_second_for_the_mutex(two: Here) -> None:
    """Who may wait no longer for anything else gets a mutex that is free within a second."""
    with LockDirectory() as first:
        held = first.mutex()
        held.__enter__()
        timer = threading.Timer(0.1, held.__exit__, (None, None, None))
        timer.start()
        assert got(wait=0) == "0"
        timer.join()


@pytest.mark.promise
@pytest.mark.process
def test_the_mutex_of_a_killed_process_is_free(machine: Machine) -> None:
    """Who waits for the mutex gets it when its holder is killed with -9."""
    with machine.child() as holder, machine.child() as waiter:
        assert holder.run(TAKE_THE_MUTEX).error is None
        waiter.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        holder.kill()
        assert waiter.answer().value == "0"


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
