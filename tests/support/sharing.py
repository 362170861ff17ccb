"""Helpers of tests: sharing."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from reserve_gpu.locks.directory import LockDirectory
from tests.support.locked import have

if TYPE_CHECKING:
    from tests.support.here import Here
UID = os.geteuid()


def sharer_files(here: Here, number: str = "0") -> list[str]:
    """Return the names of the files of those who share a GPU, without its UUID."""
    uuid = here.uuid(number)
    names = [path.name for path in here.locks.iterdir() if ".share-" in path.name]
    return sorted(name.removeprefix(uuid) for name in names)


def sharers(here: Here, count: int, owner: int = UID) -> ExitStack:
    """Make so many sharers of a GPU, of one user."""
    with ExitStack() as stack:
        for number in range(count):
            path = here.locks / f"{here.uuid('0')}.share-{owner}-{number}.lock"
            stack.enter_context(have(path))
            if owner != UID:
                os.chown(path, owner, owner)
        return stack.pop_all()


def holders_of(here: Here) -> int:
    """Return how many have the first GPU."""
    with LockDirectory(str(here.locks)) as directory, directory.mutex():
        return len(directory.holders_of(here.uuid("0")))
