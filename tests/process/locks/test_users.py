"""Several Unix users on one machine: root, which runs the tests, and two others."""

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

from tests.support.locked import MUTEX, locked
from tests.support.machine import LIMIT_S, UUIDS, Child
from tests.support.processes import wait_for
from tests.support.reserving import of_gpu
from tests.support.users import DAEMON, NOBODY, ROOT, Users, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("users")]
GPU0 = f"{UUIDS[0]}.lock"
whole_and_shared = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


@pytest.fixture(scope="module")
def three() -> Iterator[Users]:
    """Start a process of each user."""
    with (
        for_users() as machine,
        child_of(machine, ROOT) as root,
        child_of(machine, NOBODY) as nobody,
        child_of(machine, DAEMON) as daemon,
    ):
        yield Users(machine, {ROOT: root, NOBODY: nobody, DAEMON: daemon})


@pytest.fixture
def users(three: Users) -> Users:
    """Return a process of each user; the lock directory does not exist yet."""
    three.forget()
    return three


# -- common files ----------------------------------------------------------------------------------


@pytest.mark.promise
@whole_and_shared
@pytest.mark.parametrize(("holder", "other"), [(ROOT, NOBODY), (NOBODY, ROOT), (NOBODY, DAEMON)])
def test_a_refusal_names_the_user_and_process_of_the_holder(
    users: Users, holder: str, other: str, *, memory: str | None
) -> None:
    """A GPU that another user holds is refused with the holder's user and PID."""
    first, second = users[holder], users[other]
    assert first.reserve(f"0, memory={memory!r}").value == "0"
    refused = second.reserve("0")
    assert refused.error == "NoFreeDeviceError"
    assert of_gpu(refused.text).startswith(f"reserved: {holder}")
    assert f"pid {first.pid}" in refused.text
    assert second.reserve().value == "1"
    assert first.run("len(reserve_gpu.release())").value == 1
    assert second.reserve("0").value == "0"


@pytest.mark.promise
def test_users_share_a_gpu(users: Users) -> None:
    """Each user that shares a GPU has a lock file of its own, and is listed."""
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


def test_the_parts_of_all_users_count(users: Users) -> None:
    """The parts of all users count towards a GPU's memory, and are listed with their sizes."""
    for user, mib in ((NOBODY, 1000), (ROOT, 2000), (DAEMON, 3000)):
        assert users[user].reserve(f"0, memory='{mib}MiB'").value == "0"
    assert users[NOBODY].reserve("0, memory='3192MiB'").value == "0"
    assert users[DAEMON].reserve("0, memory='3001MiB'").error == "NoFreeDeviceError"
    row = "[(h.user, h.memory_limit_mib) for h in reserve_gpu.status().rows[0].holders]"
    assert sorted(users[ROOT].run(row).value) == [[DAEMON, 3000], [NOBODY, 3192], [ROOT, 2000]]
    users[DAEMON].run("reserve_gpu.release()")
    assert users[ROOT].reserve("0, memory='5000MiB'").value == "0"


@pytest.mark.parametrize("umask", [0o022, 0o777], ids=oct)
def test_files_created_with_any_umask_serve_all_users(users: Users, umask: int) -> None:
    """All users can use the directory and files of one user, whatever its umask."""
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
def test_a_half_created_file_serves_all_users_after_the_next_reservation(
    users: Users, mode: int
) -> None:
    """If a user is killed before chmod(2), that user's next reservation opens the file to all."""
    with child_of(users.machine, NOBODY) as creator:
        creator.run("os.umask(0o077)")
        creator.run(
            "sys.addaudithook(lambda event, arguments: os.kill(os.getpid(), 9) "
            f"if event == 'os.chmod' and arguments[1] == {mode} else None)"
        )
        creator.send("reserve_gpu.reserve()")
        assert creator.process.wait(LIMIT_S) == -signal.SIGKILL
    assert users[NOBODY].reserve().value == "0"
    assert users[DAEMON].reserve().value == "1"


def test_two_users_who_start_at_once_share_the_new_files(users: Users) -> None:
    """Two users that create the lock directory at the same time both get a GPU."""
    both = users[NOBODY], users[DAEMON]
    for _ in range(30):
        for child in both:
            child.run("os.umask(0o077); reserve_gpu.release()")
        shutil.rmtree(users.locks, ignore_errors=True)
        for child in both:
            child.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
        answers = [child.answer() for child in both]
        assert sorted(str(answer.value) for answer in answers) == ["0", "1"], answers


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


@pytest.mark.parametrize(("value", "mode"), [(0, 0o1777), (1, 0o1777), (2, 0o1775)], ids=oct)
def test_protected_files_of_another_user_can_be_locked(users: Users, value: int, mode: int) -> None:
    """With fs.protected_regular, O_CREAT fails on another user's lock file, but locking works."""
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


# -- attacks on another user's lock ----------------------------------------------------------------

# Code that attacks the lock file `path` of another user.
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
# Attacks that only the creator of the lock directory, or of the file, can do.
DELETIONS = ("delete", "rename", "replace", "delete the directory", "rename the directory")


def hold_gpu0(users: Users, *, memory: str | None) -> Path:
    """Let root reserve GPU 0, and return the path of the locked file."""
    assert users[ROOT].reserve(f"0, memory={memory!r}").value == "0"
    (name,) = (name for name in locked(users.locks) if name.startswith(UUIDS[0]))
    assert (".share-" in name) is (memory is not None)
    return users.locks / name


def create_files_as_nobody(users: Users) -> None:
    """Create the lock directory and its files as another user than the holder."""
    for arguments in ("0, memory='1GB'", "0"):
        assert users[NOBODY].reserve(arguments).value == "0"
        users[NOBODY].run("reserve_gpu.release()")


@pytest.mark.promise
@whole_and_shared
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_other_user_can_free_a_gpu(users: Users, attack: str, *, memory: str | None) -> None:
    """After any attack on its lock file, the holder still has the GPU under its own name."""
    holder, attacker = users[ROOT], users[NOBODY]
    path = hold_gpu0(users, memory=memory)
    before = path.stat()
    attacker.run(f"path = {str(path)!r}")
    attacker.run(ATTACKS[attack])
    after = path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    if memory:  # others can't even write to it
        assert b'"pid": %d,' % holder.pid in path.read_bytes()
    for child in (attacker, users[DAEMON]):
        refused = child.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in refused.text
        assert of_gpu(refused.text).startswith("reserved: root")
    assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("open(path, 'w').write('{\"part_mib\": 1}')", id="write"),
        pytest.param("open(path, 'a').write(' ' * 70_000)", id="append"),
        pytest.param(
            "open(path + '.new', 'w').write('{\"part_mib\": 1}'); os.rename(path + '.new', path)",
            id="replace",
        ),
        pytest.param(ATTACKS["delete"], id="delete"),
    ],
)
def test_no_other_user_can_change_the_size_of_a_part(users: Users, attack: str) -> None:
    """After any attack on the file of a part, the part has the same size."""
    path = hold_gpu0(users, memory="5000MiB")
    users[NOBODY].run(f"path = {str(path)!r}")
    users[NOBODY].run(attack)
    for user in (NOBODY, DAEMON):
        assert users[user].reserve("0, memory='3193MiB'").error == "NoFreeDeviceError"
        assert users[user].reserve("0, memory='3192MiB'").value == "0"
        users[user].run("reserve_gpu.release()")


@whole_and_shared
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack not in DELETIONS])
def test_the_creator_of_a_file_cannot_free_another_users_gpu(
    users: Users, attack: str, *, memory: str | None
) -> None:
    """While a lock file exists, its creator can't take a GPU that another user has locked."""
    create_files_as_nobody(users)
    path = hold_gpu0(users, memory=memory)
    assert (path.stat().st_uid == 0) is (memory is not None)
    users[NOBODY].run(f"path = {str(path)!r}")
    users[NOBODY].run(ATTACKS[attack])
    for user in (NOBODY, DAEMON):
        assert users[user].reserve("0").error == "NoFreeDeviceError"
        assert users[user].visible() != "0"
    assert users[ROOT].run("reserve_gpu.current().devices[0].label").value == "GPU0"


# Reserves GPU 0 again in its holder, and returns the texts of the warnings.
RESERVE_AGAIN = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    reserve_gpu.reserve("0", memory={memory!r})
from tests.support.locked import texts
texts(caught)
"""


@whole_and_shared
@pytest.mark.parametrize("attack", DELETIONS)
def test_a_holder_locks_a_file_again_that_its_creator_has_deleted(
    users: Users, attack: str, *, memory: str | None
) -> None:
    """The creator of the lock directory can delete a file; the holder locks it again, and warns."""
    create_files_as_nobody(users)
    holder, creator = users[ROOT], users[NOBODY]
    path = hold_gpu0(users, memory=memory)
    creator.run(f"path = {str(path)!r}")
    assert creator.run(ATTACKS[attack]).error is None
    (warning,) = holder.run(RESERVE_AGAIN.format(memory=memory)).value
    assert str(path) in warning
    for child in (creator, users[DAEMON]):
        refused = child.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {holder.pid}" in refused.text
    assert holder.run(RESERVE_AGAIN.format(memory=memory)).value == []


@whole_and_shared
def test_a_lost_lock_is_reported_with_its_new_holder(users: Users, *, memory: str | None) -> None:
    """If another user reserves a GPU whose file was deleted, the old holder learns the user."""
    create_files_as_nobody(users)
    path = hold_gpu0(users, memory=memory)
    users[NOBODY].run(f"os.unlink({str(path)!r})")
    assert users[DAEMON].reserve("0").value == "0"
    lost = users[ROOT].run(RESERVE_AGAIN.format(memory=memory))
    assert lost.error == "LockError"
    assert f"reserved by {DAEMON}" in lost.text
    assert f"pid {users[DAEMON].pid}" in lost.text


# -- missing permissions ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed(three: Users) -> Path:
    """Create lock directories of root that other users can't use fully, over a second ago."""
    folder = three.machine.folder / "closed"
    for name, mode in (
        *((MUTEX, 0o1777), (GPU0, 0o1777), ("read-only", 0o755)),
        *(("entered by no user", 0o000), ("entered by root", 0o700)),
    ):
        (folder / name).mkdir(parents=True)
        if name in (MUTEX, GPU0):
            (folder / name / name).write_bytes(b"years of work\n")
            (folder / name / name).chmod(0o600)
        (folder / name).chmod(mode)
    changed = folder.stat().st_ctime
    wait_for(lambda: time.time() >= changed + 1.1)  # a younger file might still be in creation
    return folder


def use(child: Child, path: Path) -> Path:
    """Let a child use a lock directory, and return the path."""
    child.run(f"os.environ['RESERVE_GPU_LOCK_DIR'] = {str(path)!r}")
    return path


@pytest.mark.parametrize("name", [GPU0, MUTEX], ids=["GPU", "mutex"])
def test_a_private_file_in_place_of_a_lock_file_is_an_error(
    users: Users, closed: Path, name: str
) -> None:
    """Another user's private file in place of a lock file is named, and is not changed."""
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


@pytest.mark.parametrize("name", ["read-only", "entered by no user", "entered by root"])
def test_a_directory_without_permissions_is_an_error(users: Users, closed: Path, name: str) -> None:
    """A lock directory that this user can't enter or write to is named in the error."""
    path = use(users[NOBODY], closed / name)
    refused = users[NOBODY].reserve()
    assert refused.error == "LockError"
    assert str(path) in refused.text
    assert "RESERVE_GPU_LOCK_DIR" in refused.text
    assert users[NOBODY].visible() is None
    problem = users[NOBODY].run("reserve_gpu.status().problem").value
    assert name == "read-only" or str(path) in problem


def test_existing_lock_files_in_a_read_only_directory_can_be_locked(users: Users) -> None:
    """In a directory of root, another user can reserve the GPUs whose files exist."""
    assert users[ROOT].reserve("count=2").value == "0,1"
    users[ROOT].run("reserve_gpu.release()")
    users.locks.chmod(0o755)
    assert users[NOBODY].reserve().value == "0"


def test_a_ticket_without_permissions_is_ignored(users: Users) -> None:
    """A file in the queue that other users can't open does not prevent a reservation."""
    assert users[NOBODY].reserve().value == "0"
    path = str(users.locks / "queue-65534-0.lock")
    created = users[NOBODY].run(f"os.close(os.open({path!r}, os.O_RDWR | os.O_CREAT, 0))")
    assert created.error is None
    assert users[DAEMON].reserve().value == "1"


# -- passed descriptors ----------------------------------------------------------------------------

# Code of a second process of a user, with a lock that it has acquired.
LOCK = "lock = os.open({path!r}, os.O_RDWR); fcntl.flock(lock, fcntl.LOCK_EX); "
EXECUTE = LOCK + "os.set_inheritable(lock, True); os.execv({to!r}, ['sleep', '1000'])"
SEND = LOCK + (
    "to = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); to.connect(chr(0) + {to!r}); "
    "socket.send_fds(to, [b'x'], [lock])"
)
HOLDERS = "[[h.uid, h.listed_pid] for row in reserve_gpu.status().rows for h in row.holders]"


def fork(child: Child, code: str, path: Path, to: str) -> int:
    """Let a user's process fork a process that runs the code, and return its PID."""
    lines = (
        "import fcntl, socket\npid = os.fork()\nif not pid:\n try: {}\n finally: os._exit(1)\npid"
    )
    pid: int = child.run(lines.format(code.format(path=str(path), to=to))).value
    return pid


def test_the_lock_of_a_set_uid_program_belongs_to_its_user(users: Users) -> None:
    """A lock of a set-UID program belongs to the user that started the program."""
    program = users.machine.folder / "set-uid"
    shutil.copy(shutil.which("sleep") or "", program)
    program.chmod(0o4755)
    if os.statvfs(program).f_flag & os.ST_NOSUID:
        pytest.skip("the temporary folder is mounted nosuid")
    users[ROOT].run("reserve_gpu.reserve('0'); reserve_gpu.release()")
    (path,) = users.locks.glob(GPU0)
    pid = fork(users[NOBODY], EXECUTE, path, str(program))
    try:
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "set-uid\n")
        for user in (ROOT, DAEMON):
            assert users[user].run(HOLDERS).value == [[pwd.getpwnam(NOBODY).pw_uid, pid]]
    finally:
        users[ROOT].run(f"os.kill({pid}, 9)")


def test_a_process_that_receives_a_locked_descriptor_holds_nothing(users: Users) -> None:
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
