"""The open descriptors of this process's locks, and what becomes of them when it forks.

A child made by fork would keep every lock alive, so it closes them; it must not unlock them, which
would free its parent's.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reserve_gpu import files
from reserve_gpu.errors import LockError
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

# Each with its file, as its number may come to mean another one, and the thread that opened it.
_known: dict[int, tuple[tuple[object, ...], int]] = {}
NONE = -1  # no descriptor
MAKING_ATTEMPTS = 200  # at a file that somebody is just making
POLL_S = 0.01
NO_THREAD = 0  # has opened what was open already
_hooked = False

_lock = threading.RLock()  # a signal handler may come in between and release


@contextmanager
def opening() -> Iterator[None]:
    """Keep this process from forking between the opening of a descriptor and its `note`."""
    _hook_fork()
    with _lock:
        yield


def open_lock(directory: int, name: str, path: str) -> int:
    """A descriptor of the lock file of that name, made if it is not there; one of ours.

    directory: its descriptor. path: what messages call the file. Raises LockError.
    """
    if "/" in name or name.startswith("."):  # it comes from the driver
        raise LockError(f"{shown(name)!r} can't be the name of a lock.")
    for _ in range(MAKING_ATTEMPTS):
        with opening():
            descriptor = files.open_file(directory, name, path)
            if descriptor is not None:
                return note(descriptor)
        time.sleep(POLL_S)
    raise LockError(f"{path} is not finished by whoever makes it.")


def note(descriptor: int) -> int:
    """Let a child made by fork close the descriptor; returns it."""
    _known[descriptor] = _file(descriptor), threading.get_ident()
    return descriptor


def keep_over_exec(descriptor: int) -> int:
    """Let the next program here have the descriptor, and what that starts; returns it."""
    os.set_inheritable(descriptor, True)  # noqa: FBT003 - it takes no name
    return note(descriptor)


def adopt(descriptor: int) -> None:
    """Make one of ours of a descriptor that the program before this one has left open."""
    with opening():
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no name
        _known[descriptor] = _file(descriptor), NO_THREAD


def is_ours(descriptor: int) -> bool:
    """Whether the number still means the file that we opened: somebody may have closed them all."""
    with suppress(OSError):
        known = _known.get(descriptor)
        return known is not None and _file(descriptor) == known[0]
    return False


def close(descriptor: int) -> None:
    """Close the descriptor, if it is ours."""
    with _lock:
        if is_ours(descriptor):
            os.close(descriptor)
        _known.pop(descriptor, None)


def close_strays(kept: Collection[int]) -> None:
    """Close what this thread has opened and, interrupted at a bad moment, would never close."""
    for descriptor, (_, thread) in list(_known.items()):
        if thread == threading.get_ident() and descriptor not in kept:
            close(descriptor)


def _file(descriptor: int) -> tuple[object, ...]:
    """What tells the open file from others."""
    found = os.fstat(descriptor)
    if stat.S_IFMT(found.st_mode):
        return files.identity(found)
    # One file to fstat are all for inotify, epoll, events and so on; their links name the kind.
    return (*files.identity(found), os.readlink(f"/proc/self/fd/{descriptor}"))


def _hook_fork() -> None:
    global _hooked
    with _lock:
        if not _hooked:
            os.register_at_fork(
                before=_lock.acquire,
                after_in_parent=_lock.release,
                after_in_child=_after_fork_in_child,
            )
            _hooked = True  # twice would do no harm, never would


def _after_fork_in_child() -> None:
    for descriptor in list(_known):
        close(descriptor)
    _lock.release()
