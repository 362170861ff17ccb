"""Other code in the process closes all descriptors, or uses them up."""

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
from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import TOO_MANY_FILES, LockError
from reserve_gpu.system import procfs
from tests.support.locked import held, texts
from tests.support.reserving import got, would_be_refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

RELOCKED = "GPU{0} has been locked again"
SPARE = 16  # more descriptors than a reservation needs at once


def close_locks(here: Here) -> list[int]:
    """Close this process's files in the lock directory, and return their descriptors."""
    closed = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{here.locks}/"):
                os.close(int(name))
                closed.append(int(name))
    return closed


@pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "part"])
@pytest.mark.parametrize(
    ("first", "then", "left"),
    [("0", "0,1", [0, 1]), ("0,1", "1", [1]), ("0", "1", [1])],
    ids=["more", "less", "another"],
)
def test_devices_with_closed_lock_files_are_locked_again_on_request(
    here: Here, first: str, then: str, left: list[int], *, memory: str | None
) -> None:
    """There is a warning for each of them, and only the requested devices stay locked."""
    reserve_gpu.reserve(first, memory=memory)
    close_locks(here)
    assert (held(here), reserve_gpu.current()) == ([], None)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        again = reserve_gpu.reserve(then, memory=memory)
    relocked = [RELOCKED.format(number) for number in first.split(",")]
    assert all(words in text for words, text in zip(relocked, texts(caught), strict=True))
    assert (held(here), reserve_gpu.current()) == (left, again)
    reserve_gpu.release()
    assert held(here) == []


def test_a_closed_lock_file_is_locked_again_after_the_cell(here: Here) -> None:
    """There is one warning, after the cell that closed the file."""
    shell = here.shell()
    shell.run("%reserve_gpu 0")
    shell.shell.user_ns["close_locks"] = lambda: close_locks(here)
    assert shell.run("1").stderr == ""
    cell = shell.run("close_locks()")
    assert (cell.error, cell.stderr.count(RELOCKED.format(0)), held(here)) == (None, 1, [0])
    assert shell.run("1").stderr == ""


def test_a_device_that_another_process_has_locked_since_is_lost(here: Here) -> None:
    """The request fails, and the cell ends with a message."""
    got("0")
    close_locks(here)
    with here.rival("0"):
        with pytest.raises(LockError, match="now reserved by"):
            reserve_gpu.reserve("0")
        (line,) = magic.end_cell()
        assert "now reserved by" in line
        assert reserve_gpu.current() is None
    assert held(here) == []


def test_nothing_is_written_to_a_file_with_the_descriptor_of_a_closed_lock(here: Here) -> None:
    """This includes the notebook's name, which is written when it becomes known."""
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


@contextmanager
def free_descriptors(number: int) -> Iterator[None]:
    """Let this process open only as many more files, until the end of the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest + 1, lowest) + SPARE, before[1]))
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


def lock_result(here: Here, uuid: str) -> str:
    """Lock a device whole, and return the outcome or the error's text."""
    try:
        with LockDirectory(str(here.locks)) as directory, directory.mutex():
            directory.tickets()  # as at the start of every attempt
            lock = directory.lock_device(uuid, share=False)
    except LockError as error:
        return str(error)
    return "locked" if isinstance(lock, Lock) else "refused"


def test_a_refusal_of_many_gpus_needs_no_more_descriptors(here: Here) -> None:
    here.write("gpu\n used 6000\n" * 32)
    with free_descriptors(procfs.DESCRIPTORS):
        rows = would_be_refused().rows
    assert [row.state for row in rows] == [State.BUSY] * 32


def test_a_shared_device_is_never_locked_whole_with_few_descriptors(here: Here) -> None:
    """The attempt fails instead, with any number of free descriptors."""
    uuid, outcomes = here.uuid("0"), []
    with here.rival("0", part_mib=1024):
        for number in range(SPARE):
            with free_descriptors(number):
                outcomes.append(lock_result(here, uuid))
    assert list(dict.fromkeys(outcomes)) == [TOO_MANY_FILES, "refused"]
    assert lock_result(here, uuid) == "locked"
