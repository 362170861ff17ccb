"""The lock directory and its files: what may stand in their place, and be written in them."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.errors import LockError
from tests.support.locked import (
    have,
    held,
)
from tests.support.machine import TAKE_THE_MUTEX, Child, Machine
from tests.support.reserving import got

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

from tests.support.directory import inodes

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
GPU0 = f"{UUIDS[0]}.lock"
SHARER: dict[str, Any] = {"part_mib": 1024}
SHARED = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


# -- what may stand in the place of a file --------------------------------------------------------


@pytest.fixture
def two(here: Here) -> Here:
    """Make two idle GPUs of known UUIDs, and an empty lock directory."""
    here.write(SCENARIO)
    here.locks.mkdir()
    here.locks.chmod(0o1777)
    return here


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


def test_a_file_that_somebody_makes_meanwhile(machine: Machine) -> None:
    """Of two who find no lock file and make it, the second one takes the first one's."""
    with machine.child() as child:
        assert child.run(MADE_MEANWHILE).value is True


@pytest.mark.promise
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


def test_a_lock_that_another_process_takes_over(two: Here) -> None:
    """The process that has taken a GPU meanwhile is named by its pid."""
    reserve_gpu.reserve("0")
    (two.locks / GPU0).unlink()
    with two.child() as other:
        assert other.reserve("0").value == "0"
        with pytest.raises(LockError, match=rf"\(pid {other.pid}\)"):
            reserve_gpu.reserve()


# -- the lock decides -----------------------------------------------------------------------------


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


@pytest.mark.promise
def test_the_mutex_of_a_killed_process_is_free(machine: Machine) -> None:
    """Who waits for the mutex gets it when its holder is killed with -9."""
    with machine.child() as holder, machine.child() as waiter:
        assert holder.run(TAKE_THE_MUTEX).error is None
        waiter.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        holder.kill()
        assert waiter.answer().value == "0"
