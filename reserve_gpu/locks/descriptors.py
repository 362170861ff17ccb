"""The descriptors of this process's locks: closed in a fork, and never confused with others' files.

A child made by fork inherits the descriptors, and with them the locks, which would then outlive
this process. So the child closes them. It must not unlock them: that would free its parent's.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NONE = -1  # no descriptor


class Opening:
    """One opening of a file by us, and what that file was then.

    Other code may close all descriptors of a process: then the number comes to mean another file,
    or another opening of the same.
    """

    def __init__(self, descriptor: int) -> None:
        self.identity = _identity(descriptor)


_opened: dict[int, Opening] = {}
# Reentrant, as a signal handler that reserves or releases may run while this thread has it.
_guard = threading.RLock()
_is_hooked = False


@contextmanager
def no_fork() -> Iterator[None]:
    """Keep this process from forking in the block: a child would get something half made."""
    _hook_fork()
    with _guard:
        yield


def remember(descriptor: int) -> int:
    """Count the descriptor among ours; returns it."""
    _opened[descriptor] = Opening(descriptor)
    return descriptor


def opening(descriptor: int) -> Opening | None:
    """What tells this opening of ours from a later one with the same number."""
    return _opened.get(descriptor)


def is_ours(descriptor: int) -> bool:
    """Whether the number still means the file that we opened."""
    with suppress(OSError):
        known = _opened.get(descriptor)
        return known is not None and known.identity == _identity(descriptor)
    return False


def close(descriptor: int) -> None:
    """Close the descriptor, if it is still ours."""
    with _guard:
        if is_ours(descriptor):
            os.close(descriptor)
        _opened.pop(descriptor, None)


def keep_over_exec(descriptor: int) -> None:
    """Leave the descriptor open for the program that this process becomes next."""
    os.set_inheritable(descriptor, True)  # noqa: FBT003 - it takes no name


def adopt(descriptor: int) -> None:
    """Make one of ours of a descriptor that the program before this one has left open."""
    with no_fork():
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no name
        remember(descriptor)


def _identity(descriptor: int) -> tuple[object, ...]:
    """What tells the open file from other files."""
    status = os.fstat(descriptor)
    if stat.S_IFMT(status.st_mode):
        return status.st_dev, status.st_ino
    # inotify, epoll, eventfd and others share one inode; their links name what they are.
    return status.st_dev, status.st_ino, os.readlink(f"/proc/self/fd/{descriptor}")


def _hook_fork() -> None:
    """Registering the hook twice is harmless; forgetting it leaks every lock into every child."""
    global _is_hooked
    if not _is_hooked and hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(
            before=_guard.acquire,
            after_in_parent=_guard.release,
            after_in_child=_close_all,
        )
        _is_hooked = True


def _close_all() -> None:
    for descriptor in list(_opened):
        close(descriptor)
    _guard.release()
