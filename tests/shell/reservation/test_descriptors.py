"""What other code does to the descriptors of a process: closes all of them, or uses them up."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.ipython import magic
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.lock import Lock
from reserve_gpu.model.errors import TOO_MANY_FILES, LockError
from reserve_gpu.system import procfs
from tests.support.locked import held, texts
from tests.support.reserving import got, refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

RELOCKED = "Other code in this process closed the lock file of GPU{0}. GPU{0} has been locked again"
ROOM = 16  # descriptors; more than a reservation needs at once


def close_locks(here: Here) -> list[int]:
    """Close what this process has open in the lock directory, as code does that closes all."""
    closed = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{here.locks}/"):
                os.close(int(name))
                closed.append(int(name))
    return closed


# -- closed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])
@pytest.mark.parametrize(
    ("first", "then", "left"),
    [("0", "0", [0]), ("0", "0,1", [0, 1]), ("0,1", "1", [1]), ("0", "1", [1])],
    ids=["the same", "more", "less", "another"],
)
def test_closed_locks(
    here: Here, first: str, then: str, left: list[int], *, memory: str | None
) -> None:
    """What is asked for after other code closed the locks is locked, and nothing else is."""
    reserve_gpu.reserve(first, memory=memory)
    close_locks(here)
    assert (held(here), reserve_gpu.current()) == ([], None)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        again = reserve_gpu.reserve(then, memory=memory)
    assert [text[: len(RELOCKED.format(0))] for text in texts(caught)] == [
        RELOCKED.format(number) for number in first.split(",")
    ]
    assert (held(here), reserve_gpu.current()) == (left, again)
    reserve_gpu.release()
    assert held(here) == []


def test_closed_lock_at_the_end_of_a_cell(here: Here) -> None:
    """At the end of a cell what was closed is locked anew, and a line says so, once."""
    reservation = reserve_gpu.reserve("0")
    assert magic.end_cell() == []
    close_locks(here)
    (line,) = magic.end_cell()
    assert line.startswith(RELOCKED.format(0))
    assert (held(here), reserve_gpu.current()) == ([0], reservation)
    assert magic.end_cell() == []


def test_closed_lock_in_a_notebook(here: Here) -> None:
    """After the cell that closed the locks a line says that they were closed; then none does."""
    shell = here.shell()
    shell.run("%reserve_gpu 0")
    shell.shell.user_ns["close_locks"] = lambda: close_locks(here)
    assert shell.run("1").stderr == ""
    cell = shell.run("close_locks()")
    assert (cell.error, cell.stderr.count(RELOCKED.format(0)), held(here)) == (None, 1, [0])
    assert shell.run("1").stderr == ""


def test_closed_lock_that_another_has_now(here: Here) -> None:
    """Who has meanwhile locked what was closed keeps it; the old holder is told, and takes none."""
    got("0")
    close_locks(here)
    with here.rival("0"):
        with pytest.raises(LockError, match="GPU0, and the device is now reserved by"):
            reserve_gpu.reserve("0")
        (line,) = magic.end_cell()
        assert "the device is now reserved by" in line
        assert reserve_gpu.current() is None
    assert held(here) == []


def test_number_of_another_file_that_is_signed(here: Here) -> None:
    """Once the notebook is known nothing is written to a file that has the number of a lock."""
    got("0")
    number, _ = sorted(close_locks(here))
    letter = here.folder / "letter.txt"
    letter.write_text("dear all")
    with letter.open("r+") as file, here.rival("0"):
        if file.fileno() != number:
            os.dup2(file.fileno(), number)
        os.environ["JPY_SESSION_NAME"] = "/home/me/thesis.ipynb"
        magic.end_cell()
        assert letter.read_text() == "dear all"
        if file.fileno() != number:
            os.close(number)


# -- used up ---------------------------------------------------------------------------------------


@contextmanager
def free_descriptors(number: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest + 1, lowest) + ROOM, before[1]))
    fill: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fill.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(number):
            os.close(fill.pop())
        yield
    finally:
        for descriptor in fill:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def taken_whole(here: Here, uuid: str) -> str:
    """Return what comes of locking a device whole, in a word."""
    try:
        with LockDirectory(str(here.locks)) as directory, directory.mutex():
            directory.tickets()  # as every attempt begins
            lock = directory.lock_device(uuid, share=False)
    except LockError as error:
        return str(error)
    return "locked" if isinstance(lock, Lock) else "refused"


def test_many_busy_gpus_need_no_more_descriptors(here: Here) -> None:
    """With just enough descriptors for a reservation, a refusal names each of many GPUs."""
    here.write("gpu\n used 6000\n" * 32)
    with free_descriptors(procfs.DESCRIPTORS):
        text = refused()
    assert text.count(" busy ") == 32


def test_no_descriptor_to_see_a_sharer(here: Here) -> None:
    """With however few free descriptors a device that somebody shares is never locked whole."""
    uuid, outcomes = here.uuid("0"), []
    with here.rival("0", part_mib=1024):
        for number in range(ROOM):
            with free_descriptors(number):
                outcomes.append(taken_whole(here, uuid))
    assert list(dict.fromkeys(outcomes)) == [TOO_MANY_FILES, "refused"]
    assert taken_whole(here, uuid) == "locked"
