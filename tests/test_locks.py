"""The lock directory and its files: what may stand in their place, and be written in them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import stat
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.errors import LockError
from reserve_gpu.locks import MUTEX, LockDirectory
from tests.machine import Child, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
GPU0 = f"{UUIDS[0]}.lock"
SHARED_GPU0 = f"{UUIDS[0]}.shared"
PRECIOUS = b"years of work\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two idle GPUs of known UUIDs, and an empty lock directory."""
    machine = Machine(tmp_path)
    machine.write(SCENARIO)
    machine.locks.mkdir()
    machine.locks.chmod(0o1777)
    return machine


@pytest.fixture
def precious(machine: Machine) -> Path:
    path = machine.folder / "precious.txt"
    path.write_bytes(PRECIOUS)
    return path


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# -- what may stand in the place of a file --------------------------------------------------------

# What stands in the place of a lock file, and how it comes there.
OBSTACLES: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("../precious.txt"),
    "dangling link": lambda path: path.symlink_to("../nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "second name of a file": lambda path: path.hardlink_to(path.parent.parent / "precious.txt"),
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o666),
    "device node": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
}
obstacles = pytest.mark.parametrize(
    "obstacle",
    [pytest.param(o, marks=needs_root if o == "device node" else ()) for o in OBSTACLES],
)


@contextmanager
def obstructed(machine: Machine, precious: Path, name: str, obstacle: str) -> Iterator[Path]:
    """Have something else where that lock file should be; it and the precious file must survive."""
    path = machine.locks / name
    OBSTACLES[obstacle](path)
    before = path.lstat()
    yield path
    after = path.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert precious.read_bytes() == PRECIOUS
    assert not precious.with_name("nowhere").exists()
    path.rmdir() if obstacle == "directory" else path.unlink()


@obstacles
@pytest.mark.parametrize("name", [GPU0, SHARED_GPU0])
def test_an_obstacle_in_place_of_a_lock_costs_that_gpu_alone(
    machine: Machine, precious: Path, name: str, obstacle: str
) -> None:
    """What is no lock file is neither followed nor written; it is named, its GPU skipped."""
    with obstructed(machine, precious, name, obstacle) as path, machine.child() as child:
        assert child.reserve().value == "1"
        assert child.run("reserve_gpu.release()").error is None
        refused = child.reserve("0")
    assert refused.error == "NoFreeDeviceError"
    assert f"GPU0: unknown: {path} is " in refused.text or f"{path} can't be" in refused.text
    assert "link" not in obstacle or "is a link" in refused.text


@obstacles
def test_an_obstacle_in_place_of_the_mutex_is_an_error(
    machine: Machine, precious: Path, obstacle: str
) -> None:
    """What stands in place of the mutex stops a reservation, changes no variable, and is named."""
    with obstructed(machine, precious, MUTEX, obstacle) as path, machine.child() as child:
        refused = child.reserve()
        assert child.visible() is None
    assert refused.error == "LockError"
    assert str(path) in refused.text


def test_the_magic_shows_no_traceback(machine: Machine, precious: Path) -> None:
    """In a notebook each obstacle in place of a lock or of the mutex is a short message."""
    with machine.kernel() as kernel:
        for obstacle in OBSTACLES:
            if obstacle == "device node" and os.geteuid():
                continue
            for name, error in ((GPU0, "NoFreeDeviceError"), (MUTEX, "LockError")):
                (machine.locks / name).unlink(missing_ok=True)
                with obstructed(machine, precious, name, obstacle):
                    cell = kernel.run("%reserve_gpu 0")
                assert cell.error == error, f"{obstacle}: {cell.traceback}"
                shown = "\n".join(cell.traceback)
                assert "Traceback" not in shown
                assert ".py" not in shown


def test_files_are_for_all_whatever_the_umask(machine: Machine) -> None:
    """Lock files have mode 0666 and the directory 1777, also where the umask is 077."""
    machine.locks.rmdir()
    with machine.child() as child:
        child.run("os.umask(0o077)")
        assert child.reserve("count=2").value == "0,1"
    assert stat.S_IMODE(machine.locks.stat().st_mode) == 0o1777
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in machine.locks.iterdir()}
    assert modes == dict.fromkeys((MUTEX, *(f"{uuid}.lock" for uuid in UUIDS)), 0o666)


def test_files_are_never_deleted(machine: Machine) -> None:
    """The files of a lock and of the mutex stay the same through release, death and reservation."""
    with machine.child() as child:
        child.reserve()
        before = {path.name: path.stat().st_ino for path in machine.locks.iterdir()}
        child.run("reserve_gpu.release()")
        child.reserve()
    with machine.child() as child:
        child.reserve()
        after = {path.name: path.stat().st_ino for path in machine.locks.iterdir()}
    assert before == after


# -- the directory --------------------------------------------------------------------------------


def link_to_elsewhere(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir()
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(link_to_elsewhere, id="link"),
        pytest.param(lambda path: path.symlink_to("nowhere"), id="dangling link"),
        pytest.param(lambda path: path.write_bytes(PRECIOUS), id="file"),
        pytest.param(os.mkfifo, id="pipe"),
        pytest.param(lambda path: path.parent.rmdir(), id="no parent"),
    ],
)
def test_a_lock_directory_that_is_none_is_an_error(
    machine: Machine, make: Callable[[Path], object]
) -> None:
    """What is no directory, or a link to one, is left as it is; it and the way out are named."""
    parent = machine.folder / "parent"
    parent.mkdir()
    path = parent / "locks"
    make(path)
    before = [(p.name, p.lstat().st_mode, p.lstat().st_size) for p in machine.folder.rglob("*")]
    done = machine.ipython("%reserve_gpu", RESERVE_GPU_LOCK_DIR=str(path))
    after = [(p.name, p.lstat().st_mode, p.lstat().st_size) for p in machine.folder.rglob("*")]
    shown = done.stdout + done.stderr
    assert done.returncode == 1
    assert str(path) in shown
    assert "RESERVE_GPU_LOCK_DIR" in shown
    assert "Traceback" not in shown
    known = {name for name, _, _ in before} - {"calls.log", "home"}
    assert [a for a in after if a[0] in known] == [b for b in before if b[0] in known]


@contextmanager
def mounted(machine: Machine, script: str) -> Iterator[Child]:
    """A child that alone sees what the script mounts; $L in it is the lock directory."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mounts need root, and a system that allows them")
    script = f'L="{machine.locks}"; set -e; {script}\nexec "$@"'
    child = Child(machine.environ(), machine.folder, "unshare", "--mount", "sh", "-c", script, "sh")
    try:
        yield child
    finally:
        child.kill()


READ_ONLY = 'mount --bind "$L" "$L"; mount -o remount,bind,ro "$L"'


@pytest.mark.parametrize("files", ["no files", "lock files"])
def test_a_read_only_lock_directory_is_an_error(machine: Machine, files: str) -> None:
    """On a read-only file system nothing is reserved, and that is said."""
    if files == "lock files":
        with machine.child() as child:
            assert child.reserve().value == "0"
    with mounted(machine, READ_ONLY) as child:
        refused = child.reserve()
        assert child.visible() is None
    assert refused.error == "LockError"
    assert str(machine.locks) in refused.text
    assert os.strerror(errno.EROFS) in refused.text


def test_a_full_lock_directory_loses_the_record_not_the_lock(machine: Machine) -> None:
    """Where no byte more can be written the lock holds, and the kernel names the holder."""
    fill = 'mount -t tmpfs -o size=8k,mode=1777 none "$L"; head -c 8192 /dev/zero >"$L/full"'
    with mounted(machine, fill) as child:
        assert child.reserve().value == "0"
        other = (
            "import subprocess; subprocess.run([sys.executable, '-c', "
            "'import reserve_gpu; reserve_gpu.reserve(0)'], stderr=subprocess.PIPE, text=True, "
            "env={k: v for k, v in os.environ.items() if not k.startswith('CUDA')}).stderr"
        )
        told = child.run(other).value
        assert "NoFreeDeviceError" in told
        assert f"pid {child.pid}" in told
        assert child.run("reserve_gpu.release()").error is None


def test_a_directory_that_takes_no_file_more_is_an_error(machine: Machine) -> None:
    """Where no lock file can be made nothing is reserved, and the cause is named."""
    with mounted(machine, 'mount -t tmpfs -o nr_inodes=1,mode=1777 none "$L"') as child:
        refused = child.reserve()
    assert refused.error == "LockError"
    assert os.strerror(errno.ENOSPC) in refused.text


# A filter that lets the kernel answer flock(2) in this process as a file system without it does:
# https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
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
@pytest.mark.parametrize("code", ["EOPNOTSUPP", "ENOLCK", "EINVAL", "ENOSYS"])
def test_a_file_system_without_flock_is_an_error(machine: Machine, code: str) -> None:
    """Where files can't be locked nothing is reserved, and the way out is named."""
    with machine.child() as child:
        number = getattr(errno, code)
        filtered = child.run(
            WITHOUT_FLOCK.format(number=FLOCK[platform.machine()], code=number)
        ).value
        if filtered != 0:
            pytest.skip("this system allows no seccomp filter")
        refused = child.reserve()
        assert child.visible() is None
    assert refused.error == "LockError"
    assert str(machine.locks) in refused.text
    assert "RESERVE_GPU_LOCK_DIR" in refused.text


def test_a_lock_directory_removed_under_the_holder(machine: Machine) -> None:
    """The holder keeps what it has, and shows it again to others when its cell is run again."""
    with machine.child() as holder, machine.child() as other:
        assert holder.reserve().value == "0"
        shutil.rmtree(machine.locks)
        assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"
        assert holder.reserve().value == "0"
        assert stat.S_IMODE(machine.locks.stat().st_mode) == 0o1777
        refused = other.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in refused.text
        holder.run("reserve_gpu.release()")
        assert other.reserve("0").value == "0"


@pytest.mark.parametrize("gone", ["file", "directory"])
@pytest.mark.parametrize("share", [False, True], ids=["alone", "shared"])
def test_a_deleted_lock_frees_nothing(machine: Machine, gone: str, *, share: bool) -> None:
    """Without its lock file a GPU is still its holder's, for who asks and for who only looks."""
    look = "[(r.state, [h.pid for h in r.holders]) for r in reserve_gpu.status().rows][0]"
    with machine.child() as holder, machine.child() as other:
        assert holder.reserve(f"0, share={share}").value == "0"
        if gone == "file":
            (path,) = machine.locks.glob("*.shared" if share else "GPU-*.lock")
            path.unlink()
        else:
            shutil.rmtree(machine.locks)
        assert other.run(look).value == ["reserved", [holder.pid]]
        refused = other.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in refused.text
        assert holder.reserve(f"0, share={share}").value == "0"
        holder.run("reserve_gpu.release()")
        assert other.reserve("0").value == "0"


def test_a_file_locked_in_the_place_of_a_deleted_one(machine: Machine) -> None:
    """Who asks again for a GPU whose new lock file another process keeps locked is told which."""
    with machine.child() as holder, machine.child() as other:
        assert holder.reserve("0").value == "0"
        (path,) = machine.locks.glob("GPU-*.lock")
        path.unlink()
        other.run(
            f"import fcntl; file = open({str(path)!r}, 'w'); os.chmod(file.fileno(), 0o666); "
            "fcntl.flock(file, fcntl.LOCK_EX)"
        )
        told = holder.reserve("0")
        assert told.error == "LockError"
        assert f"pid {other.pid}" in told.text
        assert holder.run("reserve_gpu.release()").error is None


def test_where_there_are_no_such_sockets_the_file_decides(machine: Machine) -> None:
    """In a network namespace of its own a process still sees who has the file locked."""
    alone = ("unshare", "--net")
    if os.geteuid() or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("namespaces need root, and a system that allows them")
    child = Child(machine.environ(), machine.folder, *alone)
    try:
        with machine.child() as holder:
            assert holder.reserve("0").value == "0"
            assert child.reserve("0").error == "NoFreeDeviceError"
            assert child.reserve().value == "1"
            assert holder.reserve("1").error == "NoFreeDeviceError"
    finally:
        child.kill()


def test_a_lock_directory_removed_before_the_lock(tmp_path: Path) -> None:
    """A directory that disappears once it is open is an error, not a lock that nobody sees."""
    path = tmp_path / "locks"
    with LockDirectory(str(path)) as directory:
        path.rmdir()
        with pytest.raises(LockError, match="locks"):
            directory.acquire("a.lock")


# The interpreter calls the hook before each flock(2): when a file is open and not yet locked.
REPLACING = """
import pathlib
from reserve_gpu.locks import LockDirectory
path, left = pathlib.Path(os.environ["RESERVE_GPU_LOCK_DIR"], "a.lock"), [{times}]
def replace(event, arguments):
    if event == "fcntl.flock" and left[0]:
        left[0] -= 1
        draft = path.with_name("draft")
        draft.touch()
        draft.replace(path)
sys.addaudithook(replace)
def acquire():
    with LockDirectory() as directory:
        return directory.acquire("a.lock")
lock = acquire()
"""


def test_a_file_replaced_while_it_is_locked(machine: Machine) -> None:
    """A lock is held on the file that others will find, though another was opened at first."""
    with machine.child() as child:
        assert child.run(REPLACING.format(times=3)).error is None
        inode = (machine.locks / "a.lock").stat().st_ino
        assert (child.pid, inode) in kernel_locks()


def test_a_file_replaced_again_and_again_is_an_error(machine: Machine) -> None:
    """Who can never lock the file that others find gives up and says so."""
    with machine.child() as child:
        refused = child.run(REPLACING.format(times=1 << 30))
    assert refused.error == "LockError"
    assert str(machine.locks / "a.lock") in refused.text


def kernel_locks() -> set[tuple[int, int]]:
    """Pid and inode of every flock on this machine."""
    with open("/proc/locks", encoding="ascii") as lines:
        fields = [line.split() for line in lines]
    return {(int(f[4]), int(f[5].rpartition(":")[2])) for f in fields if f[1] == "FLOCK"}


# Modes of /run/lock, /dev/shm and /tmp, and where the locks go.
PLACES = [
    ("1777 1777 1777", "/run/lock/reserve_gpu"),
    ("0755 1777 1777", "/dev/shm/reserve_gpu"),
    ("0777 1777 1777", "/dev/shm/reserve_gpu"),  # not sticky: anybody could delete what is there
    ("1775 0755 1777", "/tmp/reserve_gpu"),
    ("0755 0755 0755", None),
]
MOUNT = """
import subprocess, reserve_gpu.locks, reserve_gpu.settings
def mount(path, mode):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode={mode}", "none", path], check=True)
mount("/run", "0755")
os.mkdir("/run/lock")
for path, mode in zip(("/run/lock", "/dev/shm", "/tmp"), %r.split()): mount(path, mode)
"""


@pytest.mark.parametrize(("modes", "expected"), PLACES)
def test_the_default_directory_is_where_all_may_write(
    machine: Machine, modes: str, expected: str | None
) -> None:
    """The first of the common places that is world-writable and sticky is taken, if one is."""
    with mounted(machine, "") as child:
        assert child.run(f"del os.environ['RESERVE_GPU_LOCK_DIR']{MOUNT % modes}").error is None
        found = child.run("reserve_gpu.locks.default_path()")
        assert found.value == expected
        assert (found.error == "LockError") == (expected is None)
        if expected is None:
            assert "RESERVE_GPU_LOCK_DIR" in found.text
        configured = (
            "os.environ['RESERVE_GPU_LOCK_DIR'] = '/else'; reserve_gpu.locks.default_path()"
        )
        assert child.run(configured).value == "/else"


def test_by_default_locks_are_in_a_common_place(machine: Machine) -> None:
    """With nothing configured a reservation is in /run/lock, for everybody."""
    with mounted(machine, "") as child:
        child.run("import pynvml")
        assert child.run(MOUNT % "1777 1777 0755").error is None
        child.run("del os.environ['RESERVE_GPU_LOCK_DIR']")
        assert child.run("os.listdir('/run/lock')").value == []
        child.run("from reserve_gpu.locks import LockDirectory, default_path")
        child.run("with LockDirectory(default_path()) as d: d.acquire('a.lock')")
        made = child.run("[oct(os.stat('/run/lock/reserve_gpu').st_mode), os.listdir('/run/lock')]")
    assert made.value == ["0o41777", ["reserve_gpu"]]


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
    "not UTF-8": b'{"user": "\xff\xfe"}',
}


@contextmanager
def held(path: Path, content: bytes) -> Iterator[None]:
    """This very process holds the lock, and the file says what it says."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(content)
        file.flush()
        yield
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_shown_safely_and_changes_nothing(machine: Machine, name: str) -> None:
    """Whatever a record says, the pid is the kernel's and the text a plain, short line."""
    with machine.child() as child, held(machine.locks / GPU0, RECORDS[name]):
        refused = child.reserve("0")
        assert child.reserve().value == "1"
    assert refused.error == "NoFreeDeviceError"
    [line] = [line for line in refused.text.split("\n") if "GPU0:" in line]
    assert f"pid {os.getpid()}" in line
    assert line.isprintable()
    assert len(line) < 300
    assert "GPU1: free" not in refused.text.split("\n")


def test_a_record_that_names_another_process_is_not_believed(machine: Machine) -> None:
    """The pid in a record is neither shown nor believed where the kernel knows better."""
    claimed = record(pid=1)
    with machine.child() as child, held(machine.locks / GPU0, claimed):
        text = child.reserve("0").text
    assert f"pid {os.getpid()}" in text
    assert "pid 1)" not in text
    assert "unconfirmed" in text


def test_the_user_of_a_process_is_whom_the_system_names(machine: Machine) -> None:
    """A record can't put a reservation down to another user than the one whose process holds it."""
    with machine.child() as child, held(machine.locks / GPU0, record(user="mallory")):
        text = child.reserve("0").text
    assert f"pid {os.getpid()}" in text
    assert "mallory" not in text


def test_a_record_without_a_lock_is_a_free_gpu(machine: Machine) -> None:
    """What a dead holder left written, or somebody else wrote, reserves nothing."""
    (machine.locks / GPU0).write_bytes(record(pid=os.getppid()))
    with machine.child() as child:
        assert child.reserve().value == "0"


def test_a_record_is_readable_while_the_lock_is_held(machine: Machine) -> None:
    """The file names the holder, in JSON for whoever looks, and is empty once it is free."""
    with machine.child() as child:
        child.reserve()
        said = json.loads((machine.locks / GPU0).read_bytes())
        assert said["pid"] == child.pid
        child.run("reserve_gpu.release()")
        assert (machine.locks / GPU0).read_bytes() == b""


# -- the mutex ------------------------------------------------------------------------------------

TAKE_MUTEX = """
from reserve_gpu.locks import LockDirectory
directory = LockDirectory().__enter__()
mutex = directory.mutex()
mutex.__enter__()
"""


def test_who_waits_too_long_for_the_mutex_is_told_who_has_it(machine: Machine) -> None:
    """The mutex is waited for up to a limit; the error names the process that has it."""
    with machine.child() as child, LockDirectory(str(machine.locks)) as directory:
        assert child.run(TAKE_MUTEX).error is None
        mutex = directory.mutex(limit_s=0.05)
        with pytest.raises(LockError, match=rf"\b{child.pid}\b"):
            mutex.__enter__()


def test_the_mutex_of_a_killed_process_is_free(machine: Machine) -> None:
    """Who waits for the mutex gets it when its holder is killed with -9."""
    with machine.child() as holder, machine.child() as waiter:
        assert holder.run(TAKE_MUTEX).error is None
        waiter.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        holder.kill()
        assert waiter.answer().value == "0"


def test_the_mutex_is_let_go_of_whatever_happens_under_it(machine: Machine) -> None:
    """A reservation that fails, in whatever way, leaves the mutex free."""
    with machine.child() as child, LockDirectory(str(machine.locks)) as directory:
        with held(machine.locks / GPU0, b""):
            assert child.reserve("0").error == "NoFreeDeviceError"
        assert child.reserve("count=9").error == "ImpossibleError"
        with pytest.raises(ZeroDivisionError), directory.mutex(limit_s=0):
            raise ZeroDivisionError
        with directory.mutex(limit_s=0):
            pass


def test_a_name_can_not_leave_the_directory(tmp_path: Path) -> None:
    """A UUID that is none, from whatever driver, names no file outside of the lock directory."""
    with LockDirectory(str(tmp_path / "locks")) as directory:
        for name in ("../a.lock", "/a.lock", ".lock", "a/b.lock"):
            with pytest.raises(LockError, match="name"):
                directory.acquire(name)
    assert not list(tmp_path.rglob("*.lock"))


def test_a_private_directory_stays_private(machine: Machine) -> None:
    """A directory that was made for another purpose serves as it is: its mode is not changed."""
    private = machine.folder / "private"
    private.mkdir(mode=0o700)
    with machine.child(RESERVE_GPU_LOCK_DIR=str(private)) as child:
        assert child.reserve().value == "0"
    assert private.stat().st_mode & 0o7777 == 0o700


def test_a_relative_directory_is_refused(machine: Machine) -> None:
    """A relative lock directory, another one in every working directory, is an error."""
    with machine.child(RESERVE_GPU_LOCK_DIR="somewhere") as child:
        refused = child.reserve()
    assert refused.error == "LockError"
    assert "absolute" in refused.text
    assert not (machine.folder / "somewhere").exists()
