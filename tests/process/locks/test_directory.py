"""The lock directory of several processes, on several file systems."""

from __future__ import annotations

import errno
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import MUTEX, SHARER, have, held, inodes, whole_and_shared
from tests.support.machine import TAKE_THE_MUTEX, TWO_GPUS, UUIDS, Child, Machine
from tests.support.platforms import CONTAINER, behind
from tests.support.reserving import got

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.support.here import Here

GPU0 = f"{UUIDS[0]}.lock"


@pytest.fixture
def two(here: Here) -> Here:
    """Make a machine with two idle GPUs of known UUIDs, and an empty lock directory."""
    here.write(TWO_GPUS)
    here.locks.mkdir()
    here.locks.chmod(0o1777)
    return here


# -- holders ---------------------------------------------------------------------------------------

# Creates a lock file between two steps of this process: its failed opening, and its creation.
CREATE_FIRST = """
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


def test_two_processes_that_create_a_lock_file_use_the_same_file(machine: Machine) -> None:
    """If another process creates the lock file first, that file is locked."""
    with machine.child() as child:
        assert child.run(CREATE_FIRST).value is True


@pytest.mark.promise
def test_the_file_of_a_killed_holder_is_used_again(two: Here) -> None:
    """The GPU of a killed holder is free, and its lock file, with the old record, is used again."""
    with two.child() as child:
        assert child.reserve().value == "0"
        before = inodes(two.locks)
        assert held(two) == [0]
    assert held(two) == []
    assert (two.locks / GPU0).read_bytes()
    assert got() == "0"
    assert inodes(two.locks) == before


@pytest.mark.promise
def test_the_mutex_of_a_killed_process_is_free(machine: Machine) -> None:
    """A process that waits for the mutex gets it when the holder is killed."""
    with machine.child() as holder, machine.child() as waiter:
        assert holder.run(TAKE_THE_MUTEX).error is None
        waiter.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        holder.kill()
        assert waiter.answer().value == "0"


# -- file systems ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Start a child with some file systems of its own, in three folders."""
    machine = Machine(tmp_path_factory.mktemp("mounted"))
    machine.write(TWO_GPUS)
    lines = [
        *(f"mkdir {name}; mount -t tmpfs -o mode=0755 none {name}" for name in ("lower", "upper")),
        "mkdir lower/l upper/u upper/w overlay",
        (
            "mount -t overlay -o lowerdir=lower/l,upperdir=upper/u,workdir=upper/w,xino=off none "
            "overlay || touch no-overlay"
        ),
    ]
    with behind(machine, "unshare", "--mount", script="\n".join(lines)) as child:
        yield child


@contextmanager
def lock_directory(child: Child, name: str) -> Iterator[None]:
    """Let the child use a folder as its lock directory."""
    child.run(f"os.environ['RESERVE_GPU_LOCK_DIR'] = os.path.abspath({name!r})")
    yield
    assert child.run("reserve_gpu.release()").error is None


def test_a_lock_on_a_full_disk_holds_without_a_record(mounted: Child) -> None:
    """If no record can be written, the lock still holds, and the kernel knows the holder's PID."""
    other = (
        "import subprocess; subprocess.run([sys.executable, '-c', "
        "'import reserve_gpu; reserve_gpu.reserve(0)'], stderr=subprocess.PIPE, text=True, "
        "env={k: v for k, v in os.environ.items() if not k.startswith('CUDA')}).stderr"
    )
    with lock_directory(mounted, "full"):
        assert mounted.reserve().value == "0"
        text = mounted.run(other).value
    assert "NoFreeDeviceError" in text
    assert f"pid {mounted.pid}" in text


READ_HOLDERS = """
from reserve_gpu.locks.directory import LockDirectory, lock_name
from reserve_gpu.locks.lock import kernel_device
uuid = reserve_gpu.current().devices[0].uuid
with LockDirectory() as directory:
    with directory.mutex():
        holders = directory.holders_of(uuid)
    missing = directory.unlisted(["mutex.lock", *(h.file for h in holders)])  # as a waiter does
    number = os.stat(directory.path + "/mutex.lock").st_dev
    lock = directory.acquire("another.lock")
    in_list = kernel_device(lock.descriptor)
    lock.release()
device = f"{os.major(number):02x}:{os.minor(number):02x}"
[[(h.pid, h.seen) for h in holders], list(missing), in_list, device]
"""


def test_holders_are_found_if_the_lock_list_has_other_device_numbers(mounted: Child) -> None:
    """Holders are found on overlayfs, whose device numbers in stat(2) and /proc/locks differ."""
    if mounted.run("os.path.exists('no-overlay')").value:
        pytest.skip("this system allows no overlay")
    with lock_directory(mounted, "overlay"):
        for memory in (None, "1GB"):
            assert mounted.reserve(f"0, memory={memory!r}").value == "0"
            holders, missing, in_list, number = mounted.run(READ_HOLDERS).value
            assert in_list != number
            assert missing == [MUTEX]
            assert holders == [[mounted.pid, True]]


# Lets flock(2) of this process fail as on a file system without it; the last filter counts:
# https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
DISABLE_FLOCK = """
import ctypes, struct
refuse, allow = (0x06, 0, 0, 0x50000 | {code}), (0x06, 0, 0, 0x7FFF0000)
lines = (0x20, 0, 0, 0), (0x15, 0, 1, {number}), refuse, allow
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
prctl = ctypes.CDLL(None).prctl
prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0)
"""
FLOCK = {"x86_64": 73, "aarch64": 32}  # the number of the system call


@pytest.mark.skipif(platform.machine() not in FLOCK, reason="only on x86-64 and 64-bit ARM")
def test_a_file_system_without_flock_is_an_error(machine: Machine) -> None:
    """If files can't be locked, nothing is reserved, and the error suggests a local file system."""
    with machine.child() as child:
        for code in (errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOSYS):
            filtered = DISABLE_FLOCK.format(number=FLOCK[platform.machine()], code=code)
            if child.run(filtered).value != 0:
                pytest.skip("this system allows no seccomp filter")
            refused = child.reserve()
            assert child.visible() is None
            assert refused.error == "LockError"
            assert f"{machine.locks}/{MUTEX} can't be locked: {os.strerror(code)}" in refused.text
            assert "local file system" in refused.text


# Modes of /run/lock, /dev/shm and /tmp, and the default lock directory.
DEFAULT_PATHS = [
    ("1777 1777 1777", "/run/lock/reserve_gpu"),
    ("0777 1777 1777", "/dev/shm/reserve_gpu"),  # without the sticky bit, all users can delete
    ("1775 0755 1777", "/tmp/reserve_gpu"),
    ("0755 0755 0755", None),
]
MOUNT_DEFAULTS = """
import subprocess
from reserve_gpu.locks.directory import default_path
for path in ("/run", "/dev/shm", "/tmp"):
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
os.mkdir("/run/lock")
del os.environ["RESERVE_GPU_LOCK_DIR"]
def default_with(modes):
    for path, mode in zip(("/run/lock", "/dev/shm", "/tmp"), modes.split()):
        os.chmod(path, int(mode, 8))
    return default_path()
"""


def test_the_default_directory_is_in_the_first_usable_place(machine: Machine) -> None:
    """The first of three common folders that is world-writable and sticky is used."""
    with behind(machine, "unshare", "--mount") as child:
        assert child.run(MOUNT_DEFAULTS).error is None
        for modes, expected in DEFAULT_PATHS:
            answer = child.run(f"default_with({modes!r})")
            assert answer.value == expected
            assert (answer.error == "LockError") == (expected is None)
            assert expected or "RESERVE_GPU_LOCK_DIR" in answer.text
        configured = "os.environ['RESERVE_GPU_LOCK_DIR'] = '/else'; default_path()"
        assert child.run(configured).value == "/else"


# -- the kernel's list of locks --------------------------------------------------------------------


def child_with_lock_list(here: Here, path: Path) -> AbstractContextManager[Child]:
    """Return a child that sees a file instead of /proc/locks."""
    return behind(here, "unshare", "--mount", script=f"mount --bind {path} /proc/locks")


@whole_and_shared
def test_the_lock_and_not_the_list_of_locks_decides(two: Here, *, memory: str | None) -> None:
    """A GPU is reserved if its file is locked, whatever /proc/locks omits or still contains.

    The list is not a snapshot: it can miss locks while other processes lock and unlock files.
    """
    lock_list = two.folder / "locks.txt"
    lock_list.touch()
    rows = "[(row.state.value, len(row.holders)) for row in reserve_gpu.status().rows]"
    with child_with_lock_list(two, lock_list) as child:
        assert child.run("open('/proc/locks').read()").value == ""
        with two.rival("0", **SHARER if memory else {}):
            assert child.reserve("0").error == "NoFreeDeviceError"
            assert child.run(rows).value == [["reserved", 1], ["free", 0]]
            assert child.reserve().value == "1"
            child.run("reserve_gpu.release()")
            lock_list.write_text(Path("/proc/locks").read_text())
            assert f" {os.getpid()} " in lock_list.read_text()
        assert child.run(rows).value == [["free", 0], ["free", 0]]
        assert child.reserve().value == "0"


# Finds holders and tickets, and returns whether that reads less than 4 MiB.
LOOK = """
from reserve_gpu.locks.directory import LockDirectory
def read_bytes():
    return int(open('/proc/self/io').readline().split()[1])
def look():
    before = read_bytes()
    rows = [(row.state.value, len(row.holders)) for row in reserve_gpu.status().rows]
    with LockDirectory() as locks, locks.mutex():
        tickets = [ticket.name for ticket in locks.tickets()]
        own = [holder.pid for holder in locks.holders_by(os.geteuid(), UUIDS)]
    with LockDirectory() as locks:
        kept = locks.are_listed([f"{uuid}.lock" for uuid in UUIDS[1:]], os.getpid())
        can_list = locks.unlisted([]) is not None
    return rows, tickets, own, kept, can_list, read_bytes() - before < 4 * 2**20
"""


@whole_and_shared
def test_a_long_list_of_locks_is_read_up_to_a_limit(two: Here, *, memory: str | None) -> None:
    """If /proc/locks is too long, the locks and this user's open files show the holders.

    Every user can make the list long. The test counts the bytes that a check reads.
    """
    lock_list = two.folder / "locks.txt"
    lock_list.write_text("1: POSIX  ADVISORY  WRITE 1 00:19:47 0 EOF\n" * 200_000)
    ticket = f"queue-{os.geteuid()}-0.lock"
    with child_with_lock_list(two, lock_list) as child:
        assert child.run(f"UUIDS = {UUIDS}\n{LOOK}").error is None
        with two.rival("0", **SHARER if memory else {}), have(two.locks / ticket):
            assert child.reserve("0").error == "NoFreeDeviceError"
            assert child.reserve("1").value == "1"
            rows, tickets, own, *rest = child.run("look()").value
            assert rows == [["reserved", 1], ["reserved", 1]]
            assert tickets == [ticket]
            assert child.pid in own
            assert rest == [True, False, True]
            child.run("reserve_gpu.release()")
            child.send("reserve_gpu.reserve('0', wait=30)")
        assert child.answer().error is None
        child.run("reserve_gpu.release()")
        rows, tickets, own, *rest = child.run("look()").value
        assert (rows, tickets, own) == ([["free", 0], ["free", 0]], [], [])
        assert rest == [False, False, True]


@whole_and_shared
def test_a_gpu_that_is_locked_outside_a_container_is_not_free(
    two: Here, *, memory: str | None
) -> None:
    """A container, whose /proc/locks shows no lock from outside, still refuses a locked GPU."""
    with two.rival("0", **SHARER if memory else {}), behind(two, *CONTAINER) as child:
        assert child.reserve("0").error == "NoFreeDeviceError"
        assert child.reserve().value == "1"
        with pytest.raises(AssertionError), two.rival("1", **SHARER if memory else {}):
            pass
