"""Processes of several Unix users on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import TWO_GPUS, Child, Machine
from tests.support.machine import UUIDS as GPU_UUIDS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT, NOBODY, DAEMON = "root", "nobody", "daemon"
UUIDS = GPU_UUIDS


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Make a machine with two idle GPUs for several users."""
    with for_users() as machine:
        yield machine


@contextmanager
def for_users() -> Iterator[Machine]:
    """Make a machine with two idle GPUs for several users, or skip the test."""
    if os.geteuid():
        pytest.skip("needs root, to become other users")
    folder = Path(tempfile.mkdtemp(prefix="reserve_gpu-users-", dir="/tmp"))
    try:
        folder.chmod(0o1777)
        machine = Machine(folder)
        machine.write(TWO_GPUS)
        machine.log.touch()
        machine.log.chmod(0o666)
        for user in (NOBODY, DAEMON):
            require(machine, user)
        yield machine
    finally:
        shutil.rmtree(folder)


def as_user(user: str) -> list[str]:
    """Return the prefix of a command that runs as another user."""
    return ["setpriv", f"--reuid={user}", "--regid=65534", "--clear-groups"]


_problems: dict[str, str] = {}  # keyed by user


def require(machine: Machine, user: str) -> None:
    """Skip the test if the user is missing, or can't run this Python."""
    if user not in _problems:
        done = subprocess.run(
            [*as_user(user), sys.executable, "-c", "import reserve_gpu, pynvml"],
            env=machine.environ(), cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip
        _problems[user] = done.stderr.strip()[-200:] if done.returncode else ""
    if _problems[user]:
        pytest.skip(f"{user} can't run {sys.executable} here: {_problems[user]}")


@contextmanager
def child_of(machine: Machine, user: str) -> Iterator[Child]:
    """Start a process of this user, and kill it at the end."""
    child = Child(machine.environ(HOME="/nonexistent"), machine.folder, *as_user(user))
    try:
        yield child
    finally:
        child.kill()


class Users:
    """A process of each user, on a machine whose lock directory is deleted before each test."""

    def __init__(self, machine: Machine, children: dict[str, Child]) -> None:
        self.machine, self._children = machine, children
        self.locks = machine.locks

    def __getitem__(self, user: str) -> Child:
        return self._children[user]

    def forget(self) -> None:
        """Release all GPUs, and delete the lock directory."""
        for child in self._children.values():
            child.run("os.umask(0o022); reserve_gpu.release()")
            child.run(f"os.environ['RESERVE_GPU_LOCK_DIR'] = {str(self.locks)!r}")
        for path in (self.locks, self.locks.with_suffix(".old")):
            shutil.rmtree(path, ignore_errors=True)
