"""Waiting for a GPU in the test process: who goes first, when to look, and how it ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.holders import Record

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.wait import queued

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
ONE = f"gpu\n  uuid {UUIDS[0]}\n"
BUSY = f"{ONE}  compute 4321000 3500\n"
LONG_S = 30


def test_who_finds_the_queue_full_is_told_so(here: Here) -> None:
    """Who can't join the queue, as this user has no place left, does not wait in vain."""
    here.write(ONE)
    with ExitStack() as stack:
        stack.enter_context(here.rival("0"))
        locks = stack.enter_context(LockDirectory(str(here.locks)))
        for _ in range(MOST_OF_ONE_USER):
            entry = stack.enter_context(QueueEntry(locks, [], Record()))
            with locks.mutex():
                entry.join()
        with pytest.raises(reserve_gpu.LockError, match=f"{MOST_OF_ONE_USER} locks"):
            reserve_gpu.reserve(wait=LONG_S)
    assert not queued(here)


@pytest.mark.ipython
def test_a_call_in_a_notebook(here: Here) -> None:
    """reserve(wait=...) in a notebook shows what the magic shows, and progress=None nothing."""
    here.write(BUSY)
    shell = here.shell(is_notebook=True)
    shell.run("import reserve_gpu")
    for line in ("%reserve_gpu --wait 2s", "reserve_gpu.reserve(wait=2)"):
        assert any("Waiting for a GPU" in each["text/plain"] for each in shell.run(line).values)
    silent = shell.run("reserve_gpu.reserve(wait=0.1, progress=None)")
    assert "Waiting" not in silent.all
