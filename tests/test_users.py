"""Several Unix users on one machine: root, who runs the tests, and nobody."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.machine import LIMIT_S, Child, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY, DAEMON = "nobody", "daemon"
UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
GPU0 = f"{UUIDS[0]}.lock"
MUTEX = "mutex.lock"


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with two idle GPUs on which other users can run Python as well."""
    if os.geteuid():
        pytest.skip("needs root, to become other users")
    folder = Path(tempfile.mkdtemp(prefix="reserve_gpu-users-", dir="/tmp"))
    try:
        folder.chmod(0o1777)
        machine = Machine(folder)
        machine.write("\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS))
        machine.log.touch()
        machine.log.chmod(0o666)
        for user in (NOBODY, DAEMON):
            require(machine, user)
        yield machine
    finally:
        shutil.rmtree(folder)


def as_user(user: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", "--regid=65534", "--clear-groups"]


def require(machine: Machine, user: str) -> None:
    """Skip the test where the user is missing, or can't run this Python."""
    done = subprocess.run(
        [*as_user(user), sys.executable, "-c", "import reserve_gpu, pynvml"],
        env=machine.environ(), cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{user} can't run {sys.executable} here: {done.stderr.strip()[-200:]}")


@contextmanager
def child(machine: Machine, user: str) -> Iterator[Child]:
    """A process of that user; killed at the end."""
    child = Child(machine.environ(HOME="/nonexistent"), machine.folder, *as_user(user))
    try:
        yield child
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("holder", "other"), [("root", NOBODY), (NOBODY, "root"), (NOBODY, DAEMON)]
)
def test_another_users_kernel_is_named_with_its_user(
    machine: Machine, holder: str, other: str
) -> None:
    """Who finds a GPU reserved is told which user's process has it, whoever the two are."""
    with child(machine, holder) as first, child(machine, other) as second:
        assert first.reserve("0").value == "0"
        refused = second.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"reserved by {holder}" in refused.text
        assert f"pid {first.pid}" in refused.text
        assert "unconfirmed" not in refused.text
        assert second.reserve().value == "1"
        first.kill()
        assert second.reserve("0").value == "0"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o777], ids=oct)
def test_locks_made_under_any_umask_serve_all_users(machine: Machine, umask: int) -> None:
    """Whoever makes the directory and the files, under whatever umask, others can use them."""
    with child(machine, NOBODY) as first:
        first.run(f"os.umask({umask})")
        assert first.reserve("count=2").value == "0,1"
    with child(machine, DAEMON) as second:
        second.run(f"os.umask({umask})")
        assert second.reserve("count=2").value == "0,1"
        with child(machine, NOBODY) as first:
            assert first.reserve().error == "NoFreeDeviceError"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in machine.locks.iterdir()}
    assert modes == {0o666}
    assert stat.S_IMODE(machine.locks.stat().st_mode) == 0o1777


@pytest.mark.parametrize("mode", [0o1777, 0o666], ids=["directory", "file"])
def test_a_user_killed_while_making_them_locks_nobody_out(machine: Machine, mode: int) -> None:
    """What is half made as its maker is killed with -9 serves all once that user reserves again."""
    with child(machine, NOBODY) as maker:
        maker.run("os.umask(0o077)")
        # The interpreter calls the hook before each chmod(2): before what was made is for all.
        maker.run(
            "sys.addaudithook(lambda event, arguments: os.kill(os.getpid(), 9) "
            f"if event == 'os.chmod' and arguments[1] == {mode} else None)"
        )
        maker.send("reserve_gpu.reserve()")
        assert maker.process.wait(LIMIT_S) == -signal.SIGKILL
    with child(machine, NOBODY) as maker, child(machine, DAEMON) as other:
        assert maker.reserve().value == "0"
        assert other.reserve().value == "1"


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
    machine: Machine, value: int, mode: int
) -> None:
    """With fs.protected_regular another user's lock file serves, though O_CREAT on it fails."""
    with child(machine, NOBODY) as first:
        assert first.reserve("count=2").value == "0,1"
    machine.locks.chmod(mode)
    os.chown(machine.locks, 0, 0)  # the kernel trusts files of the directory's owner
    with protected_regular(value), child(machine, DAEMON) as second:
        path = str(machine.locks / GPU0)
        opened = second.run(f"os.close(os.open({path!r}, os.O_RDWR | os.O_CREAT))")
        assert opened.error == ("PermissionError" if value else None)
        assert second.reserve("count=2").value == "0,1"
        with child(machine, NOBODY) as first:
            refused = first.reserve()
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {second.pid}" in refused.text


# What another user may try on the lock: code, with its path as `path`.
ATTACKS = {
    "delete": "os.unlink(path)",
    "rename": "os.rename(path, path + '.old')",
    "replace": "open(path + '.new', 'w').close(); os.rename(path + '.new', path)",
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


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_user_can_free_anothers_gpu(machine: Machine, attack: str) -> None:
    """Whatever another user does to a lock, its holder keeps the GPU, under its own name."""
    users = child(machine, "root"), child(machine, NOBODY), child(machine, DAEMON)
    with users[0] as holder, users[1] as other, users[2] as third:
        assert holder.reserve("0").value == "0"
        path = machine.locks / GPU0
        before = path.stat()
        other.run(f"path = {str(path)!r}")
        other.run(ATTACKS[attack])
        after = path.stat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
        for one in (other, third):
            refused = one.reserve("0")
            assert refused.error == "NoFreeDeviceError"
            assert f"pid {holder.pid}" in refused.text
            assert "reserved by root" in refused.text
        assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"


@pytest.mark.parametrize("share", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_not_even_who_made_the_files_can_free_anothers_gpu(
    machine: Machine, attack: str, *, share: bool
) -> None:
    """Whoever made the directory and the files can delete them, but gives nobody a GPU by it."""
    users = child(machine, NOBODY), child(machine, "root"), child(machine, DAEMON)
    with users[0] as maker, users[1] as holder, users[2] as third:
        assert maker.reserve("0, share=True").value == "0"
        maker.run("reserve_gpu.release()")
        assert maker.reserve("0").value == "0"
        maker.run("reserve_gpu.release()")
        assert holder.reserve(f"0, share={share}").value == "0"
        path = machine.locks / (GPU0.replace(".lock", ".shared") if share else GPU0)
        assert path.stat().st_uid != 0
        maker.run(f"path = {str(path)!r}")
        maker.run(ATTACKS[attack])
        for one in (maker, third):
            assert one.reserve("0").error in ("NoFreeDeviceError", "LockError")
            assert one.visible() != "0"
        assert holder.run("reserve_gpu.current().devices[0].label").value == "GPU0"


@pytest.mark.parametrize("name", [GPU0, MUTEX])
def test_another_users_closed_file_is_an_error_that_names_it(machine: Machine, name: str) -> None:
    """Somebody's file of mode 0600 in place of a lock is left alone and named."""
    machine.locks.mkdir()
    machine.locks.chmod(0o1777)
    path = machine.locks / name
    path.write_bytes(b"years of work\n")
    path.chmod(0o600)
    with child(machine, NOBODY) as other:
        refused = other.reserve("0")
        assert refused.error == ("LockError" if name == MUTEX else "NoFreeDeviceError")
        assert str(path) in refused.text
        assert "0666" in refused.text
        if name == GPU0:
            assert other.run("reserve_gpu.release()").error is None
            assert other.reserve().value == "1"
    assert path.read_bytes() == b"years of work\n"


def test_a_directory_that_one_may_not_write_to_is_an_error(machine: Machine) -> None:
    """Where a user can make no lock file the error tells to use another directory."""
    machine.locks.mkdir()
    machine.locks.chmod(0o755)
    with child(machine, NOBODY) as other:
        refused = other.reserve()
        assert refused.error == "LockError"
        assert str(machine.locks) in refused.text
        assert "RESERVE_GPU_LOCK_DIR" in refused.text
        assert other.visible() is None


def test_lock_files_that_are_there_serve_where_no_new_one_can_be_made(machine: Machine) -> None:
    """In a directory of root's with root's lock files a user can reserve what has a file."""
    with machine.child() as first:
        assert first.reserve("count=2").value == "0,1"
    machine.locks.chmod(0o755)
    with child(machine, NOBODY) as other:
        assert other.reserve().value == "0"


@pytest.mark.parametrize("mode", [0o000, 0o700], ids=oct)
def test_a_directory_closed_to_this_user_is_an_error(machine: Machine, mode: int) -> None:
    """A lock directory that this user may not enter is named, with the way out."""
    machine.locks.mkdir()
    machine.locks.chmod(mode)
    with child(machine, NOBODY) as other:
        refused = other.reserve()
        problem = other.run("reserve_gpu.status().problem").value
    assert refused.error == "LockError"
    assert str(machine.locks) in refused.text
    assert "RESERVE_GPU_LOCK_DIR" in refused.text
    assert str(machine.locks) in problem


def test_a_file_is_never_seen_half_made(machine: Machine) -> None:
    """Two users who meet in an empty directory both get a GPU, whoever makes the files."""
    with child(machine, NOBODY) as one, child(machine, DAEMON) as two:
        for _ in range(60):
            for each in (one, two):
                each.run("os.umask(0o077); reserve_gpu.release()")
            shutil.rmtree(machine.locks, ignore_errors=True)
            for each in (one, two):
                each.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
            got = [each.answer() for each in (one, two)]
            assert sorted(str(answer.value) for answer in got) == ["0", "1"], got
