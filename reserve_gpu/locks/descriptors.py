"""The descriptors of this process's locks: closed in a fork, and never confused with others' files.

A child made by fork inherits the descriptors, and with them the locks, which would then outlive
this process. So the child closes them. It must not unlock them: that would free its parent's.

Other code may close all descriptors of a process: then a number comes to mean another file, or
another opening of the same. So this remembers what each number meant when we opened it.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING

from reserve_gpu.system import executor, watchdog
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Iterator

NONE = -1  # no descriptor

# By number: a serial number, then the file.
_opened: dict[int, tuple[object, ...]] = executor.survive_reload("opened", dict)
_serial = executor.survive_reload("serial", partial(count, 1))


def remember(descriptor: int) -> int:
    """Count the descriptor among ours; returns it. In `no_fork`, from its opening on."""
    _hook_fork()
    _opened[descriptor] = (next(_serial), *_identity(descriptor))
    return descriptor


def opening(descriptor: int) -> tuple[object, ...] | None:
    """Return what tells this opening from all others; None if the number is not ours any more."""
    known = _opened.get(descriptor)
    try:
        return known if known and known[1:] == _identity(descriptor) else None
    except OSError:
        return None


def close(descriptor: int) -> None:
    """Close the descriptor, if it is still ours."""
    with no_fork:
        if opening(descriptor):
            os.close(descriptor)
        _opened.pop(descriptor, None)


@contextmanager
def closing(descriptor: int) -> Iterator[None]:
    """Close the descriptor at the end of the block."""
    try:
        yield
    finally:
        close(descriptor)


@contextmanager
def process(pid: int) -> Iterator[int]:
    """Yield a pidfd of the process, closed at the end of the block. Raises OSError."""
    with no_fork:
        descriptor = remember(watchdog.open_process(pid))
    with closing(descriptor):
        yield descriptor


def adopt(descriptor: int) -> None:
    """Make one of ours of a descriptor that the program before this one has left open."""
    with no_fork:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no name
        remember(descriptor)


def _identity(descriptor: int) -> tuple[object, ...]:
    """Return which file it is, as nothing else that is open now has it."""
    status = os.fstat(descriptor)
    if stat.S_IFMT(status.st_mode):
        return status.st_dev, status.st_ino
    # A pidfd, epoll, eventfd and others share one inode; their links name what they are.
    return (os.readlink(f"/proc/self/fd/{descriptor}"),)


@cache
def _hook_fork() -> None:
    """Register the hook once; without it every lock would leak into every child."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in list(_opened):
        close(descriptor)
