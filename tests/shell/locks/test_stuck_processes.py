"""Tests of the later files of the mutex, which are used if a killed process keeps the first."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks.directory import MUTEXES, LockDirectory
from reserve_gpu.model.errors import MutexHeldError
from reserve_gpu.system import procfs
from tests.support.machine import TAKE_THE_MUTEX
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here


# Locks a later file of the mutex.
LOCK_A_FILE = """
import fcntl, os
from reserve_gpu.system.file_control import lock_file, read_lock
descriptor = os.open({path!r}, os.O_RDWR | os.O_CREAT, 0o666)
{locks}
"""


@pytest.mark.parametrize(
    "locks", ["read_lock(descriptor)", "lock_file(descriptor)"], ids=["marked only", "locked only"]
)
def test_half_a_lock_of_a_later_file_does_not_hold_the_mutex(here: Here, locks: str) -> None:
    """A process must have both locked and marked a later file to hold the mutex."""
    with here.child() as other, LockDirectory() as directory:
        code = LOCK_A_FILE.format(path=str(here.locks / MUTEXES[1]), locks=locks)
        assert other.run(code).error is None
        with directory.mutex(0.0):
            pass


def test_a_later_file_counts_without_the_files_before_it(here: Here) -> None:
    """The holder of any later file holds the mutex, and the error contains its pid."""
    with here.child() as holder, LockDirectory() as directory:
        locks = "lock_file(descriptor), read_lock(descriptor)"
        code = LOCK_A_FILE.format(path=str(here.locks / MUTEXES[3]), locks=locks)
        assert holder.run(code).error is None
        with pytest.raises(MutexHeldError, match=rf"process {holder.pid} of"):
            directory.mutex(0.2).__enter__()


def test_a_stopped_holder_of_the_mutex(here: Here) -> None:
    """The error about a stopped holder of the mutex contains the command that continues it."""
    with here.child() as holder, LockDirectory() as directory:
        assert holder.run(TAKE_THE_MUTEX).error is None
        os.kill(holder.pid, signal.SIGSTOP)
        wait_for(lambda: procfs.is_stopped(holder.pid))
        with pytest.raises(MutexHeldError, match=rf"process {holder.pid} of") as refused:
            directory.mutex(1.0).__enter__()
        assert f"kill -CONT {holder.pid}" in str(refused.value)
