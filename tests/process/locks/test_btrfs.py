"""A lock directory on btrfs, whose device numbers in /proc/locks and stat(2) differ."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.allocation import policy
from tests.support.machine import Child, Machine, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Start = Callable[[], AbstractContextManager[Child]]

pytestmark = [pytest.mark.full]

MOUNT = """
set -e
mkdir -p mounted
truncate -s 128M image
mkfs.btrfs -q -f image >&2
mount -o loop image mounted
exec "$@"
"""
WAIT = """
import time
def progress(waiting):
    if waiting.waited_s > {quiet_s}:
        open("quiet", "w")
reserve_gpu.reserve(0, wait=60, progress=progress)
time.monotonic()
"""
READ_QUEUE = """
import time
from reserve_gpu.locks.directory import LockDirectory
while not os.path.exists("quiet"):
    time.sleep(0.01)
with LockDirectory() as directory, directory.mutex():
    pids = [ticket.holder.pid for ticket in directory.tickets()]
pids
"""
ROWS = "[[r.state.value, r.is_mine, [[h.pid, h.seen, h.confirmed] for h in r.holders]] for r in {}]"
QUIET_S = policy.LIVELY_S + policy.QUIET_S + 0.5  # no check is due soon after this time
SOON_S = policy.QUIET_S / 2  # the next regular check comes later


@pytest.fixture
def start(machine: Machine) -> Iterator[Start]:
    """Return a function that starts a process with its lock directory on a mounted btrfs."""
    if os.geteuid() or not program("mkfs.btrfs"):
        pytest.skip("this needs root, and mkfs.btrfs (Debian: btrfs-progs)")
    mount = ["unshare", "--mount", "sh", "-c", MOUNT, "sh"]
    tried = subprocess.run(
        [*mount, "true"], cwd=machine.folder, capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no btrfs can be mounted here: {tried.stderr}")
    locks = str(machine.folder / "mounted" / "locks")
    with process(machine, locks, *mount) as mounter:
        enter = ("nsenter", f"--mount=/proc/{mounter.pid}/ns/mnt", f"--wd={machine.folder}")
        yield lambda: process(machine, locks, *enter)


@contextmanager
def process(machine: Machine, locks: str, *prefix: str) -> Iterator[Child]:
    """Start a process with this lock directory, and kill it at the end."""
    child = Child(machine.environ(RESERVE_GPU_LOCK_DIR=locks), machine.folder, *prefix)
    try:
        yield child
    finally:
        child.kill()


def test_a_holder_is_listed_with_its_pid(start: Start) -> None:
    """A holder is found in /proc/locks, and a refusal names its PID."""
    with start() as holder, start() as other:
        assert holder.reserve("0").value == "0"
        number = holder.run("os.stat(reserve_gpu.locks.directory.default_path()).st_dev").value
        listed = holder.run("open('/proc/locks').read()").value
        assert f" {holder.pid} {os.major(number):02x}:{os.minor(number):02x}:" not in listed
        refused = other.reserve("0")
        assert refused.error == "NoFreeDeviceError"
        assert f"(pid {holder.pid})" in refused.text
        assert other.reserve().value == "1"
        rows = other.run(ROWS.format("reserve_gpu.status().rows")).value
    assert rows == [
        ["reserved", False, [[holder.pid, True, True]]],
        ["reserved", True, [[other.pid, True, True]]],
    ]


def test_sharers_are_listed(start: Start) -> None:
    """Each sharer of a GPU is listed, and a request for the whole GPU is refused."""
    with start() as one, start() as two, start() as other:
        for sharer in (one, two):
            assert sharer.reserve("0, memory='1GB'").value == "0"
        assert other.reserve("0").error == "NoFreeDeviceError"
        (row, _) = other.run(ROWS.format("reserve_gpu.status().rows")).value
        assert sorted(row[2]) == sorted([sharer.pid, True, True] for sharer in (one, two))
        one.kill()
        assert other.reserve("0").error == "NoFreeDeviceError"
        two.kill()
        assert other.reserve("0").value == "0"


@pytest.mark.parametrize("end", ["release", "kill"])
def test_a_waiter_notices_that_a_gpu_is_free(start: Start, end: str) -> None:
    """A waiter gets a GPU at once when its holder releases it or is killed."""
    with start() as holder, start() as waiter, start() as other:
        assert holder.reserve("0").value == "0"
        waiter.send(WAIT.format(quiet_s=QUIET_S))
        assert other.run(READ_QUEUE).value == [waiter.pid]
        before = other.run("time.monotonic()").value
        if end == "kill":
            holder.kill()
        else:
            holder.run("reserve_gpu.release()")
        assert waiter.answer().value - before < SOON_S
