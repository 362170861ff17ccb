"""Several Unix users on one machine: root, who runs the tests, and two others."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import locked
from tests.support.machine import LIMIT_S, Child
from tests.support.processes import wait_for
from tests.support.reserving import of_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.support.users import DAEMON, NOBODY, ROOT, UUIDS, Users, child_of, for_users

pytestmark = [pytest.mark.xdist_group("users")]
GPU0 = f"{UUIDS[0]}.lock"
MUTEX = "mutex.lock"


_asked: dict[str, str] = {}


@pytest.fixture(scope="module")
def three() -> Iterator[Users]:
    with (
        for_users() as machine,
        child_of(machine, ROOT) as root,
        child_of(machine, NOBODY) as nobody,
        child_of(machine, DAEMON) as daemon,
    ):
        yield Users(machine, {ROOT: root, NOBODY: nobody, DAEMON: daemon})


@pytest.fixture
def users(three: Users) -> Users:
    """Make a process of each user; there is no lock directory yet."""
    three.forget()
    return three


@pytest.mark.promise
@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
@pytest.mark.parametrize(("holder", "other"), [(ROOT, NOBODY), (NOBODY, ROOT), (NOBODY, DAEMON)])
def test_another_users_kernel_is_named_with_its_user(
    users: Users, holder: str, other: str, *, memory: str | None
) -> None:
    """Who finds a GPU reserved is told which user's process has it, whoever the two are."""
    first, second = users[holder], users[other]
    assert first.reserve(f"0, memory={memory!r}").value == "0"
    refused = second.reserve("0")
    assert refused.error == "NoFreeDeviceError"
    assert of_gpu(refused.text).startswith(f"reserved: {holder}")
    assert f"pid {first.pid}" in refused.text
    assert "word" not in refused.text
    assert second.reserve().value == "1"
    assert first.run("len(reserve_gpu.release())").value == 1
    assert second.reserve("0").value == "0"


@pytest.mark.promise
def test_users_share(users: Users) -> None:
    """Users who share a GPU have a file of their own each, and each is listed with its user."""
    for user in (NOBODY, ROOT, DAEMON):
        assert users[user].reserve("0, memory='1GB'").value == "0"
    files = {path.stat().st_uid: path for path in users.locks.glob("*.share-*")}
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o644}
    names = users[ROOT].run("[h.user for h in reserve_gpu.status().rows[0].holders]").value
    assert sorted(names) == sorted((NOBODY, ROOT, DAEMON))
    users[NOBODY].run("reserve_gpu.release()")
    assert users[NOBODY].reserve("0").error == "NoFreeDeviceError"
    for user in (ROOT, DAEMON):
        users[user].run("reserve_gpu.release()")
    assert users[NOBODY].reserve("0").value == "0"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o777], ids=oct)
def test_locks_made_under_any_umask_serve_all_users(users: Users, umask: int) -> None:
    """Whoever makes the directory and the files, under whatever umask, others can use them."""
    for user in (NOBODY, DAEMON):
        users[user].run(f"os.umask({umask})")
        assert users[user].reserve("count=2").value == "0,1"
        if user == NOBODY:
            users[user].run("reserve_gpu.release()")
    assert users[NOBODY].reserve().error == "NoFreeDeviceError"
    modes = {path.suffix[:7]: stat.S_IMODE(path.stat().st_mode) for path in users.locks.iterdir()}
    assert modes == {".lock": 0o666, ".record": 0o644}
    assert stat.S_IMODE(users.locks.stat().st_mode) == 0o1777


@pytest.mark.parametrize("mode", [0o1777, 0o666], ids=["directory", "file"])
def test_a_user_killed_while_making_them_locks_nobody_out(users: Users, mode: int) -> None:
    """What is half made as its maker is killed with -9 serves all once that user reserves again."""
    with child_of(users.machine, NOBODY) as maker:
        maker.run("os.umask(0o077)")
        # The interpreter calls the hook before each chmod(2): before what was made is for all.
        maker.run(
            "sys.addaudithook(lambda event, arguments: os.kill(os.getpid(), 9) "
            f"if event == 'os.chmod' and arguments[1] == {mode} else None)"
        )
        maker.send("reserve_gpu.reserve()")
        assert maker.process.wait(LIMIT_S) == -signal.SIGKILL
    assert users[NOBODY].reserve().value == "0"
    assert users[DAEMON].reserve().value == "1"


def test_a_ticket_that_its_user_keeps_closed_stops_nobody(users: Users) -> None:
    """A file in the queue that others may not open is passed by."""
    assert users[NOBODY].reserve().value == "0"
    path = str(users.locks / "queue-65534-0.lock")
    made = users[NOBODY].run(f"os.close(os.open({path!r}, os.O_RDWR | os.O_CREAT, 0))")
    assert made.error is None
    assert users[DAEMON].reserve().value == "1"


@contextmanager
def protected_regular(value: int) -> Iterator[None]:
    """Set fs.protected_regular: https://docs.kernel.org/admin-guide/sysctl/fs.html#protected-regular."""
    setting = Path("/proc/sys/fs/protected_regular")
    try:
        before = setting.read_text()
        setting.write_text(str(value))
    except OSError as error:
        pytest.skip(f"fs.protected_regular can't be set here: {error}")
    try:
        yield
    finally:
        setting.write_text(before)


@pytest.mark.parametrize(
    ("value", "mode"), [(0, 0o1777), (1, 0o1777), (2, 0o1777), (2, 0o1775)], ids=oct
)
def test_the_kernels_protection_of_files_is_no_obstacle(
    users: Users, value: int, mode: int
) -> None:
    """With fs.protected_regular another user's lock file serves, though O_CREAT on it fails."""
    assert users[NOBODY].reserve("count=2").value == "0,1"
    users[NOBODY].run("reserve_gpu.release()")
    users.locks.chmod(mode)
    os.chown(users.locks, 0, 0)  # the kernel trusts files of the directory's owner
    with protected_regular(value):
        path = str(users.locks / GPU0)
        opened = users[DAEMON].run(f"os.close(os.open({path!r}, os.O_RDWR | os.O_CREAT))")
        assert opened.error == ("PermissionError" if value else None)
        assert users[DAEMON].reserve("count=2").value == "0,1"
        refused = users[NOBODY].reserve()
    assert refused.error == "NoFreeDeviceError"
    assert f"pid {users[DAEMON].pid}" in refused.text


def test_users_have_parts(users: Users) -> None:
    """The parts of all users count, whoever they are, and each is listed with its user and size."""
    for user, mib in ((NOBODY, 1000), (ROOT, 2000), (DAEMON, 3000)):
        assert users[user].reserve(f"0, memory='{mib}MiB'").value == "0"
    assert users[NOBODY].reserve("0, memory='3192MiB'").value == "0"
    assert users[DAEMON].reserve("0, memory='3001MiB'").error == "NoFreeDeviceError"
    row = "[(h.user, h.memory_limit_mib) for h in reserve_gpu.status().rows[0].holders]"
    assert sorted(users[ROOT].run(row).value) == [[DAEMON, 3000], [NOBODY, 3192], [ROOT, 2000]]
    users[DAEMON].run("reserve_gpu.release()")
    assert users[ROOT].reserve("0, memory='5000MiB'").value == "0"


RESIZE = {
    "write": "open(path, 'w').write('{\"part_mib\": 1}')",
    "append": "open(path, 'a').write(' ' * 70_000)",
    "replace": (
        'open(path + ".new", "w").write(\'{"part_mib": 1}\'); os.rename(path + ".new", path)'
    ),
    "delete": "os.unlink(path)",
    "rename": "os.rename(path, path + '.old')",
    "second name": "os.link(path, path + '.other')",
    "release": "reserve_gpu.release()",
}


@pytest.mark.parametrize("attack", RESIZE)
def test_no_user_can_change_the_size_of_anothers_part(users: Users, attack: str) -> None:
    """Whatever another user does to a sharer's file, its part counts as it was."""
    holder, other, third = users[ROOT], users[NOBODY], users[DAEMON]
    assert holder.reserve("0, memory='5000MiB'").value == "0"
    other.run(f"path = {str(lock_of(users, memory='1GB'))!r}")
    done = other.run(RESIZE[attack])
    if attack == "second name" and not done.error:
        pytest.skip("fs.protected_hardlinks is off here")
    for child in (other, third):
        assert child.reserve("0, memory='3193MiB'").error == "NoFreeDeviceError"
        assert child.reserve("0, memory='3192MiB'").value == "0"
        child.run("reserve_gpu.release()")


# -- what one user may try on another's lock ------------------------------------------------------

# Code, with the path of the lock as `path`.
ATTACKS = {
    "delete": "os.unlink(path)",
    "rename": "os.rename(path, path + '.old')",
    "replace": (
        "open(path + '.new', 'w').close(); os.chmod(path + '.new', 0o666); "
        "os.rename(path + '.new', path)"
    ),
    "link over": "os.link('/etc/passwd', path)",
    "close to all": "os.chmod(path, 0)",
    "delete the directory": "import shutil; shutil.rmtree(os.path.dirname(path))",
    "rename the directory": "os.rename(os.path.dirname(path), os.path.dirname(path) + '.old')",
    "unlock": "import fcntl; fcntl.flock(open(path, 'r+'), fcntl.LOCK_UN)",
    "unlock another way": "import fcntl; fcntl.lockf(open(path, 'r+'), fcntl.LOCK_UN)",
    "empty": "open(path, 'w').close()",
    "write": 'open(path, \'w\').write(\'{"pid": 1, "user": "mallory"}\')',
    "kill": "os.kill(int(open(path).read().split('\"pid\": ')[1].split(',')[0]), 9)",
    "release": "reserve_gpu.release()",
}
# Only who made the lock directory, or the file, can do these.
DELETIONS = ("delete", "rename", "replace", "delete the directory", "rename the directory")


def lock_of(users: Users, *, memory: str | None) -> Path:
    """Return the file that the holder of GPU 0 has locked."""
    (name,) = (name for name in locked(users.locks) if name.startswith(UUIDS[0]))
    assert (".share-" in name) is (memory is not None)
    return users.locks / name


@pytest.mark.promise
@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_user_can_free_anothers_gpu(users: Users, attack: str, *, memory: str | None) -> None:
    """Whatever another user does to a lock, its holder keeps the GPU, under its own name."""
    holder, other, third = users[ROOT], users[NOBODY], users[DAEMON]
    assert holder.reserve(f"0, memory={memory!r}").value == "0"
    path = lock_of(users, memory=memory)
    before = path.stat()
    other.run(f"path = {str(path)!r}")
    other.run(ATTACKS[attack])
    after = path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    if memory:  # others can't even write to it
        assert b'"pid": %d,' % holder.pid in path.read_bytes()
    for child in (other, third):
        refused = child.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in refused.text
        assert of_gpu(refused.text).startswith("reserved: root")
    assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"


def made_by_another(users: Users) -> None:
    """Have the directory and the files made by nobody."""
    for wishes in ("0, memory='1GB'", "0"):
        assert users[NOBODY].reserve(wishes).value == "0"
        users[NOBODY].run("reserve_gpu.release()")


@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack not in DELETIONS])
def test_who_made_the_files_can_not_free_anothers_gpu(
    users: Users, attack: str, *, memory: str | None
) -> None:
    """As long as the file is there its maker, too, can take no GPU that another user has locked."""
    made_by_another(users)
    holder, maker = users[ROOT], users[NOBODY]
    assert holder.reserve(f"0, memory={memory!r}").value == "0"
    path = lock_of(users, memory=memory)
    assert (path.stat().st_uid == 0) is (memory is not None)
    maker.run(f"path = {str(path)!r}")
    maker.run(ATTACKS[attack])
    for child in (maker, users[DAEMON]):
        assert child.reserve("0").error == "NoFreeDeviceError"
        assert child.visible() != "0"
    assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"


# For the holder of GPU 0: it runs its cell again, and gets to see warnings.
AGAIN = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    reserve_gpu.reserve("0", memory={memory!r})
from tests.support.locked import texts
texts(caught)
"""


@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
@pytest.mark.parametrize("attack", DELETIONS)
def test_what_the_maker_of_the_directory_deletes_is_locked_anew(
    users: Users, attack: str, *, memory: str | None
) -> None:
    """Whoever made the directory can delete what is in it; the holder locks it anew and says so."""
    made_by_another(users)
    holder, maker = users[ROOT], users[NOBODY]
    assert holder.reserve(f"0, memory={memory!r}").value == "0"
    maker.run(f"path = {str(lock_of(users, memory=memory))!r}")
    assert maker.run(ATTACKS[attack]).error is None
    (warning,) = holder.run(AGAIN.format(memory=memory)).value
    assert "was deleted or replaced. GPU0 has been locked again" in warning
    for child in (maker, users[DAEMON]):
        refused = child.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in refused.text
    assert holder.run(AGAIN.format(memory=memory)).value == []


@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
def test_what_another_user_takes_meanwhile_is_lost(users: Users, *, memory: str | None) -> None:
    """Who takes a GPU after its lock was deleted is named to the one who had it, with the user."""
    made_by_another(users)
    holder, other = users[ROOT], users[DAEMON]
    assert holder.reserve(f"0, memory={memory!r}").value == "0"
    users[NOBODY].run(f"os.unlink({str(lock_of(users, memory=memory))!r})")
    assert other.reserve("0").value == "0"
    lost = holder.run(AGAIN.format(memory=memory))
    assert lost.error == "LockError"
    assert f"the device is now reserved by {DAEMON}" in lost.text
    assert f"pid {other.pid}" in lost.text


# -- what is closed to a user ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(three: Users) -> Path:
    """Lock directories that nobody can't use, or not all of, and which nobody has made just now."""
    folder = three.machine.folder / "closed"
    for name, mode in (
        *((MUTEX, 0o1777), (GPU0, 0o1777), ("read-only", 0o755)),
        *(("entered by nobody", 0o000), ("entered by root", 0o700)),
    ):
        (folder / name).mkdir(parents=True)
        if name in (MUTEX, GPU0):
            (folder / name / name).write_bytes(b"years of work\n")
            (folder / name / name).chmod(0o600)
        (folder / name).chmod(mode)
    changed = folder.stat().st_ctime
    while time.time() < changed + 1.1:  # what is younger may still be in the making
        time.sleep(0.05)
    return folder


def use(child: Child, path: Path) -> Path:
    child.run(f"os.environ['RESERVE_GPU_LOCK_DIR'] = {str(path)!r}")
    return path


@pytest.mark.parametrize("name", [GPU0, MUTEX])
def test_another_users_closed_file_is_an_error_that_names_it(
    users: Users, closed: Path, name: str
) -> None:
    """Somebody's file of mode 0600 in place of a lock is left alone and named."""
    path = use(users[NOBODY], closed / name) / name
    refused = users[NOBODY].reserve("0")
    assert refused.error == ("LockError" if name == MUTEX else "NoFreeDeviceError")
    assert str(path) in refused.text
    assert "0666" in refused.text
    if name == GPU0:
        assert users[NOBODY].run("reserve_gpu.release()").error is None
        assert users[NOBODY].reserve().value == "1"
        row = users[NOBODY].run("reserve_gpu.status().to_dict()['devices'][0]").value
        assert row["state"] == "unknown"
        assert str(path) in row["reason"]
    assert path.read_bytes() == b"years of work\n"


def test_a_directory_that_one_may_not_write_to_is_an_error(users: Users, closed: Path) -> None:
    """Where a user can make no lock file the error tells to use another directory."""
    path = use(users[NOBODY], closed / "read-only")
    refused = users[NOBODY].reserve()
    assert refused.error == "LockError"
    assert str(path) in refused.text
    assert "RESERVE_GPU_LOCK_DIR" in refused.text
    assert users[NOBODY].visible() is None


@pytest.mark.parametrize("name", ["entered by nobody", "entered by root"])
def test_a_directory_closed_to_this_user_is_an_error(users: Users, closed: Path, name: str) -> None:
    """A lock directory that this user may not enter is named, with the way out."""
    path = use(users[NOBODY], closed / name)
    refused = users[NOBODY].reserve()
    problem = users[NOBODY].run("reserve_gpu.status().problem").value
    assert refused.error == "LockError"
    assert str(path) in refused.text
    assert "RESERVE_GPU_LOCK_DIR" in refused.text
    assert str(path) in problem


def test_lock_files_that_are_there_serve_where_no_new_one_can_be_made(users: Users) -> None:
    """In a directory of root's with root's lock files a user can reserve what has a file."""
    assert users[ROOT].reserve("count=2").value == "0,1"
    users[ROOT].run("reserve_gpu.release()")
    users.locks.chmod(0o755)
    assert users[NOBODY].reserve().value == "0"


def test_a_file_is_never_seen_half_made(users: Users) -> None:
    """Two users who meet in an empty directory both get a GPU, whoever makes the files."""
    both = users[NOBODY], users[DAEMON]
    for _ in range(30):
        for child in both:
            child.run("os.umask(0o077); reserve_gpu.release()")
        shutil.rmtree(users.locks, ignore_errors=True)
        for child in both:
            child.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        answers = [child.answer() for child in both]
        assert sorted(str(answer.value) for answer in answers) == ["0", "1"], answers


# What another process of a user does with a lock file that it has locked.
LOCK = "lock = os.open({path!r}, os.O_RDWR); fcntl.flock(lock, fcntl.LOCK_EX); "
BECOME = LOCK + "os.set_inheritable(lock, True); os.execv({to!r}, ['sleep', '1000'])"
SEND = LOCK + (
    "to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); to.connect(chr(0) + {to!r}); "
    "socket.send_fds(to, [b'x'], [lock])"
)
HOLDERS = "[[h.uid, h.listed_pid] for row in reserve_gpu.status().rows for h in row.holders]"


def fork(child: Child, code: str, path: Path, to: str) -> int:
    """Have a user's process start another one, and return the pid of that."""
    lines = (
        "import fcntl, socket\npid = os.fork()\nif not pid:\n try: {}\n finally: os._exit(1)\npid"
    )
    pid: int = child.run(lines.format(code.format(path=str(path), to=to))).value
    return pid


def test_a_lock_of_a_set_uid_program_is_its_users(users: Users) -> None:
    """A lock of a set-UID program belongs to the user that started the program."""
    program = users.machine.folder / "set-uid"
    shutil.copy(shutil.which("sleep") or "", program)
    program.chmod(0o4755)
    if os.statvfs(program).f_flag & os.ST_NOSUID:
        pytest.skip("the temporary folder is mounted nosuid")
    users[ROOT].run("reserve_gpu.reserve('0'); reserve_gpu.release()")
    (path,) = users.locks.glob(GPU0)
    pid = fork(users[NOBODY], BECOME, path, str(program))
    try:
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "set-uid\n")
        for user in (ROOT, DAEMON):
            assert users[user].run(HOLDERS).value == [[pwd.getpwnam(NOBODY).pw_uid, pid]]
    finally:
        users[ROOT].run(f"os.kill({pid}, 9)")


def test_a_process_that_is_sent_a_locked_descriptor_holds_nothing(users: Users) -> None:
    """A process to which another user sends the locked descriptor of a GPU does not hold it."""
    users[ROOT].run("reserve_gpu.reserve('0'); reserve_gpu.release()")
    (path,) = users.locks.glob(GPU0)
    victim = users[NOBODY]
    socket = f"reserve_gpu-{victim.pid}"
    victim.run("import socket; own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)")
    assert victim.run(f"own.bind(chr(0) + {socket!r})").error is None
    pid = fork(users[DAEMON], SEND, path, socket)
    victim.run("data, got, *_ = socket.recv_fds(own, 9, 1)")
    users[DAEMON].run(f"os.waitpid({pid}, 0)")
    for user in (ROOT, NOBODY, DAEMON):
        assert [uid for uid, _ in users[user].run(HOLDERS).value] == [None]
    users.machine.command(sys.executable, "-m", "reserve_gpu", "release", "0", "--end")
    assert victim.run("1").value == 1
    victim.run("os.close(got[0]); own.close()")
