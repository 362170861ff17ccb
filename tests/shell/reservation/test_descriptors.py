"""Other code in the process closes all descriptors, or uses them up."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.ipython import magic
from reserve_gpu.model.errors import LockError
from tests.support.locked import held, texts
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here

RELOCKED = "GPU{0} has been locked again"


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
    [("0", "0,1", [0, 1]), ("0,1", "1", [1])],
    ids=["more", "less"],
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
