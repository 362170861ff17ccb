"""A lock directory on btrfs, where the kernel's list of locks has another number than stat(2)."""

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
WAITS = """
import time
def progress(waiting):
    if waiting.waited_s > {quiet_s}:
        open("quiet", "w")
reserve_gpu.reserve(0, wait=60, progress=progress)
time.monotonic()
"""
QUEUE = """
import time
from reserve_gpu.locks.directory import LockDirectory
while not os.path.exists("quiet"):
    time.sleep(0.01)
with LockDirectory() as directory, directory.mutex():
    pids = [ticket.holder.pid for ticket in directory.tickets()]
pids
"""
ROWS = "[[r.state.value, r.is_mine, [[h.pid, h.seen, h.confirmed] for h in r.holders]] for r in {}]"
QUIET_S = policy.LIVELY_S + policy.QUIET_S + 0.5  # then a look has just been, and no other is due
SOON_S = policy.QUIET_S / 2  # without a notice that is understood the next look comes later


@pytest.fixture
def start(machine: Machine) -> Iterator[Start]:
    """Start processes that alone see a btrfs, and have their locks there."""
    if os.geteuid() or not program("mkfs.btrfs"):
        pytest.skip("this needs root, and mkfs.btrfs (Debian: btrfs-progs)")
    can = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", "true"]
    tried = subprocess.run(can, cwd=machine.folder, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no btrfs can be mounted here: {tried.stderr}")
    locks = str(machine.folder / "mounted" / "locks")
    first = ("unshare", "--mount", "sh", "-c", MOUNT, "sh")
    with process(machine, locks, *first) as mounter:
        enter = ("nsenter", f"--mount=/proc/{mounter.pid}/ns/mnt", f"--wd={machine.folder}")
        yield lambda: process(machine, locks, *enter)


@contextmanager
def process(machine: Machine, locks: str, *prefix: str) -> Iterator[Child]:
    child = Child(machine.environ(RESERVE_GPU_LOCK_DIR=locks), machine.folder, *prefix)
    try:
        yield child
    finally:
        child.kill()


def test_one_holder(start: Start) -> None:
    """One process has a GPU, and others are told its pid, which the kernel confirms."""
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


def test_sharers(start: Start) -> None:
    """Sharers share, whoever wants the whole GPU is refused, and each sharer is seen."""
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
def test_hand_over(start: Start, end: str) -> None:
    """Who waits gets the GPU at once when its holder releases it, or is killed."""
    with start() as holder, start() as waiter, start() as other:
        assert holder.reserve("0").value == "0"
        waiter.send(WAITS.format(quiet_s=QUIET_S))
        assert other.run(QUEUE).value == [waiter.pid]
        before = other.run("time.monotonic()").value
        if end == "kill":
            holder.kill()
        else:
            holder.run("reserve_gpu.release()")
        assert waiter.answer().value - before < SOON_S
