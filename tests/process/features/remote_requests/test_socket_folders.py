"""The folder for a user's sockets, in a directory in which all users can create files."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.reservation import socket_directory
from tests.support.locked import held
from tests.support.remote_release import LISTEN, is_heard, release, uid_of
from tests.support.users import DAEMON, NOBODY, UUIDS, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

pytestmark = [pytest.mark.xdist_group("users")]

# Code that creates a file of another user with the folder's name, `path`.
SQUATTERS = {
    "file": "open(path, 'w').close()",
    "FIFO": "os.mkfifo(path)",
    "link": "os.symlink('/', path)",
    "dangling link": "os.symlink('/nowhere', path)",
    "folder": "os.mkdir(path, 0o777)",
    "closed folder": "os.mkdir(path, 0)",
}


@pytest.fixture
def users() -> Iterator[Machine]:
    """Make a machine with several users and an empty lock directory."""
    with for_users() as machine:
        machine.locks.mkdir(mode=0o1777)
        machine.locks.chmod(0o1777)
        yield machine


def folder_of(machine: Machine, user: str) -> Path:
    """Return the default path of a user's folder."""
    return machine.locks / socket_directory.NAME.format(uid=uid_of(user))


def run_with_path(child: Child, path: Path, code: str) -> None:
    """Run code that uses `path` in a child process."""
    assert child.run(f"path = {str(path)!r}\n{code}").error is None


def own_folders(machine: Machine, user: str) -> list[Path]:
    """Return a user's folders for sockets."""
    found = []
    default = folder_of(machine, user)
    for path in machine.locks.glob(f"{default.name}*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == uid_of(user):
                found.append(path)
    return found


@pytest.mark.parametrize("code", SQUATTERS.values(), ids=SQUATTERS)
def test_file_of_another_user_prevents_no_request(users: Machine, code: str) -> None:
    """A process receives requests although another user has taken the name of its folder."""
    path = folder_of(users, NOBODY)
    with (
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as first,
        child_of(users, NOBODY) as same,
        users.child() as root,
    ):
        run_with_path(other, path, code)
        before = path.lstat()
        assert first.run(LISTEN).error is None
        assert is_heard(same, first, NOBODY)
        assert is_heard(root, first, NOBODY)
        assert not is_heard(other, first, NOBODY)
        after = path.lstat()
        assert (after.st_ino, after.st_mtime) == (before.st_ino, before.st_mtime)


def test_own_folder_with_unsafe_permissions_is_not_used(users: Machine) -> None:
    with child_of(users, NOBODY) as first:
        path = folder_of(users, NOBODY)
        run_with_path(first, path, "os.mkdir(path); os.chmod(path, 0o711)")
        assert first.run(LISTEN).error is None
        assert is_heard(first, first, NOBODY)
        assert not list(path.iterdir())


def test_surplus_folders_are_removed(users: Machine) -> None:
    """A process that listens removes its user's empty surplus folders."""
    path = folder_of(users, NOBODY)
    with child_of(users, DAEMON) as other, child_of(users, NOBODY) as first:
        run_with_path(other, path, "os.mkdir(path); os.mkdir(f'{path}-other', 0o700)")
        run_with_path(
            first,
            path,
            "for number in range(9): os.mkdir(f'{path}-{number}', 0o700)\n"
            "open(f'{path}-8/kept', 'w').close()",
        )
        assert first.run(LISTEN).error is None
        assert [each.name[-1] for each in sorted(own_folders(users, NOBODY))] == ["0", "8"]
        assert path.with_name(f"{path.name}-other").exists()


def test_folder_is_found_among_thousands_of_names(users: Machine) -> None:
    code = (
        "for number in range(5000):\n"
        " os.mkdir(f'{path}-{number}') if number % 2 else open(f'{path}-{number}', 'w').close()\n"
        "os.mkdir(path)"
    )
    with child_of(users, DAEMON) as other, child_of(users, NOBODY) as first:
        run_with_path(other, folder_of(users, NOBODY), code)
        for _ in range(2):
            assert first.run(LISTEN).error is None
        assert is_heard(first, first, NOBODY)
        assert len(own_folders(users, NOBODY)) == 1


def test_renamed_folder_is_found(users: Machine) -> None:
    """A process receives requests although the directory's owner has renamed its folder."""
    os.chown(users.locks, uid_of(DAEMON), -1)
    with (
        child_of(users, DAEMON) as other,
        child_of(users, NOBODY) as first,
        child_of(users, NOBODY) as same,
        users.child() as root,
    ):
        assert first.run(LISTEN).error is None
        rename = "os.rename(path, path.replace('asked', 'x')); os.mkdir(path, 0o777)"
        run_with_path(other, folder_of(users, NOBODY), rename)
        assert is_heard(same, first, NOBODY)
        assert is_heard(root, first, NOBODY)
        assert same.run(LISTEN).error is None
        assert is_heard(first, same, NOBODY)


def test_folder_that_is_removed_before_its_use_is_created_again(users: Machine) -> None:
    """Two processes of a user that start and stop listening at the same time both listen."""
    again = f"{LISTEN}\nfor _ in range(200):\n listener.stop()\n start()"
    with child_of(users, NOBODY) as first, child_of(users, NOBODY) as second:
        for child in (first, second):
            child.send(again)
        for child in (first, second):
            assert child.answer().error is None
        assert is_heard(first, second, NOBODY)
        assert is_heard(second, first, NOBODY)


def test_cell_warns_if_no_folder_can_be_created(users: Machine) -> None:
    for name in ("mutex", *UUIDS):
        (users.locks / f"{name}.lock").touch()
        (users.locks / f"{name}.lock").chmod(0o666)
    users.locks.chmod(0o755)
    done = users.command(
        *as_user(NOBODY), sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor",
        "--ext=reserve_gpu", "-c", "%reserve_gpu 1\n1", IPYTHONDIR=str(users.folder / "ipython"),
    )  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES = '1'" in done.stdout
    assert (done.stdout + done.stderr).count(f"create a socket in {users.locks}") == 1


def test_notebook_releases_its_gpu_despite_another_file(here: Here) -> None:
    here.locks.mkdir(mode=0o1777)
    (here.locks / socket_directory.NAME.format(uid=os.geteuid())).touch()
    with here.kernel() as kernel:
        assert "Warning" not in kernel.run("%reserve_gpu 1").all
        assert release(here).returncode == 0
        assert held(here) == []
