"""The folder for a user's sockets, in a directory where all users may create anything."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.reservation import socket_directory
from tests.support.processes import US, wait_for
from tests.support.users import DAEMON, NOBODY, UUIDS, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

pytestmark = [pytest.mark.xdist_group("users")]

LISTEN = (
    "from reserve_gpu.locks.directory import LockDirectory\n"
    "with LockDirectory(): pass\n"
    "from reserve_gpu.reservation.remote_release import ask\n"
    "from reserve_gpu.features.remote_requests.handler import Listener\n"
    "listener = Listener(lambda request: {'answer': 'RELEASED'})\n"
    "from reserve_gpu.reservation import socket_directory\n"
    "def start():\n"
    " try: listener.start(socket_directory.open_first)\n"
    " except OSError: listener.start(socket_directory.open_any)\n"
    "start()"
)
ASK = "from reserve_gpu.reservation.remote_release import ask\nask({}, {}, {{}})"
HEARD = {"answer": "RELEASED"}
# What stands under the folder's name; `path` is that.
SQUATTERS = {
    "file": "open(path, 'w').close()",
    "unreadable file": "os.close(os.open(path, os.O_CREAT, 0))",
    "FIFO": "os.mkfifo(path)",
    "link": "os.symlink('/', path)",
    "dangling link": "os.symlink('/nowhere', path)",
    "link to itself": "os.symlink(path, path)",
    "socket": "import socket; socket.socket(socket.AF_UNIX).bind(path)",
    "folder": "os.mkdir(path, 0o777)",
    "closed folder": "os.mkdir(path, 0)",
}


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        machine.locks.mkdir(mode=0o1777)
        machine.locks.chmod(0o1777)
        yield machine


def uid_of(user: str) -> int:
    return pwd.getpwnam(user).pw_uid


def name_of(user: str) -> str:
    return socket_directory.NAME.format(uid=uid_of(user))


def squat(child: Child, path: Path, how: str) -> None:
    assert child.run(f"path = {str(path)!r}\n{how}").error is None


def own(machine: Machine, user: str) -> list[Path]:
    """Return a user's folders for sockets."""
    found = []
    for path in machine.locks.glob(f"{name_of(user)}*"):
        with suppress(FileNotFoundError):  # removed since it was listed
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == uid_of(user):
                found.append(path)
    return found


def is_heard(asking: Child, listening: Child, user: str) -> bool:
    return bool(asking.run(ASK.format(listening.pid, uid_of(user))).value == HEARD)


@pytest.mark.parametrize("how", SQUATTERS.values(), ids=SQUATTERS)
def test_a_squatter_keeps_no_request_away(users: Machine, how: str) -> None:
    """A process is asked whatever another user puts under its folder's name."""
    path = users.locks / name_of(NOBODY)
    with (
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as first,
        child_of(users, NOBODY) as same,
        users.child() as root,
    ):
        squat(other, path, how)
        before = path.lstat()
        assert first.run(LISTEN).error is None
        assert is_heard(same, first, NOBODY)
        assert is_heard(root, first, NOBODY)
        assert not is_heard(other, first, NOBODY)
        after = path.lstat()
        assert (after.st_ino, after.st_mtime) == (before.st_ino, before.st_mtime)


def test_an_own_folder_that_is_open_is_not_used(users: Machine) -> None:
    """A user's own folder gets no socket if others may enter it."""
    with child_of(users, NOBODY) as first:
        path = users.locks / name_of(NOBODY)
        squat(first, path, "os.mkdir(path); os.chmod(path, 0o711)")
        assert first.run(LISTEN).error is None
        assert is_heard(first, first, NOBODY)
        assert not list(path.iterdir())


@pytest.mark.parametrize("how", ["os.mkdir(path)", "open(path, 'w').close()"])
def test_one_folder_for_all_reservations(users: Machine, how: str) -> None:
    """With a squatter, all processes of a user share one folder, and the last one removes it."""
    with (
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as first,
        child_of(users, NOBODY) as second,
    ):
        squat(other, users.locks / name_of(NOBODY), how)
        for child in (first, second):
            assert child.run(LISTEN).error is None
        for _ in range(5):
            second.run("listener.stop()")
            assert second.run(LISTEN).error is None
        assert len(own(users, NOBODY)) == 1
        assert is_heard(second, first, NOBODY)
        for child in (first, second):
            child.run("listener.stop()")
        wait_for(lambda: not own(users, NOBODY))
        assert (users.locks / name_of(NOBODY)).exists()


def test_surplus_folders_are_removed(users: Machine) -> None:
    """A process that listens removes its user's surplus folders if they are empty."""
    with child_of(users, DAEMON) as other, child_of(users, NOBODY) as first:
        squat(other, users.locks / name_of(NOBODY), "os.mkdir(path)")
        squat(other, users.locks / f"{name_of(NOBODY)}-other", "os.mkdir(path, 0o700)")
        squat(
            first,
            users.locks / f"{name_of(NOBODY)}-",
            "for number in range(9): os.mkdir(f'{path}{number}', 0o700)\n"
            "open(f'{path}8/kept', 'w').close()",
        )
        assert first.run(LISTEN).error is None
        assert [path.name[-1] for path in sorted(own(users, NOBODY))] == ["0", "8"]
        assert (users.locks / f"{name_of(NOBODY)}-other").exists()


def test_thousands_of_squatters(users: Machine) -> None:
    """A user gets one folder, and it is found, among thousands of names of another user."""
    make = (
        "for number in range(5000):\n"
        " os.mkdir(f'{path}-{number}') if number % 2 else open(f'{path}-{number}', 'w').close()\n"
        "os.mkdir(path)"
    )
    with child_of(users, DAEMON) as other, child_of(users, NOBODY) as first:
        squat(other, users.locks / name_of(NOBODY), make)
        for _ in range(2):
            assert first.run(LISTEN).error is None
        assert is_heard(first, first, NOBODY)
        assert len(own(users, NOBODY)) == 1


@pytest.mark.parametrize("umask", [0o777, 0o277, 0o077, 0])
def test_any_umask(users: Machine, umask: int) -> None:
    """A process is asked, and its folder is closed to others, with any umask."""
    with child_of(users, NOBODY) as first:
        assert first.run(f"os.umask({umask})\n{LISTEN}").error is None
        assert is_heard(first, first, NOBODY)
        assert [path.stat().st_mode & 0o777 for path in own(users, NOBODY)] == [0o700]


def test_the_owner_of_the_directory_renames_the_folder(users: Machine) -> None:
    """A process is asked although the directory's owner has renamed its folder."""
    path = users.locks / name_of(NOBODY)
    os.chown(users.locks, uid_of(DAEMON), -1)
    with (
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as first,
        child_of(users, NOBODY) as same,
        users.child() as root,
    ):
        assert first.run(LISTEN).error is None
        squat(other, path, "os.rename(path, path.replace('asked', 'x')); os.mkdir(path, 0o777)")
        assert is_heard(same, first, NOBODY)
        assert is_heard(root, first, NOBODY)
        assert same.run(LISTEN).error is None
        assert is_heard(first, same, NOBODY)


def test_a_folder_that_is_removed_before_its_use(users: Machine) -> None:
    """Two processes of a user that start and stop listening at the same time both listen."""
    again = f"{LISTEN}\nfor _ in range(200):\n listener.stop()\n start()"
    with child_of(users, NOBODY) as first, child_of(users, NOBODY) as second:
        for child in (first, second):
            child.send(again)
        for child in (first, second):
            assert child.answer().error is None
        assert is_heard(first, second, NOBODY)
        assert is_heard(second, first, NOBODY)


def test_no_folder_is_said_when_reserving(users: Machine) -> None:
    """The cell that reserves warns if no folder can be created, and says what --end skips."""
    for name in ("mutex", *UUIDS):
        (users.locks / f"{name}.lock").touch()
        (users.locks / f"{name}.lock").chmod(0o666)
    users.locks.chmod(0o755)
    lines = ("%reserve_gpu 1", "1")
    done = users.command(
        *as_user(NOBODY), sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor",
        "--ext=reserve_gpu", "-c", "\n".join(lines), IPYTHONDIR=str(users.folder / "ipython"),
    )  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES = '1'" in done.stdout
    said = (
        " release can't ask this kernel to release GPU1, because the kernel can't create a socket "
        f"in {users.locks} (Permission denied). With --end, it can still end the kernel, but "
        "without calling before_end() functions."
    )
    assert (done.stdout + done.stderr).count(said) == 1


def test_a_notebook_with_a_squatter(here: Here) -> None:
    """A notebook releases its GPU on request although another file has its folder's name."""
    here.locks.mkdir(mode=0o1777)
    (here.locks / socket_directory.NAME.format(uid=os.geteuid())).touch()
    with here.kernel() as kernel:
        assert "Warning" not in kernel.run("%reserve_gpu 1").all
        assert here.command(*US, "release").stdout.startswith("Released GPU1")
